"""Regression: predict a number for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.experiments.tasks.columns import column_of, converted, number_of
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn


class Regression(Kind):
    """One finite number per row, trained with squared error."""

    head: ClassVar[str] = "AutoModelForSequenceClassification"
    metrics: ClassVar[tuple[str, ...]] = ("pearson", "spearman")
    can_be_right: ClassVar[bool] = False
    trivial_predictor: ClassVar[str | None] = "mean of train"

    @classmethod
    @override
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        return converted(column_of(rows, task.label), number_of, f"finite numbers in column {task.label}", place)

    @classmethod
    @override
    def head_options(cls, task: Task) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        return output.logits.float().flatten().cpu().tolist()

    @override
    def trivial_answer(self, references: Sequence[Any]) -> Any:
        return fmean(references)
