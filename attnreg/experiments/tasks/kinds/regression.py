"""Regression: predict a number for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.experiments.tasks.columns import converted, number_of
from attnreg.experiments.tasks.kinds.kind import Kind

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn


class Regression(Kind):
    """One finite number per row, trained with squared error."""

    head = "AutoModelForSequenceClassification"
    metrics = ("pearson", "spearman")
    one_number_per_row = True
    config: ClassVar[Mapping[str, Any]] = {"num_labels": 1, "problem_type": "regression"}

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        return converted(self.labels_in(rows), number_of, f"finite numbers in column {self.task.label}", place)

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        return output.logits.float().flatten().cpu().tolist()

    @override
    def trivial(self, references: Sequence[Any]) -> tuple[str, Any]:
        return "mean of train", fmean(references)
