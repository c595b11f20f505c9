"""A search: its trials, which optuna draws and keeps in a file, their runs, round by round, and the report."""

from __future__ import annotations

import math
import random
import shlex
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from attnreg.errors import InputError, UsageError
from attnreg.experiments.compare.held_out import FIRST_SEED, HeldOut, State, Trial, best, score_cells
from attnreg.experiments.compare.launch import Board, Launcher
from attnreg.experiments.compare.method import OF_ALL, Method, Winner, typed_words
from attnreg.experiments.compare.planned import OutputFolder, PlannedRun
from attnreg.experiments.compare.search.space import Space
from attnreg.experiments.folder.history import rank
from attnreg.experiments.options.option import flag_of
from attnreg.experiments.results import document
from attnreg.experiments.results.document import Block, Code, Heading, Paragraph, Table, say

try:
    import optuna
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import TPESampler
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise InputError("attnreg search needs optuna: pip install optuna.") from error

RANDOM_TRIALS = 6  # before the sampler models the scores; a search has few trials
REPEATS = 50  # draws in a row of methods that were drawn before; then as many at random, then the space is exhausted
_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
}


class Trials:
    """The trials in optuna's journal, from which a search that was killed goes on as if it had not been."""

    def __init__(self, path: Path, space: Space, sampler_seed: int) -> None:
        self._space, self._sampler_seed = space, sampler_seed
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        warnings.simplefilter("ignore", ExperimentalWarning)  # of parts of the sampler
        _mend(path)
        storage = JournalStorage(JournalFileBackend(str(path)))
        self._study = optuna.create_study(
            storage=storage, study_name="search", direction="maximize", load_if_exists=True
        )
        for start in space.starts()[len(self._study.get_trials(deepcopy=False)) :]:  # a kill may have left a part
            self._study.enqueue_trial(start)

    @property
    def all(self) -> list[Trial]:
        """The trials that have been drawn, without repeated ones."""
        return [_tried(number, trial) for number, trial in enumerate(self._frozen)]

    @property
    def _frozen(self) -> list[FrozenTrial]:
        """Optuna's records of these trials."""
        return [trial for trial in self._study.get_trials(deepcopy=False) if "method" in trial.user_attrs]

    def next_round(self, size: int, most: int) -> list[Trial]:
        """Return the trials of a round: those that a kill has left, and new ones, up to ``most`` trials in all.

        A round is only told once it is full, so that the draws do not depend on how long the runs take.
        """
        while len(trials := self.all) < most:
            full = len(trials) % size == 0 and any(trial.state == "running" for trial in trials)
            known, drawn = {trial.method.text for trial in trials}, False
            while not (full or drawn) and self._repeats < 2 * REPEATS:
                drawn = self._draw(known)
            if not drawn:  # if the round is not full, the space seems exhausted
                break
        return [trial for trial in trials if trial.state == "running"]

    @property
    def _repeats(self) -> int:
        """The number of last draws in a row that were not new."""
        last = max((trial.number for trial in self._frozen), default=-1)
        trials = self._study.get_trials(deepcopy=False)
        return sum(trial.number > last for trial in trials if trial.state.is_finished())

    def _draw(self, known: Collection[str]) -> bool:
        """Draw a trial, or finish the draw that a kill has cut off; return whether its method is new."""
        frozen = self._study.get_trials(deepcopy=False)
        cut = [trial for trial in frozen if trial.state == TrialState.RUNNING and "method" not in trial.user_attrs]
        number = cut[0].number if cut else sum(trial.state != TrialState.WAITING for trial in frozen)
        # A sampler per trial, whose seed depends on nothing else: so a search that goes on draws the same.
        order = random.Random(f"{self._sampler_seed} {number}")
        seed, start = order.getrandbits(31), RANDOM_TRIALS if self._repeats < REPEATS else sys.maxsize
        self._study.sampler = TPESampler(n_startup_trials=start, seed=seed, constant_liar=True)
        trial = self._opened(cut[0]) if cut else self._study.ask()
        method = self._space.draw(trial, order)
        if method in known:
            self._study.tell(trial, state=TrialState.FAIL)  # optuna learns nothing from a repeated one
        else:
            trial.set_user_attr("method", method)
        return method not in known

    def tell(self, tried: Trial, scores: Sequence[float], failure: str | None) -> Trial:
        """End a trial with its scores by seed, or with the reason why a run has failed."""
        trial = self._opened(self._frozen[tried.number])
        trial.set_user_attr("told", {"scores": list(scores), "failure": failure})
        if failure is None:
            self._study.tell(trial, fmean(scores))
        else:
            self._study.tell(trial, state=TrialState.FAIL)
        return self.all[tried.number]

    def _opened(self, trial: FrozenTrial) -> optuna.trial.Trial:
        return optuna.trial.Trial(self._study, trial._trial_id)  # also for a trial of an earlier process


