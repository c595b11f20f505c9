"""Multiple choice: select the right ending of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import Classes, column_of
from attnreg.experiments.tasks.definition import Task
from attnreg.experiments.tasks.kinds.base import REFERENCE
from attnreg.experiments.tasks.kinds.classification import Classification

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor


class MultipleChoice(Classification):
    """One choice per row, labelled by its number from 0.

    The first text column is the first segment. The second segment is the other text column, if any, and one choice.
    """

    head: ClassVar[str] = "AutoModelForMultipleChoice"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    needs_choices: ClassVar[bool] = True
    has_classes: ClassVar[bool] = False

    @classmethod
    @override
    def label_names(cls, task: Task, splits: Mapping[str, Dataset], where: Any) -> tuple[str, ...]:
        return ()

    @classmethod
    @override
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        classes = Classes([str(number) for number in range(len(task.choices))])
        numbers = []
        for row, label in enumerate(column_of(rows, task.label)):
            if (number := classes.number(label)) is None:
                raise InputError(
                    f"Expected a choice number from 0 to {len(task.choices) - 1} in column {task.label}, got "
                    f"{label!r} in row {row + 1} of {place}."
                )
            numbers.append(number)
        return numbers

    @classmethod
    @override
    def head_options(cls, task: Task) -> dict[str, Any]:
        return {}

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        beginnings, *others = self._texts(batch)
        endings = [column_of(batch, column) for column in self.task.choices]
        first, second = [], []
        for row, beginning in enumerate(beginnings):
            for ending in endings:
                first.append(beginning)
                second.append(" ".join(filter(None, [*(column[row] for column in others), ending[row]])))
        encoded = self.tokenizer(first, second, truncation=True, max_length=self.max_length)
        size = len(endings)
        grouped = {
            name: [values[start : start + size] for start in range(0, len(values), size)]
            for name, values in encoded.items()
        }
        return {**grouped, "labels": gold, REFERENCE: gold}

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        from transformers import DataCollatorForMultipleChoice

        return dict(DataCollatorForMultipleChoice(self.tokenizer)(rows))

    @override
    def length(self, ids: list[Any]) -> int:
        return max(map(len, ids))
