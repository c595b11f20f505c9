"""A search: its runs, round by round, until its budget is spent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnreg._files import exclusive, replaced_file
from attnreg.errors import InputError, UsageError
from attnreg.experiments.compare.method import Method, values_of
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.compare.search.space import Space
from attnreg.experiments.compare.search.trials import Trials, Tried
from attnreg.experiments.compare.study import OF_ALL, SEARCH_SEED
from attnreg.experiments.compare.winner import Winner
from attnreg.experiments.folder.reader import LOCK

_FILE = "search.json"
Launch = Callable[[Sequence[PlannedRun], Sequence[PlannedRun]], None]  # runs to make, and all runs so far


@dataclass(frozen=True)
class Search:
    """A search for the best options and the best composition of providers.

    Args:
        space: what is varied.
        layers: the number of layers of the model, if known.
        options: options of every run, as typed.
        folder: the output folder.
        runs: the budget: the largest number of runs.
        seeds: runs per complete trial, with seeds from 1000.
        rows: rows held out from train to score trials on.
        sampler_seed: the seed of the draws.
        prune_p: the p below which a trial is stopped.
    """

    space: Space
    layers: int | None
    options: Sequence[str]
    folder: Path
    runs: int
    seeds: int
    rows: int
    sampler_seed: int
    prune_p: float

    def check(self) -> None:
        """Check the space, the options and the folder, before any run starts.

        Raises:
            UsageError: if the space has an option that all trials must share, or an option is wrong.
            InputError: if the folder holds other files or another search, or the data has changed since.
        """
        if self.runs < self.seeds:
            raise UsageError(f"Expected --runs of at least --seeds ({self.seeds}), got {self.runs}.")
        for flag in self.space.options:
            if (name := flag.lstrip("-").replace("-", "_")) in OF_ALL or (name == "provider" and self.space.candidates):
                raise UsageError(f"{flag} cannot be in the search space.")
        held = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if set(held) - {LOCK} and _FILE not in held:
            raise InputError(f"--output-dir {self.folder} holds files but no search: choose another folder.")
        if _FILE in held:
            try:
                old = json.loads((self.folder / _FILE).read_text(encoding="utf-8"))
                different = [name for name, value in self._settings.items() if old[name] != value]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(f"Cannot read the search from {self.folder / _FILE}: {error!r}.") from error
            if different:
                raise InputError(
                    f"The search in {self.folder} has other {', '.join(different)}. Give the same, or another "
                    "--output-dir; only --runs may differ."
                )

    def check_extremes(self) -> Iterator[str | None]:
        """Check the lowest and highest values; yield the provider expression of each, to be built for the model.

        Raises:
            UsageError: if an option or a value is wrong.
        """
        for text in self.space.extremes(self.layers):
            yield self._run(Method(text), SEARCH_SEED).settings.own.get("provider")

    def check_data(self) -> None:
        """Read the data of ``--data-dir``, to tell before any run what is wrong with it.

        Raises:
            InputError: if the data cannot be read, does not fit the task, or has too few rows.
        """
        self._run(Method("finetune"), SEARCH_SEED).check_data()

    @property
    def _settings(self) -> dict[str, Any]:
        """What must be the same when a search goes on."""
        return {
            "space": self.space.content,
            "options": values_of(self.options),  # in any order
            "seeds": self.seeds,
            "search_rows": self.rows,
            "sampler_seed": self.sampler_seed,
            "prune_p": self.prune_p,
        }

    @contextmanager
    def begun(self) -> Iterator[Trials]:
        """Create and lock the folder for the duration of the block; yield the trials.

        Raises:
            InputError: if the folder cannot be written to, or another search has locked it.
        """
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                alone = stack.enter_context(exclusive(self.folder / LOCK))
            except OSError as error:
                raise InputError(f"Cannot write to --output-dir: {error}.") from error
            if not alone:
                raise InputError(
                    f"Another search is writing to {self.folder}: wait for it, or choose another --output-dir."
                )
            with replaced_file(self.folder / _FILE) as file:
                json.dump(self._settings, file, indent=2)
            path = self.folder / "optuna.log"
            trials = Trials(path, self.space, self.layers, self.seeds, self.sampler_seed, self.prune_p)
            self._check_runs(trials)
            yield trials

    def _check_runs(self, trials: Trials) -> None:
        for trial in trials.all:
            for run in self.runs_of(trial):
                run.check()
                if changed := run.changed:
                    raise InputError(
                        f"{' and '.join(changed).capitalize()} changed since the search in {self.folder} began, so its "
                        "scores cannot be compared: choose another --output-dir."
                    )

    def make(self, trials: Trials, jobs: int, launch: Launch, say: Callable[[str], None]) -> None:
        """Make runs until the budget is spent, or nothing is left to try.

        The runs of a round are made at the same time, one per trial, and their scores are told in order. So the draws
        do not depend on how long the runs take.
        """
        while pending := self._round(trials, jobs, say):
            running = {trial.number: trial for trial in trials.running}
            runs = {number: self.run(running[number], seed) for number, seed in pending}
            known = [run for trial in trials.all for run in self.runs_of(trial)]
            if unfinished := [run for run in runs.values() if not run.finished]:
                launch(unfinished, known)
            for number, run in runs.items():
                run.tidy()
                self._tell(trials, running[number], run, say)

    def _round(self, trials: Trials, jobs: int, say: Callable[[str], None]) -> list[tuple[int, int]]:
        """Return the trials to run now, each with its next seed; what a kill has left of the last round comes first."""
        for trial in trials.running:
            trials.settle(trial.number)
        left = {(trial.number, len(trial.scores)) for trial in trials.running}
        if rest := [entry for entry in trials.round if entry in left]:
            return rest
        while len(trials.running) < jobs and self._affords(trials):
            if (new := trials.ask()) is None:
                say("The search space has nothing left to try.")
                break
            say(f"trial-{new.number}: {new.method}")
        trials.round = [(trial.number, len(trial.scores)) for trial in trials.running]
        return trials.round

    def _affords(self, trials: Trials) -> bool:
        """Whether the budget is enough for another trial, besides what the present ones may need."""
        reserved = sum(self.seeds - len(trial.scores) for trial in trials.running)
        return trials.runs + reserved + self.seeds <= self.runs

    def _tell(self, trials: Trials, trial: Tried, run: PlannedRun, say: Callable[[str], None]) -> None:
        best = trials.best
        if not run.finished:
            reason = run.failure or "no output"
            trials.fail(trial, reason)
            say(f"trial-{trial.number} failed: {reason} (see {run.log})")
            return
        trial = trials.report(trial, run.score)
        if trial.state == "stopped":
            assert best is not None
            say(f"trial-{trial.number} stopped after {len(trial.scores)} seeds: it is worse than trial-{best.number}.")
        elif trial.state == "complete":
            say(f"trial-{trial.number}: mean {trial.mean:.4f}{_rank(trial, best)}")

    def run(self, trial: Tried, seed: int) -> PlannedRun:
        """Return a run of a trial, by the number of its seed."""
        return self._run(Method(trial.method, f"trial-{trial.number}"), SEARCH_SEED + seed)

    def runs_of(self, trial: Tried) -> list[PlannedRun]:
        """Return the runs that a trial has made, and the next one of a running trial."""
        count = len(trial.scores) + (trial.state in ("running", "failed"))
        return [self.run(trial, seed) for seed in range(min(count, self.seeds))]

    def _run(self, method: Method, seed: int) -> PlannedRun:
        options = (*self.options, "--validation-rows", str(self.rows))
        return PlannedRun(method, "search", seed, options, self.folder / "search" / method.slug / f"seed{seed}")

    def winner(self, trials: Trials) -> Winner | None:
        """Return the best method and what finding it took; ``None`` before any trial is complete."""
        if (best := trials.best) is None:
            return None
        task = self.run(best, 0).settings.task
        return Winner(best.method, best.mean, task, len(trials.all), trials.runs, self.seeds, self.rows)


def _rank(trial: Tried, best: Tried | None) -> str:
    if best is None or trial.mean > best.mean:
        return ", the best so far"
    return f" (best: trial-{best.number}, {best.mean:.4f})"
