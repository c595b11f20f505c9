"""Multiple choice: select the right ending of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from attnreg.experiments.tasks.columns import Classes, column_of, converted
from attnreg.experiments.tasks.kinds.choices import plain_choices
from attnreg.experiments.tasks.kinds.classification import Classification
from attnreg.experiments.tasks.kinds.kind import REFERENCE
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset


class MultipleChoice(Classification):
    """One choice per row. :func:`attnreg.experiments.tasks.kinds.choices.plain_choices` reads choices and labels.

    The first text column is the first segment. The second segment is the other text column, if any, and one choice.
    """

    head = "AutoModelForMultipleChoice"
    collator = "DataCollatorForMultipleChoice"
    metrics = ("accuracy",)
    needs_choices = True
    has_classes = False
    has_text_labels = True  # letters, or texts of choices

    @property
    @override
    def num_classes(self) -> int:
        return len(self.task.choices)

    @classmethod
    @override
    def plain(
        cls, task: Task, splits: Mapping[str, Dataset], places: Mapping[str, str]
    ) -> tuple[Task, Mapping[str, Dataset]]:
        return plain_choices(task, splits, places)

    @classmethod
    @override
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        classes = Classes([str(number) for number in range(len(task.choices))])
        what = f"a choice number from 0 to {len(task.choices) - 1} in column {task.label}"
        return converted(column_of(rows, task.label), classes.number, what, place)

    @override
    def label_warnings(self, rows: Dataset) -> list[str]:
        if 0 in self.gold(self.task, rows):
            return []
        return ["the first choice is right in no training row: numbers of choices count from 0, not from 1."]

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
    def length(self, ids: list[Any]) -> int:
        return max(map(len, ids))
