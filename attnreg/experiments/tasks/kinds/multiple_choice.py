"""Multiple choice: select the right ending of a text; rows in the forms in which they are published."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import Classes, column_of, converted, plain_label, texts_of
from attnreg.experiments.tasks.kinds.classification import Classification
from attnreg.experiments.tasks.kinds.kind import REFERENCE, Splits
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset


class MultipleChoice(Classification):
    """One choice per row.

    The first text column is the first segment. The second segment is the other text column, if any, and one choice.

    The choices are columns, or one column with a list in each row: of texts, of ``{"text": ..., "label": ...}``, or
    ``{"text": [...], "label": [...]}`` as on the hub. The answer is one of these labels, a number from 0, a letter from
    A, or the text of the right choice, in the same form in all rows; of choices in columns, it may also be the name of
    the right column. :meth:`plain` refuses rows that do not fit and answers whose form is ambiguous, and returns one
    column per choice and the number of the right one.
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
        every = [
            (answer, given, f"row {row} of {places[name]}")
            for name, rows in splits.items()
            for row, (answer, given) in enumerate(
                zip(self.labels_in(rows), _choices_of(task, rows, places[name]), strict=True), 1
            )
        ]
        count = _count(every, task.choices[0])
        numbers, choices = _numbers(every, count, task.label), task.choices
        if len(choices) == 1:
            choices = tuple(f"{choices[0]}.{number}" for number in range(count))
        plain, done = {}, 0
        for name, rows in splits.items():
            here, done = slice(done, done + len(rows)), done + len(rows)
            new: dict[str, Any] = {task.label: numbers[here]}
            if choices != task.choices:
                new |= zip(choices, zip(*(given.texts for _, given, _ in every[here]), strict=True), strict=True)
            others = rows.remove_columns([column for column in new if column in rows.column_names])
            plain[name] = concatenate_datasets([others, Dataset.from_dict(new)], axis=1)
        self.task = replace(task, choices=choices)
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
            before = [column[row] for column in others]
            second += [" ".join(filter(None, [*before, ending[row]])) for ending in endings]
        encoded = self.tokenizer(first, second, truncation=True, max_length=self.max_length)
        grouped = {
            name: [values[start : start + size] for start in range(0, len(values), size)]
            for name, values in encoded.items()
        }
        return {**grouped, "labels": gold, REFERENCE: gold}

    @override
    def lengths(self, encoded: Dataset) -> list[int]:
        return [max(map(len, choices)) for choices in encoded["input_ids"]]


class Choices(NamedTuple):
    """The choices of a row, and how the row itself marks each of them, such as A, B, C, if it does."""

    texts: Sequence[str]
    marks: Sequence[str] = ()


def _choices_of(task: Task, rows: Dataset, place: str) -> list[Choices]:
    if len(task.choices) > 1:
        texts = [texts_of(rows, column, place) for column in task.choices]
        return [Choices(given, task.choices) for given in zip(*texts, strict=True)]
    (column,) = task.choices
    what = f"a list of texts, or two or more --choice-columns, instead of column {column}"
    return converted(column_of(rows, column), _listed, what, place)


def _listed(value: Any) -> Choices | None:
    match value:
        case {"text": list(texts)}:
            marks = value.get("label")
        case [{"text": _}, *_] if all(isinstance(choice, dict) and "text" in choice for choice in value):
            texts, marks = [choice["text"] for choice in value], [choice.get("label") for choice in value]
        case [_, *_]:
            texts, marks = value, None
        case _:
            return None
    if not all(isinstance(text, str) for text in texts):
        return None
    marked = isinstance(marks, list) and len(marks) == len(texts) and None not in marks
    return Choices(texts, [str(plain_label(mark)) for mark in marks] if marked else ())


def _count(every: Sequence[tuple[Any, Choices, str]], column: str) -> int:
    """Return the number of choices, which must be the same in all rows."""
    sizes = [len(given.texts) for _, given, _ in every]
    count = sizes[0]
    others = [row for row, size in enumerate(sizes) if size != count or count < 2]
    if others:
        wanted = f"{count} choices, as in the first row," if count > 1 else "two or more choices"
        raise InputError(
            f"Expected {wanted} in column {column}, got {sizes[others[0]]} in {every[others[0]][2]}: remove rows with "
            f"another number of choices ({len(others)} of {len(every)})."
        )
    return count


def _numbers(every: Sequence[tuple[Any, Choices, str]], count: int, column: str) -> list[Any]:
    """Return the number of the right choice of each row."""
    marked = [_position(answer, given.marks) for answer, given, _ in every]
    if None not in marked:
        return marked
    number, letters = Classes([*map(str, range(count))]).number, string.ascii_uppercase[:count]
    read = {
        f"a choice number from 0 to {count - 1}": [number(answer) for answer, _, _ in every],
        f"a letter from A to {letters[-1]}": [_position(str(answer).upper(), [*letters]) for answer, _, _ in every],
        "the text of one choice": [_position(answer, given.texts) for answer, given, _ in every],
    }
    fitting = {form: numbers for form, numbers in read.items() if None not in numbers}
    if not fitting:
        best = max(read, key=lambda form: sum(number is not None for number in read[form]))
        wanted = "{}, {} or {}".format(*read) if read[best].count(None) == len(every) else best
        answer, _, place = every[read[best].index(None)]
        raise InputError(f"Expected {wanted} in column {column}, got {answer!r} in {place}.")
    (form, numbers), *others = fitting.items()
    instead = "numbers from 0" if "letter" in form else "letters"
    for other, theirs in others:
        if differing := [row[2] for row, mine, its in zip(every, numbers, theirs, strict=True) if mine != its]:
            raise InputError(
                f"Column {column} may give {form} or {other}, which differ in {differing[0]}: write {instead} instead."
            )
    for answer, given, place in every:
        if "text" in form and [str(plain_label(text)) for text in given.texts].count(str(plain_label(answer))) > 1:
            raise InputError(
                f"Column {column} gives {form}, but two choices have the same text in {place}: write {instead} instead."
            )
    return numbers


def _position(answer: Any, among: Sequence[str]) -> int | None:
    """Return where an answer first occurs; a missing one is nowhere, also if a choice is empty or named ``None``."""
    if answer in (None, ""):
        return None
    plain, forms = str(plain_label(answer)), [str(plain_label(form)) for form in among]
    return [*among].index(answer) if answer in among else forms.index(plain) if plain in forms else None