def _tried(number: int, trial: FrozenTrial) -> Trial:
    method = Method(trial.user_attrs["method"], f"trial-{number}")
    told = {"scores": [], "failure": None, **trial.user_attrs.get("told", {})}
    return Trial(number, method, told["scores"], _STATES[trial.state], told["failure"])


def _mend(path: Path) -> None:
    """Remove what a kill may have left of optuna: a line that was cut off, and a lock. The folder itself is locked."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


@dataclass(frozen=True)
class Search:
    """A search for the best options and the best composition of providers.

    ``runs`` is the budget, of which each trial takes one for each seed.
    """

    space: Space
    held_out: HeldOut
    runs: int
    sampler_seed: int

    def check(self, model: Any) -> None:
        """Check the space, the folder and the data; providers are built with extreme values for the task's model."""
        from attnreg.regularizer.expressions import parse_provider  # late: it imports torch

        if self.runs < self.held_out.seeds:
            raise UsageError(f"Expected --runs of at least --seeds ({self.held_out.seeds}), got {self.runs}.")
        for flag in self.space.options:
            if (name := flag.lstrip("-").replace("-", "_")) in OF_ALL or (name == "provider" and self.space.providers):
                raise UsageError(f"{flag} cannot be in the search space.")
        self._output.check()
        for text in self.space.extremes():
            expression = self.held_out.runs(Method(text))[0].settings.own.get("provider")
            if expression is not None and model is not None:
                parse_provider(expression, model, total_steps=1)
        self.held_out.runs(Method("finetune"))[0].check_data()

    @property
    def other_options(self) -> str | None:
        """The options that were others for the search in the folder, if any; it may have had other ``--runs``."""
        old, new = ({**made.pop("options", {}), **made} for made in (self._output.read(), self._settings))
        names = [name for name in {**new, **old} if old and old.get(name) != new.get(name)]
        return f"other {', '.join(map(flag_of, names))}" if names else None

    @property
    def _settings(self) -> dict[str, Any]:
        """What must be the same when a search goes on."""
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
            trials = Trials(self._output.path / "optuna.log", self.space, self.sampler_seed)
            for run in self.known(trials):
                run.check()
            yield trials

    def make(self, trials: Trials, launch: Launcher, jobs: int, console: Console) -> None:
        """Make runs until the budget is spent, or nothing is left to try."""
        most = self.runs // self.held_out.seeds
        while tried := trials.next_round(jobs, most):
            say(console, *(f"trial-{trial.number}: {trial.method.text}" for trial in tried))
            runs = [self.held_out.runs(trial.method) for trial in tried]
            if unfinished := [run for some in runs for run in some if not run.finished]:
                with Board(self.known(trials), console, total=most * self.held_out.seeds) as board:
                    launch(unfinished, board)
            for trial, some in zip(tried, runs, strict=True):
                for run in some:
                    run.tidy()
                say(console, self._told(trials, trial, some))
        if len(trials.all) < most:
            say(console, "The search space has nothing left to try.")

    def _told(self, trials: Trials, trial: Trial, runs: Sequence[PlannedRun]) -> str:
        """Tell optuna how the runs of a trial have ended; say it."""
        name, leader = f"trial-{trial.number}", best(trials.all)
        scores, failed = [run.score for run in runs if run.finished], [run for run in runs if not run.finished]
        failure = (failed[0].failure or "no output") if failed else None
        if failure is None and any(map(math.isnan, scores)):
            failed, failure = [*runs], "its score is no number"
        trial = trials.tell(trial, scores, failure)
        if failed:
            return f"{name} failed: {failure} (see {failed[0].log})"
        if leader is None or trial.mean > leader.mean:
            return f"{name}: mean {trial.mean:.4f}, the best so far"
        return f"{name}: mean {trial.mean:.4f} (best: trial-{leader.number}, {leader.mean:.4f})"

    def known(self, trials: Trials) -> list[PlannedRun]:
        """Return the runs of all trials so far."""
        return [run for trial in trials.all for run in self.held_out.runs(trial.method)]


