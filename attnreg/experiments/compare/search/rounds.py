"""A search: its runs, round by round, until its budget is spent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from attnreg.errors import InputError, UsageError
from attnreg.experiments.compare.board import Board
from attnreg.experiments.compare.folder import OutputFolder
from attnreg.experiments.compare.held_out import HeldOut, Trial, best
from attnreg.experiments.compare.launch import Launcher
from attnreg.experiments.compare.method import OF_ALL, Method
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.compare.search.space import Space
from attnreg.experiments.compare.search.trials import Trials
from attnreg.experiments.results.document import say


@dataclass(frozen=True)
class Search:
    """A search for the best options and the best composition of providers.

    ``runs`` is the budget; ``prune_p`` the p below which a trial is stopped.
    """

    space: Space
    held_out: HeldOut
    runs: int
    sampler_seed: int
    prune_p: float

    def check(self, model: Any) -> None:
        """Check the space, the folder and the data; providers are built with extreme values for the task's model."""
        from attnreg.regularizer.expressions import parse_provider  # late: it imports torch

        if self.runs < self.held_out.seeds:
            raise UsageError(f"Expected --runs of at least --seeds ({self.held_out.seeds}), got {self.runs}.")
        for flag in self.space.options:
            if (name := flag.lstrip("-").replace("-", "_")) in OF_ALL or (name == "provider" and self.space.providers):
                raise UsageError(f"{flag} cannot be in the search space.")
        self._output.check()
        old = self._output.read()
        if different := [name for name, value in self._settings.items() if old and old.get(name) != value]:
            raise InputError(
                f"The search in {self._output.path} has other {', '.join(different)}. Give the same, or another "
                "--output-dir; only --runs may differ."
            )
        for text in self.space.extremes():
            expression = self.held_out.run(Method(text), 0).settings.own.get("provider")
            if expression is not None and model is not None:
                parse_provider(expression, model, total_steps=1)
        self.held_out.run(Method("finetune"), 0).check_data()

    @property
    def _settings(self) -> dict[str, Any]:
        """What must be the same when a search goes on."""
        options = {name: value if value is True else str(value) for name, value in self.held_out.options.items()}
        held_out = {"options": options, "seeds": self.held_out.seeds, "search_rows": self.held_out.rows}
        drawn = {"sampler_seed": self.sampler_seed, "prune_p": self.prune_p}
        return {"space": self.space.content, **held_out, **drawn}

    @property
    def _output(self) -> OutputFolder:
        return OutputFolder(self.held_out.folder, "search", "search.json")

    @contextmanager
    def begun(self) -> Iterator[Trials]:
        """Create and lock the folder for the duration of the block; yield the trials."""
        with self._output.locked():
            self._output.write(self._settings)
            path = self._output.path / "optuna.log"
            trials = Trials(path, self.space, self.held_out.seeds, self.sampler_seed, self.prune_p)
            for run in self.known(trials):
                run.check()
                if changed := run.changed:
                    raise InputError(
                        f"{' and '.join(changed).capitalize()} changed since the search in {self._output.path} began, "
                        "so its scores cannot be compared: choose another --output-dir."
                    )
            yield trials

    def make(self, trials: Trials, launch: Launcher, jobs: int, console: Console) -> None:
        """Make runs until the budget is spent, or nothing is left to try.

        The runs of a round are told in order, so that the draws do not depend on how long they take.
        """
        while pending := self._round(trials, jobs, console):
            running = {trial.number: trial for trial in trials.running}
            runs = {number: self.held_out.run(running[number].method, seed) for number, seed in pending}
            if unfinished := [run for run in runs.values() if not run.finished]:
                with Board(self.known(trials), jobs, console, budget=self.runs) as board:
                    launch(unfinished, board)
            for number, run in runs.items():
                run.tidy()
                say(console, *self._told(trials, running[number], run))

    def _round(self, trials: Trials, jobs: int, console: Console) -> list[tuple[int, int]]:
        """Return the trials to run now, each with its next seed; what a kill has left of the last round comes first."""
        for trial in trials.running:
            trials.settle(trial.number)
        left = {(trial.number, len(trial.scores)) for trial in trials.running}
        if rest := [entry for entry in trials.round if entry in left]:
            return rest
        seeds = self.held_out.seeds
        while len(trials.running) < jobs:
            reserved = sum(seeds - len(trial.scores) for trial in trials.running)
            if trials.runs + reserved + seeds > self.runs:  # the budget is not enough for another trial
                break
            if (new := trials.ask()) is None:
                say(console, "The search space has nothing left to try.")
                break
            say(console, f"trial-{new.number}: {new.method.text}")
        trials.round = [(trial.number, len(trial.scores)) for trial in trials.running]
        return trials.round

    def _told(self, trials: Trials, trial: Trial, run: PlannedRun) -> Iterator[str]:
        """Tell how a run has ended; say what that means for its trial."""
        name, leader = f"trial-{trial.number}", best(trials.all)
        if not run.finished:
            reason = run.failure or "no output"
            trials.fail(trial, reason)
            yield f"{name} failed: {reason} (see {run.log})"
            return
        trial = trials.report(trial, run.score)
        other, top = ("", -math.inf) if leader is None else (f"trial-{leader.number}", leader.mean)
        if trial.state == "stopped":
            yield f"{name} stopped after {len(trial.scores)} seeds: it is worse than {other}."
        elif trial.state == "complete":
            rank = ", the best so far" if trial.mean > top else f" (best: {other}, {top:.4f})"
            yield f"{name}: mean {trial.mean:.4f}{rank}"

    def known(self, trials: Trials) -> list[PlannedRun]:
        """Return the runs of all trials so far, and the next one of each running trial."""
        made = [(each.method, len(each.scores) + (each.state in ("running", "failed"))) for each in trials.all]
        return [run for method, count in made for run in self.held_out.runs(method)[:count]]
