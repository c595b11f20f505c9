"""A search: its trials, which optuna draws, their runs, round by round, and the report."""

from __future__ import annotations

import json
import math
import random
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from attnreg._files import write_text
from attnreg.errors import InputError, UsageError, counted
from attnreg.experiments.compare.group import NOTHING_LEARNED, Group
from attnreg.experiments.compare.make import Board, Launcher
from attnreg.experiments.compare.method import OF_ALL, Method, Winner, typed_words
from attnreg.experiments.compare.planned import (
    FIRST_SEED,
    KILLED,
    HeldOut,
    PlannedRun,
    State,
    Trial,
    best,
    score_cells,
)
from attnreg.experiments.compare.search.space import PLAIN, Space
from attnreg.experiments.folder.history import rank
from attnreg.experiments.folder.run_folder import OutputFolder
from attnreg.experiments.options.option import flag_of
from attnreg.experiments.options.provider import make_provider
from attnreg.experiments.results import document
from attnreg.experiments.results.document import Block, Code, Heading, Paragraph, Table, say

try:
    import optuna
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState
except ImportError as error:
    raise InputError("attnreg search needs optuna: pip install optuna.") from error

RANDOM_TRIALS = 6  # before the sampler models the scores; a search has few trials
REPEATS = 50  # draws in a row of methods that were drawn before; then as many at random, then the space is exhausted
NOTHING = "The best trial is plain fine-tuning itself."


class Trials:
    """The trials of a search, drawn by optuna. A file keeps the events, so that a killed search can go on.

    The draws follow from earlier events, so the file only says when there was a draw, and how trials ended.
    """

    def __init__(self, path: Path, space: Space, sampler_seed: int) -> None:
        self._path, self._space, self._sampler_seed = path, space, sampler_seed
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        warnings.simplefilter("ignore", ExperimentalWarning)  # of parts of the sampler
        self._study = optuna.create_study(direction="maximize")
        for start in space.starts():
            self._study.enqueue_trial(start)
        #: the trials that have been drawn, without repeated ones
        self.all: list[Trial] = []
        self._optuna_trials: list[optuna.trial.Trial] = []  # in the order of `all`
        self._draws = self._repeats = 0  # all draws, and the latest ones in a row that were not new
        self._events: list[Any] = []
        try:
            for event in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
                self._draw() if event is None else self._end(*event)
                self._events.append(event)
        except (OSError, ValueError, TypeError, IndexError) as error:
            raise InputError(f"Cannot read the trials in {path}: {error!r}.") from error

    def next_round(self, size: int, limit: int) -> list[Trial]:
        """Return the trials of a round: unfinished trials of a killed search, and new ones, up to ``limit`` in all.

        optuna learns the scores of a round once it is full, so that the draws do not depend on how long runs take.
        """
        while len(self.all) < limit:
            is_full = len(self.all) % size == 0 and any(trial.state == "running" for trial in self.all)
            is_new = False
            while not (is_full or is_new) and self._repeats < 2 * REPEATS:
                is_new = self._draw()
                self._keep(None)
            if not is_new:  # if the round is not full, the space seems exhausted
                break
        return [trial for trial in self.all if trial.state == "running"]

    def tell(self, trial: Trial, scores: Sequence[float], failure: str | None) -> Trial:
        """End a trial with its scores by seed, or with the reason for the failure of a run."""
        self._end(trial.number, list(scores), failure)
        self._keep([trial.number, list(scores), failure])
        return self.all[trial.number]

    def _draw(self) -> bool:
        """Draw a trial; return whether its method is new."""
        # A sampler per trial, whose seed depends on nothing else, so that a search that goes on draws the same trials.
        generator = random.Random(f"{self._sampler_seed} {self._draws}")
        seed, start = generator.getrandbits(31), RANDOM_TRIALS if self._repeats < REPEATS else sys.maxsize
        self._study.sampler = TPESampler(n_startup_trials=start, seed=seed, constant_liar=True)
        optuna_trial = self._study.ask()
        method = self._space.draw(optuna_trial, generator)
        is_new = all(method != trial.method.text for trial in self.all)
        self._draws, self._repeats = self._draws + 1, 0 if is_new else self._repeats + 1
        if is_new:
            number = len(self.all)
            self.all.append(Trial(number, Method(method, f"trial-{number}"), [], "running"))
            self._optuna_trials.append(optuna_trial)
        else:
            self._study.tell(optuna_trial, state=TrialState.FAIL)  # optuna learns nothing from a repeated trial
        return is_new

    def _end(self, number: int, scores: list[float], failure: str | None) -> None:
        result: dict[str, Any] = {"values": fmean(scores)} if failure is None else {"state": TrialState.FAIL}
        self._study.tell(self._optuna_trials[number], **result)
        state: State = "complete" if failure is None else "failed"
        self.all[number] = replace(self.all[number], scores=scores, state=state, failure=failure)

    def _keep(self, event: Any) -> None:
        self._events.append(event)
        write_text(self._path, json.dumps(self._events))


