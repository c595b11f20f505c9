"""Regression: predict a number for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import column_of, number_of
from attnreg.experiments.tasks.definition import Task
from attnreg.experiments.tasks.kinds.base import REFERENCE, Kind, Record

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn


class Regression(Kind):
    """One finite number per row, trained with squared error."""

    head: ClassVar[str] = "AutoModelForSequenceClassification"
    metrics: ClassVar[tuple[str, ...]] = ("pearson", "spearman")
    can_be_right: ClassVar[bool] = False

    @classmethod
    @override
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        numbers = []
        for row, label in enumerate(column_of(rows, task.label)):
            if (number := number_of(label)) is None:
                raise InputError(
                    f"Expected finite numbers in column {task.label}, got {label!r} in row {row + 1} of {place}."
                )
            numbers.append(number)
        return numbers

    @classmethod
    @override
    def head_options(cls, task: Task) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        encoded = self.tokenizer(*self._texts(batch), truncation=True, max_length=self.max_length)
        return {**encoded, "labels": gold, REFERENCE: gold}

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        from transformers import DataCollatorWithPadding

        return dict(DataCollatorWithPadding(self.tokenizer)(rows))

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        return output.logits.float().flatten().cpu().tolist()

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        return {"label": reference, "prediction": answer}
