"""Multiple choice: select the right ending of a text."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import column_of, converted, plain_label, texts_of
from attnreg.experiments.tasks.kinds.classification import Classification
from attnreg.experiments.tasks.kinds.kind import REFERENCE, Splits
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset


class MultipleChoice(Classification):
    """One choice per row.

    The first text column is the first segment. The second segment is the other text column, if any, and one choice.
    The choices are columns of texts, or one column of lists of texts, all of one length. The answer is
    a number from 0, or a letter from A. :meth:`plain` returns one column per choice and the number of the right one.
    """

    head = "AutoModelForMultipleChoice"
    collator = "DataCollatorForMultipleChoice"
    metrics = ("accuracy",)
    needs_choices = True
    has_classes = False
    config: ClassVar[Mapping[str, Any]] = {}

    @override
    def plain(self, splits: Splits, places: Mapping[str, str]) -> Splits:
        from datasets import Dataset, concatenate_datasets

        task = self.task
        choices = {name: _choices_of(task, rows, places[name]) for name, rows in splits.items()}
        count = len(next(iter(choices.values()))[0])
        names, plain = task.choices, {}
        if len(names) == 1:
            names = tuple(f"{names[0]}.{number}" for number in range(count))
        for name, rows in splits.items():
            pairs = zip(self.labels_in(rows), choices[name], strict=True)
            numbers = [_number(task, *pair, count, f"row {row} of {places[name]}") for row, pair in enumerate(pairs, 1)]
            added: dict[str, Any] = {task.label: numbers}
            if names != task.choices:
                added |= zip(names, zip(*choices[name], strict=True), strict=True)
            others = rows.remove_columns([column for column in added if column in rows.column_names])
            plain[name] = concatenate_datasets([others, Dataset.from_dict(added)], axis=1)
        self.task = replace(task, choices=names)
        return plain

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        return self.labels_in(rows)  # numbers from 0, by `plain`

    @override
    def label_warnings(self, rows: Dataset) -> Iterable[str]:
        if 0 not in self.gold(rows):
            yield "the first choice is right in no training row: numbers of choices count from 0, not from 1."

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        beginnings, *others = self._texts(batch)
        endings = [column_of(batch, column) for column in self.task.choices]
        size, first, second = len(endings), [], []
        for row, beginning in enumerate(beginnings):
            first += [beginning] * size
            middle = [column[row] for column in others]
            second += [" ".join(filter(None, [*middle, ending[row]])) for ending in endings]
        encoded = self.tokenizer(first, second, truncation=True, max_length=self.max_length)
        grouped = {
            name: [values[start : start + size] for start in range(0, len(values), size)]
            for name, values in encoded.items()
        }
        return {**grouped, "labels": gold, REFERENCE: gold}

    @override
    def lengths(self, encoded: Dataset) -> list[int]:
        return [max(map(len, choices)) for choices in encoded["input_ids"]]


def _choices_of(task: Task, rows: Dataset, place: str) -> list[Sequence[str]]:
    """Return the texts to choose from, by row."""
    if len(task.choices) > 1:
        return list(zip(*(texts_of(rows, column, place) for column in task.choices), strict=True))
    (column,) = task.choices
    expected = f"a list of texts, or two or more --choice-columns, instead of column {column}"
    return converted(
        column_of(rows, column),
        lambda value: value if isinstance(value, list) and all(isinstance(text, str) for text in value) else None,
        expected,
        place,
    )


def _number(task: Task, answer: Any, texts: Sequence[str], count: int, place: str) -> int:
    """Return the number of the right choice of a row, which must have as many choices as the first one."""
    if len(texts) != count or count < 2:
        expected = f"{count} choices, as in the first row," if count > 1 else "two or more choices"
        raise InputError(
            f"Expected {expected} in column {task.choices[0]}, got {len(texts)} in {place}: remove rows with another "
            "number of choices."
        )
    letters, plain = string.ascii_uppercase[:count], plain_label(answer)
    number = letters.find(plain.upper()) if isinstance(plain, str) and len(plain) == 1 else plain
    if not isinstance(number, int) or not 0 <= number < count:
        raise InputError(
            f"Expected a choice number from 0 to {count - 1} or a letter from A to {letters[-1]} in column "
            f"{task.label}, got {answer!r} in {place}."
        )
    if str(answer) in texts and texts.index(str(answer)) != number:
        raise InputError(
            f"Column {task.label} has {answer!r} in {place}, which is the number or letter of one choice and the text "
            "of another: use numbers from 0 or letters that are no text of a choice."
        )
    return number