@dataclass(frozen=True)
class Search:
    """A search for the best options and the best composition of providers.

    ``runs`` is the budget, of which a trial takes one per seed.
    """

    space: Space
    held_out: HeldOut
    runs: int
    sampler_seed: int

    def check(self, model: Any) -> None:
        """Check the space, the folder and the data; providers are built with extreme values for the task's model."""
        if self.runs < self.held_out.seeds:
            raise UsageError(f"Expected --runs of at least --seeds ({self.held_out.seeds}), got {self.runs}.")
        for flag in self.space.options:
            if (name := flag.lstrip("-").replace("-", "_")) in OF_ALL or (name == "provider" and self.space.providers):
                raise UsageError(f"{flag} cannot be in the search space.")
            if name in self.held_out.options:
                raise UsageError(f"{flag} is in the search space: remove it from the command line, or from --space.")
        self._output.check()
        for text in self.space.extremes():
            expression = self.held_out.runs(Method(text))[0].settings.own.get("provider")
            if expression is not None and model is not None:
                make_provider(expression, model, total_steps=1)

    @property
    def other_options(self) -> str | None:
        """The options in which the search in the folder differs, if any; ``--runs`` may differ."""
        saved, new = ({**settings.pop("options", {}), **settings} for settings in (self._output.read(), self._settings))
        names = [name for name in {**new, **saved} if saved and saved.get(name) != new.get(name)]
        return f"other {', '.join(map(flag_of, names))}" if names else None

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings that must be the same when a search goes on."""
        options = {name: value if value is True else str(value) for name, value in self.held_out.options.items()}
        held_out = {"options": options, "seeds": self.held_out.seeds, "search_rows": self.held_out.rows}
        return {"space": self.space.content, **held_out, "sampler_seed": self.sampler_seed}

    @property
    def _output(self) -> OutputFolder:
        return OutputFolder(self.held_out.folder, "search", "search.json")

    @contextmanager
    def begun(self) -> Iterator[Trials]:
        """Create and lock the folder for the duration of the block; yield the trials."""
        with self._output.locked():
            self._output.write(self._settings)
            trials = Trials(self._output.path / "trials.json", self.space, self.sampler_seed)
            for run in self.runs_of(trials):
                run.check()
            yield trials

    def make(self, trials: Trials, launch: Launcher, jobs: int, console: Console) -> None:
        """Make runs until the budget is spent, or nothing is left to try."""
        limit = self.runs // self.held_out.seeds
        while unscored := trials.next_round(jobs, limit):
            say(console, *(f"trial-{trial.number}: {trial.method.text}" for trial in unscored))
            runs_by_trial = [self.held_out.runs(trial.method) for trial in unscored]
            if unfinished := [run for runs in runs_by_trial for run in runs if not run.finished]:
                with Board(self.runs_of(trials), console, total=limit * self.held_out.seeds) as board:
                    launch(unfinished, board)
                    if killed := [run for run in unfinished if run.failure == KILLED]:
                        launch(killed, board)  # once more: several at a time may have had too little memory
            for trial, runs in zip(unscored, runs_by_trial, strict=True):
                for run in runs:
                    run.tidy()
                say(console, self._end(trials, trial, runs))
        if len(trials.all) < limit:
            say(console, "The search space has nothing left to try.")

    def _end(self, trials: Trials, trial: Trial, runs: Sequence[PlannedRun]) -> str:
        """Tell optuna how the runs of a trial have ended; return a sentence that says it."""
        name, leader = f"trial-{trial.number}", best(trials.all)
        scores, failed = [run.score for run in runs if run.finished], [run for run in runs if not run.finished]
        failure = (failed[0].failure or "no output") if failed else None
        if failure is None and any(map(math.isnan, scores)):
            failed, failure = [*runs], "its score is NaN"
        trial = trials.tell(trial, scores, failure)
        if failed:
            return f"{name} failed: {failure} (see {failed[0].log})"
        if leader is None or trial.mean > leader.mean:
            return f"{name}: mean {trial.mean:.4f}, the best so far"
        return f"{name}: mean {trial.mean:.4f} (best: trial-{leader.number}, {leader.mean:.4f})"

    def runs_of(self, trials: Trials) -> list[PlannedRun]:
        """Return the runs of all trials so far."""
        return [run for trial in trials.all for run in self.held_out.runs(trial.method)]


def write_report(search: Search, trials: Trials, command: Sequence[str]) -> list[str | Table]:
    """Write the winner and the report; return the texts and tables to show, none if no trial is complete.

    ``command`` are the words of the search's command. Raises an ``InputError`` if trials have failed and none is
    complete.
    """
    failures = [f"trial-{trial.number} failed: {trial.failure}" for trial in trials.all if trial.failure is not None]
    if (winning := best(trials.all)) is None:
        if failures:
            raise InputError(f"No trial has finished. {failures[0]}")
        return []
    held_out = search.held_out
    ended = [run for run in search.runs_of(trials) if run.finished or run.failure is not None]
    summary = _summary(search, trials, ended)
    run, *_ = runs = held_out.runs(winning.method)
    if not Group.of(winning.method.text, runs).has_learned:
        summary = f"{summary} {NOTHING_LEARNED}"
    counts = len(trials.all), len(ended), held_out.seeds, held_out.rows
    winner = Winner(winning.method.text, winning.mean, run.settings.task, *counts)
    folder = held_out.folder
    winner.write(folder)
    ranked = sorted(trials.all, key=lambda trial: -rank(trial.mean) if trial.state == "complete" else math.inf)
    metric = str(run.reader.result["metric"]).replace("_", " ")
    compare = shlex.join(["attnreg", "compare", "finetune", f"best=@{folder}", *typed_words(held_out.options)])
    too_high = "The best mean of many is too high by chance. Compare the winner on dev, with other seeds:"
    advice: list[Block] = [Paragraph(NOTHING)] if winner.method == PLAIN else [Paragraph(too_high), Code(compare)]
    blocks: list[Block] = [
        Heading(f"Search on {winner.task}: {metric} on held-out rows"),
        Code(shlex.join(command)),
        Paragraph(summary),
        Paragraph(
            f"A trial is scored on {held_out.rows} rows held out from train, with seeds from "
            f"{FIRST_SEED} on ({held_out.seeds} in all). Dev was not used. The sampler's seed is {search.sampler_seed}."
        ),
        Heading("Winner"),
        Code(winner.method),
        *advice,
        Heading("All trials"),
        _table(ranked),
        *map(Paragraph, failures),
    ]
    document.save(blocks, folder)
    saved = f"Report saved to {folder}/report.md and report.html."
    said = [NOTHING] if winner.method == PLAIN else ["Compare the winner:", compare]
    return [_table(ranked[:5]), summary, *said, saved]


def _summary(search: Search, trials: Trials, ended: Sequence[PlannedRun]) -> str:
    """Say how many trials and runs there were, and what they cost."""
    states = [trial.state for trial in trials.all]
    names = {"complete": "complete", "failed": "failed", "running": "unfinished"}
    counts = ", ".join(f"{states.count(state)} {name}" for state, name in names.items() if state in states)
    minutes = sum(run.seconds for run in ended if run.finished) / 60
    most = f" of at most {search.runs}" * (len(ended) <= search.runs)  # which a search that goes on may lower
    runs = f"{counted(len(ended), 'run')}{most}"
    return f"{counted(len(states), 'trial')} ({counts}) in {runs}. The runs took {minutes:.1f} min, one after another."


def _table(trials: Sequence[Trial]) -> Table:
    rows = [[str(trial.number), *score_cells(trial.scores), trial.state, trial.method.text] for trial in trials]
    return Table(["trial", "mean", f"seeds, from {FIRST_SEED}", "state", "method"], rows, texts=(0, 2, 3, 4))
