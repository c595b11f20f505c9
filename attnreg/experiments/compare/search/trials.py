"""The trials of a search, which optuna draws and keeps in a file."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from attnreg.errors import InputError
from attnreg.experiments.compare.held_out import State, Trial
from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.search.space import Space

try:
    import optuna
    from optuna.exceptions import ExperimentalWarning
    from optuna.pruners import WilcoxonPruner
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
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
}


class Trials:
    """The trials in optuna's journal, from which a search that was killed goes on as if it had not been.

    A trial is stopped at a p below ``prune_p`` (Wilcoxon's signed-rank test against the best trial).
    """

    def __init__(self, path: Path, space: Space, seeds: int, sampler_seed: int, prune_p: float) -> None:
        self._space, self._seeds, self._sampler_seed = space, seeds, sampler_seed
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        warnings.simplefilter("ignore", ExperimentalWarning)  # of the pruner, and of parts of the sampler
        _mend(path)
        storage, pruner = JournalStorage(JournalFileBackend(str(path))), WilcoxonPruner(p_threshold=prune_p)
        self._study = optuna.create_study(
            storage=storage, study_name="search", pruner=pruner, direction="maximize", load_if_exists=True
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

    @property
    def running(self) -> list[Trial]:
        """The trials that need more runs."""
        return [trial for trial in self.all if trial.state == "running"]

    @property
    def runs(self) -> int:
        """The number of runs that have been made."""
        return sum(len(trial.scores) + (trial.state == "failed") for trial in self.all)

    def ask(self) -> Trial | None:
        """Draw a trial whose method is new; ``None`` if the space seems exhausted."""
        known = {trial.method.text for trial in self.all}
        while self._repeats < 2 * REPEATS:
            if self._draw(known):
                return self.all[-1]
        return None

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

    def _opened(self, trial: FrozenTrial) -> optuna.trial.Trial:
        return optuna.trial.Trial(self._study, trial._trial_id)  # also for a trial of an earlier process

    def report(self, tried: Trial, score: float) -> Trial:
        """Add the score of a trial's next seed; the trial may end with it."""
        self._opened(self._frozen[tried.number]).report(score, len(tried.scores))
        return self.settle(tried.number)

    def settle(self, number: int) -> Trial:
        """End a trial that has all its runs, or that is worse than the best one."""
        tried, trial = self.all[number], self._opened(self._frozen[number])
        if len(tried.scores) == self._seeds:
            self._study.tell(trial, tried.mean)
        elif len(tried.scores) > 1 and trial.should_prune():  # optuna 4.0 cannot test a single score
            self._study.tell(trial, state=TrialState.PRUNED)
        return self.all[number]

    def fail(self, tried: Trial, reason: str) -> None:
        """End a trial of which a run has failed."""
        trial = self._opened(self._frozen[tried.number])
        trial.set_user_attr("failure", reason)
        self._study.tell(trial, state=TrialState.FAIL)

    @property
    def round(self) -> list[tuple[int, int]]:
        """Trials and seeds of the last round of runs, so that a search that was killed ends this one first."""
        return [(number, seed) for number, seed in self._study.user_attrs.get("round", [])]

    @round.setter
    def round(self, entries: Sequence[tuple[int, int]]) -> None:
        self._study.set_user_attr("round", [list(entry) for entry in entries])


def _tried(number: int, trial: FrozenTrial) -> Trial:
    scores = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
    told: dict[str, Any] = trial.user_attrs
    method = Method(told["method"], f"trial-{number}")
    return Trial(number, method, scores, _STATES[trial.state], told.get("failure"))


def _mend(path: Path) -> None:
    """Remove what a kill may have left of optuna: a line that was cut off, and a lock. The folder itself is locked."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