def write_report(search: Search, trials: Trials, command: Sequence[str]) -> list[str | Table]:
    """Write the winner and the report; return what to show: nothing, if no trial is complete.

    ``command`` are the words of the command that made the search. Raises an ``InputError`` if trials have failed and
    none is complete.
    """
    failures = [f"trial-{trial.number} failed: {trial.failure}" for trial in trials.all if trial.failure is not None]
    if (first := best(trials.all)) is None:
        if failures:
            raise InputError(f"No trial has finished. {failures[0]}")
        return []
    held_out, made = search.held_out, [run for run in search.known(trials) if run.finished or run.failure is not None]
    said = _summary(search, trials, made)
    run = held_out.runs(first.method)[0]
    counts = len(trials.all), len(made), held_out.seeds, held_out.rows
    winner = Winner(first.method.text, first.mean, run.settings.task, *counts)
    folder = held_out.folder
    winner.write(folder)
    ranked = sorted(trials.all, key=lambda trial: -rank(trial.mean) if trial.state == "complete" else math.inf)
    metric = str(run.reader.result["metric"])
    compare = shlex.join(["attnreg", "compare", "finetune", f"best=@{folder}", *typed_words(held_out.options)])
    blocks: list[Block] = [
        Heading(f"Search on {winner.task}: {metric} on held-out rows"),
        Code(shlex.join(command)),
        Paragraph(said),
        Paragraph(
            f"Each trial is scored on {held_out.rows} rows held out from train, with seeds from "
            f"{FIRST_SEED} on ({held_out.seeds} in all). Dev was not used. The sampler's seed is {search.sampler_seed}."
        ),
        Heading("Winner"),
        Code(winner.method),
        Paragraph("The best mean of many is too high by chance. Compare the winner on dev, with other seeds:"),
        Code(compare),
        Heading("All trials"),
        _table(ranked),
        *map(Paragraph, failures),
    ]
    document.save(blocks, folder)
    saved = f"Report saved to {folder}/report.md and report.html."
    return [_table(ranked[:5]), said, "Compare the winner:", compare, saved]


def _summary(search: Search, trials: Trials, made: Sequence[PlannedRun]) -> str:
    """Say how many trials and runs there were, and what they cost."""
    states = [trial.state for trial in trials.all]
    names = {"complete": "complete", "failed": "failed", "running": "unfinished"}
    told = ", ".join(f"{states.count(state)} {name}" for state, name in names.items() if state in states)
    minutes = sum(run.seconds for run in made if run.finished) / 60
    runs = f"{len(made)} runs of at most {search.runs}"
    return f"{len(states)} trials ({told}) in {runs}. The runs took {minutes:.1f} min, one after another."


def _table(trials: Sequence[Trial]) -> Table:
    rows = [[str(trial.number), *score_cells(trial.scores), trial.state, trial.method.text] for trial in trials]
    return Table(["trial", "mean", f"seeds, from {FIRST_SEED}", "state", "method"], rows, texts=(0, 2, 3, 4))
