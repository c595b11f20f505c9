"""The runs of one method, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnreg.errors import InputError
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.tasks.metrics import CONFUSION


@dataclass(frozen=True)
class Group:
    """Finished runs that differ in their seed.

    Args:
        name: what the report calls them.
        runs: the runs, in the order of their seeds.
    """

    name: str
    runs: Sequence[PlannedRun]

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """``result.json`` of each run, with its options."""
        return [run.result for run in self.runs]

    @property
    def metric(self) -> str:
        """The task's metric."""
        return str(self.results[0]["metric"])

    @property
    def scores(self) -> list[float]:
        """The last epoch's score on dev, per seed."""
        return self.values("dev", self.metric)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the scores; ``None`` of a single one."""
        return stdev(self.scores) if len(self.scores) > 1 else None

    def values(self, *path: str) -> list[float]:
        """A number of the results, per seed."""
        return [float(_at(result, path)) for result in self.results]

    def has(self, *path: str) -> bool:
        """Whether the results have a number there."""
        return all(_at(result, path) is not None for result in self.results)

    def mean(self, *path: str) -> float:
        """Its mean over seeds."""
        return fmean(self.values(*path))

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """The dev rows' labels."""
        return np.array([row["label"] for row in self.records[0]])

    @property
    def size(self) -> int:
        """Number of dev rows."""
        return len(self.records[0])

    @cached_property
    def records(self) -> list[list[dict[str, Any]]]:
        """Label and prediction of each dev row, per seed."""
        return [run.predictions() for run in self.runs]

    @cached_property
    def predictions(self) -> list[NDArray[np.int64]]:
        """The predicted classes of the dev rows, per seed."""
        return [np.array([row["prediction"] for row in records]) for records in self.records]

    @property
    def counts_rows(self) -> bool:
        """Whether counts of rows, by class and predicted class, are enough for the metric."""
        return self.metric in CONFUSION and not isinstance(self.records[0][0]["label"], list)


def check_rows(groups: Sequence[Group]) -> None:
    """Raise if the dev rows' labels are not the same in all runs.

    Raises:
        InputError: if the data has changed between two of them.
    """
    first = groups[0]
    for group in groups:
        for run, records in zip(group.runs, group.records, strict=True):
            if [row["label"] for row in records] != [row["label"] for row in first.records[0]]:
                raise InputError(
                    f"Expected the dev labels of {first.runs[0].folder} in {run.folder}, got others: the data has "
                    "changed between the two. Remove the older one, and the same command runs it again."
                )


def _at(result: Any, path: Sequence[str]) -> Any:
    for name in path:
        result = result[name]
    return result
