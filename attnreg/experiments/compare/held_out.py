"""Choosing among methods: each is a trial, scored on rows held out from train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.folder.history import rank

FIRST_SEED = 1000  # of trials, so that none is reported on a seed that chose it
State = Literal["running", "complete", "failed"]


@dataclass(frozen=True)
class Trial:
    """A method that is tried, its scores on held-out rows, by seed, and why it has failed, if so."""

    number: int
    method: Method
    scores: Sequence[float]
    state: State
    failure: str | None = None

    @property
    def mean(self) -> float:
        """The mean score over the seeds."""
        return fmean(self.scores)


def score_cells(scores: Sequence[float]) -> list[str]:
    """Return the mean and the scores of single seeds for a table."""
    if not scores:
        return ["none", "none"]
    return [f"{fmean(scores):.4f}", "  ".join(f"{score:.3f}" for score in scores)]


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the complete trial with the best mean score, the first of several; ``None`` if none is complete."""
    complete = [trial for trial in trials if trial.state == "complete"]
    return max(complete, key=lambda trial: rank(trial.mean)) if complete else None


@dataclass(frozen=True)
class HeldOut:
    """How trials are scored: on rows held out from train, with the same seeds (from 1000) and options for all."""

    options: Mapping[str, Any]
    folder: Path
    seeds: int
    rows: int

    def runs(self, method: Method) -> list[PlannedRun]:
        """Return the runs of a trial."""
        folder, options = self.folder / "search" / method.slug, {**self.options, "validation_rows": self.rows}
        seeds = range(FIRST_SEED, FIRST_SEED + self.seeds)
        return [PlannedRun(method, "search", seed, options, folder / f"seed{seed}") for seed in seeds]

    def grid(self, methods: Sequence[Method]) -> list[Trial]:
        """Return a trial for each of several given methods, from the runs that have finished."""
        scores = [[run.score for run in self.runs(method) if run.finished] for method in methods]
        states: list[State] = ["complete" if len(score) == self.seeds else "running" for score in scores]
        return list(map(Trial, range(len(methods)), methods, scores, states))
