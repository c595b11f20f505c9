"""Multiple choice: which of several endings belongs to a beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attnreg.errors import InputError
from attnreg.tasks.columns import Classes, column_of
from attnreg.tasks.definition import Task
from attnreg.tasks.kinds.base import REFERENCE
from attnreg.tasks.kinds.classification import Classification

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor


class MultipleChoice(Classification):
    """The number of the right choice for each row, from 0.

    The first text column is the first segment; the others, and then each choice in turn, are the second.
    """

    head: ClassVar[str] = "AutoModelForMultipleChoice"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    needs_choices: ClassVar[bool] = True
    has_classes: ClassVar[bool] = False

    @classmethod
    def label_names(cls, task: Task, splits: Mapping[str, Dataset], where: Any) -> tuple[str, ...]:  # noqa: D102
        return ()

    @classmethod
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:  # noqa: D102
        classes = Classes([str(number) for number in range(len(task.choices))])
        numbers = []
        for row, label in enumerate(column_of(rows, task.label)):
            if (number := classes.number(label)) is None:
                raise InputError(
                    f"Expected the number of a choice, 0 to {len(task.choices) - 1}, in column {task.label}, got "
                    f"{label!r} in row {row + 1} of {place}."
                )
            numbers.append(number)
        return numbers

    @classmethod
    def head_options(cls, task: Task) -> dict[str, Any]:  # noqa: D102
        return {}

    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:  # noqa: D102
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

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: D102
        from transformers import DataCollatorForMultipleChoice

        return dict(DataCollatorForMultipleChoice(self.tokenizer)(rows))

    def length(self, ids: list[Any]) -> int:  # noqa: D102
        return max(map(len, ids))
