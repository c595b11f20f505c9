"""The results of one method's runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any

from attnreg.errors import InputError
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.folder.history import collapsed, rank

NOTHING_LEARNED = "No method learned the task: train for more epochs, or on more rows."


@dataclass(frozen=True)
class Group:
    """Finished runs of one method that differ only in their seed, in the order of their seeds.

    ``further`` holds the scores by seed on the data that the methods are compared on, if they are not dev.
    """

    name: str
    runs: Sequence[PlannedRun]
    further: Mapping[int, float] | None = None

    @classmethod
    def of(cls, name: str, runs: Iterable[PlannedRun]) -> Group:
        """Return the group of the finished runs among these; it may be empty."""
        return cls(name, [run for run in runs if run.finished])

    def on(self, seeds: Collection[int]) -> Group:
        """Return the group of the runs with these seeds; it may be empty."""
        return replace(self, runs=[run for run in self.runs if run.seed in seeds])

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """``result.json`` of every run, with the run's options under ``config``."""
        return [run.result for run in self.runs]

    @property
    def first(self) -> dict[str, Any]:
        """The result of the first run, for values that all runs share."""
        return self.results[0]

    def config(self, name: str) -> Any:
        """Return an option of the runs."""
        return self.first["config"][name]

    @property
    def metric(self) -> str:
        """The name of the metric that methods are compared by."""
        return str(self.first["metric"])

    @property
    def scores(self) -> list[float]:
        """The score of the returned network, per seed."""
        further = self.further
        return self.values("dev", self.metric) if further is None else [further[run.seed] for run in self.runs]

    @property
    def trivial(self) -> tuple[str, list[float]] | None:
        """Name and dev scores, per seed, of a predictor that ignores its input, if it was measured."""
        is_measured = all(result.get("trivial") for result in self.results)
        return (self.first["trivial"]["predictor"], self.values("trivial", "dev", self.metric)) if is_measured else None

    @property
    def has_learned(self) -> bool:
        """Whether the method beats the trivial predictor, and at least one network has not collapsed."""
        better = self.trivial is None or fmean(self.scores) > fmean(self.trivial[1])
        return better and len(self.collapsed) < len(self.runs)

    @property
    def collapsed(self) -> list[int]:
        """Seeds of the networks that predict the same class for every scored row, although the labels differ."""
        return [run.seed for run, records in zip(self.runs, self.records, strict=True) if collapsed(records)]

    @property
    def never_acted(self) -> bool:
        """Whether the runs had a regularizer, and it acted in none of them."""
        return all(result.get("acted") is False for result in self.results)

    @property
    def returned(self) -> PlannedRun:
        """The run with the best score among those whose network has not collapsed, or the first if rows differ."""
        scored, collapsed = [*zip(self.runs, self.scores, strict=True)], self.collapsed
        scored = [(run, score) for run, score in scored if run.seed not in collapsed] or scored
        return scored[0][0] if self.seed_rows is not None else max(scored, key=lambda pair: rank(pair[1]))[0]

    def values(self, *path: str) -> list[float]:
        """Return the number under these keys of ``result.json``, per seed."""
        results: list[Any] = self.results
        return [float(reduce(getitem, path, result)) for result in results]

    def mean(self, *path: str) -> float:
        """Return the mean over seeds of the number under these keys."""
        return fmean(self.values(*path))

    @property
    def training_time(self) -> float:
        """Mean training time in seconds: CPU time if the runs were on a CPU and measured it, else time by the clock."""
        on_cpu = all(result["environment"].get("device") == "cpu" for result in self.results)
        has_cpu_time = all("training_cpu_seconds" in result for result in self.results)
        return self.mean("training_cpu_seconds" if on_cpu and has_cpu_time else "training_seconds")

    @cached_property
    def records(self) -> list[list[dict[str, Any]]]:
        """Label and prediction of every dev row, per seed."""
        return [run.predictions for run in self.runs]

    @property
    def has_classes(self) -> bool:
        """Whether every dev row, and every prediction, has one class."""
        return all(isinstance(self.records[0][0][name], int) for name in ("label", "prediction"))

    @property
    def seed_rows(self) -> str | None:
        """The rows that a seed is scored on instead of dev; ``None`` if all seeds are scored on dev."""
        folds, held_out = self.config("folds"), self.config("validation_rows")
        if folds is not None:
            return f"its seed's part of train, one of {folds}"
        return None if held_out is None else f"{held_out} rows held out of train, drawn by the seed"

    @property
    def where(self) -> str:
        """The name of the rows that the runs are scored on."""
        return "dev" if self.seed_rows is None else "held-out"


def check_rows(groups: Sequence[Group]) -> None:
    """Refuse runs with different dev labels; where rows differ by seed, compare runs of the same seed only."""
    first: dict[int, tuple[Path, list[Any]]] = {}
    for group in groups:
        for run, records in zip(group.runs, group.records, strict=True):
            labels = [row["label"] for row in records]
            folder, expected = first.setdefault(0 if group.seed_rows is None else run.seed, (run.folder, labels))
            if labels != expected:
                raise InputError(
                    f"{run.folder} has other dev labels than {folder}: the data changed between the runs. Remove the "
                    "older folder and repeat the command."
                )
