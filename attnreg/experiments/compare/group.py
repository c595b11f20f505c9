"""The results of one method's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnreg.errors import InputError
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.results.report import collapsed
from attnreg.experiments.tasks.metrics import CONFUSION


@dataclass(frozen=True)
class Group:
    """Finished runs of one method that differ only in their seed, in the order of their seeds.

    ``further`` holds the scores by seed on the data that the methods are compared on, if these are not dev.
    """

    name: str
    runs: Sequence[PlannedRun]
    further: Mapping[int, float] | None = None

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """``result.json`` of each run, with the run's options under ``config``."""
        return [run.result for run in self.runs]

    def on(self, other: Group) -> Group | None:
        """Return these runs with only the seeds that another method has too, if there are any."""
        seeds = {run.seed for run in other.runs}
        common = [run for run in self.runs if run.seed in seeds]
        return replace(self, runs=common) if common else None

    @property
    def metric(self) -> str:
        """The name of the metric that methods are compared by."""
        return str(self.results[0]["metric"])

    @property
    def scores(self) -> list[float]:
        """The score of the returned network, per seed."""
        return self.values("dev", self.metric) if self.further is None else [self.further[r.seed] for r in self.runs]

    @property
    def trivial(self) -> tuple[str, list[float]] | None:
        """Name and dev scores, per seed, of a predictor that ignores its input.

        ``None`` if the kind of task has none, or if the runs are from before it was measured.
        """
        found: list[dict[str, Any]] = [result.get("trivial") or {} for result in self.results]
        if not all(found):
            return None
        return found[0]["predictor"], [float(each["dev"][self.metric]) for each in found]

    @property
    def collapsed(self) -> list[int]:
        """Seeds of the networks that predict the same class for every dev row, although the labels differ."""
        return [run.seed for run, records in zip(self.runs, self.records, strict=True) if collapsed(records)]

    def values(self, *path: str) -> list[float]:
        """Return the number under these keys of ``result.json``, per seed."""
        results: list[Any] = self.results
        return [float(reduce(getitem, path, result)) for result in results]

    @property
    def calibrated(self) -> bool:
        """Whether every result has a calibration error on dev."""
        return all(result["dev"]["calibration_error"] is not None for result in self.results)

    def mean(self, *path: str) -> float:
        """Return the mean over seeds of the number under these keys."""
        return fmean(self.values(*path))

    @property
    def training_time(self) -> float:
        """Mean training time in seconds: CPU time where the runs were on a CPU and tell it, else time by the clock."""
        on_cpu = all(result["environment"].get("device") == "cpu" for result in self.results)
        told = all("training_cpu_seconds" in result for result in self.results)
        return self.mean("training_cpu_seconds" if on_cpu and told else "training_seconds")

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """Labels of the dev rows."""
        return np.array([row["label"] for row in self.records[0]])

    @cached_property
    def records(self) -> list[list[dict[str, Any]]]:
        """Label and prediction of each dev row, per seed."""
        return [run.predictions() for run in self.runs]

    @cached_property
    def predictions(self) -> list[NDArray[np.int64]]:
        """Predicted classes of the dev rows, per seed."""
        return [np.array([row["prediction"] for row in records]) for records in self.records]

    @property
    def has_classes(self) -> bool:
        """Whether each dev row has one class, and so has its prediction."""
        return all(isinstance(self.records[0][0][name], int) for name in ("label", "prediction"))

    @property
    def own_rows(self) -> str | None:
        """The rows that each seed is scored on instead of dev; ``None`` if all are scored on dev."""
        config = self.results[0]["config"]
        if config.get("folds") is not None:
            return f"its seed's part of train, one of {config['folds']}"
        held = config.get("validation_rows")
        return None if held is None else f"{held} rows held out of train, drawn by the seed"

    @property
    def counts_rows(self) -> bool:
        """Whether a confusion matrix of rows that all seeds are scored on determines the metric."""
        return self.metric in CONFUSION and self.has_classes and self.own_rows is None

    def confusion(self, classes: int) -> NDArray[np.int64]:
        """Return the number of dev rows by class (first) and predicted class (second), summed over seeds."""
        cells = np.tile(self.labels, len(self.runs)) * classes + np.concatenate(self.predictions)
        return np.bincount(cells, minlength=classes**2).reshape(classes, classes)

    def class_scores(self, classes: int) -> list[list[float]]:
        """Return precision (0 for a class that is never predicted), recall and F1 of each class, means over seeds."""
        from sklearn.metrics import precision_recall_fscore_support  # late: it is slow to import

        numbers = list(range(classes))
        each = [
            precision_recall_fscore_support(self.labels, predicted, labels=numbers, zero_division=0.0)[:3]
            for predicted in self.predictions
        ]
        return np.mean(each, axis=0).T.tolist()


def class_names(groups: Sequence[Group]) -> list[str]:
    """Return the names of the task's classes; numbers if the runs do not name them."""
    highest = max(int(max(group.labels.max(), *(p.max() for p in group.predictions))) for group in groups)
    names = groups[0].results[0].get("classes") or []
    return list(names) if len(names) > highest else [str(number) for number in range(highest + 1)]


def check_rows(groups: Sequence[Group]) -> None:
    """Refuse runs with different dev labels; where seeds have rows of their own, those of the same seed."""
    first: dict[int, tuple[Path, list[Any]]] = {}
    for group in groups:
        for run, records in zip(group.runs, group.records, strict=True):
            labels = [row["label"] for row in records]
            part = 0 if group.own_rows is None else run.seed
            folder, expected = first.setdefault(part, (run.folder, labels))
            if labels != expected:
                raise InputError(
                    f"{run.folder} has other dev labels than {folder}: the data changed between the runs. Remove the "
                    "older folder and repeat the command."
                )
