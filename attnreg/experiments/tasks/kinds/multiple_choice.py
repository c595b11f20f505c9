"""Multiple choice: select the right ending of a text; rows in the forms in which they are published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import Classes, column_of, converted, plain_label, texts_of
from attnreg.experiments.tasks.kinds.classification import Classification
from attnreg.experiments.tasks.kinds.kind import REFERENCE
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset


class MultipleChoice(Classification):
    """One choice per row. :func:`plain_choices` reads choices and labels.

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


class Choices(NamedTuple):
    """The choices of a row, and how the row itself marks each of them, such as A, B, C, if it does."""

    texts: Sequence[str]
    marks: Sequence[str] = ()


class _Form(NamedTuple):
    """A form of answers: its name for messages, what else to write instead, and how one answer is read."""

    name: str
    instead: str
    number: Callable[[Any, Choices], int | None]


def plain_choices(
    task: Task, splits: Mapping[str, Dataset], places: Mapping[str, str]
) -> tuple[Task, dict[str, Dataset]]:
    """Return the task and its rows with one column per choice, and the number of the right one as the label.

    The choices are columns, or one column with a list in each row: of texts, of ``{"text": ..., "label": ...}``, or
    ``{"text": [...], "label": [...]}`` as on the hub. The answer is one of these labels, a number from 0, a letter from
    A, or the text of the right choice, in the same form in all rows; of choices in columns, it may also be the name of
    the right column. Rows that do not fit, and answers whose form is ambiguous, are refused.

    Example:
        >>> from datasets import Dataset
        >>> from attnreg.experiments.tasks import choose_task
        >>> task = choose_task("custom", kind="multiple-choice", text_columns="q", choice_columns="choices")
        >>> rows = Dataset.from_list([{"q": "a colour", "choices": ["one", "red"], "label": "red"}])
        >>> task, splits = plain_choices(task, {"train": rows}, {"train": "split train"})
        >>> task.choices, splits["train"][0]["label"]
        (('choices.0', 'choices.1'), 1)
    """
    choices = {name: _choices_of(task, rows, places[name]) for name, rows in splits.items()}
    count = _count(task, choices, places)
    every = [
        (answer, given, f"row {row} of {places[name]}")
        for name, rows in splits.items()
        for row, (answer, given) in enumerate(zip(column_of(rows, task.label), choices[name], strict=True), 1)
    ]
    answers = iter(_numbers(every, count, task.label))
    columns = task.choices if len(task.choices) > 1 else tuple(f"{task.choices[0]}.{i}" for i in range(count))
    plain = {}
    for name, rows in splits.items():
        texts = zip(*(given.texts for given in choices[name]), strict=True)
        new = dict(zip(columns, texts, strict=True)) if columns != task.choices else {}
        plain[name] = _with_columns(rows, {**new, task.label: [next(answers) for _ in range(len(rows))]})
    return replace(task, choices=columns), plain


def _with_columns(rows: Dataset, columns: Mapping[str, Sequence[Any]]) -> Dataset:
    rows = rows.remove_columns([name for name in columns if name in rows.column_names])
    for name, values in columns.items():
        rows = rows.add_column(name, list(values))
    return rows


def _choices_of(task: Task, rows: Dataset, place: str) -> list[Choices]:
    if len(task.choices) > 1:
        texts = [texts_of(rows, column, place) for column in task.choices]
        return [Choices(given, task.choices) for given in zip(*texts, strict=True)]
    (column,) = task.choices
    what = f"a list of choices, or two or more --choice-columns, instead of column {column}"
    listed = converted(column_of(rows, column), _listed, what, place)
    for row, given in enumerate(listed, 1):
        if strange := [text for text in given.texts if not isinstance(text, str)]:
            raise InputError(f"Expected text in column {column}, got {strange[0]!r} in row {row} of {place}.")
    return listed


def _listed(value: Any) -> Choices | None:
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        marks = value.get("label")
        marks = marks if isinstance(marks, list) and len(marks) == len(value["text"]) else []
        return Choices(value["text"], [str(plain_label(mark)) for mark in marks])
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(each, dict) and "text" in each for each in value):
        marks = [str(plain_label(each["label"])) for each in value if each.get("label") is not None]
        return Choices([each["text"] for each in value], marks if len(marks) == len(value) else ())
    return Choices(value)


def _count(task: Task, choices: Mapping[str, Sequence[Choices]], places: Mapping[str, str]) -> int:
    """Return the number of choices, which must be the same in all rows."""
    count = max((len(given.texts) for some in choices.values() for given in some[:1]), default=0)
    others = [
        (len(given.texts), f"row {row} of {places[name]}")
        for name, some in choices.items()
        for row, given in enumerate(some, 1)
        if len(given.texts) != count or count < 2
    ]
    if others:
        wanted = f"{count} choices, as in the first row," if count > 1 else "two or more choices"
        total, (size, place) = sum(map(len, choices.values())), others[0]
        raise InputError(
            f"Expected {wanted} in column {task.choices[0]}, got {size} in {place}: remove rows with another number of "
            f"choices ({len(others)} of {total})."
        )
    return count


def _forms(count: int) -> list[_Form]:
    classes = Classes([str(number) for number in range(count)])
    last = chr(ord("A") + count - 1)

    def letter(answer: Any, given: Choices) -> int | None:
        number = ord(answer.upper()) - ord("A") if isinstance(answer, str) and len(answer) == 1 else -1
        return number if 0 <= number < count else None

    return [
        _Form(f"a choice number from 0 to {count - 1}", "letters", lambda answer, given: classes.number(answer)),
        _Form(f"a letter from A to {last}", "numbers from 0", letter),
        _Form("the text of a choice", "", _by_text),
    ]


def _position(answer: Any, among: Sequence[str]) -> int | None:
    text = str(plain_label(answer))
    return list(among).index(text) if text in among else None


def _numbers(every: Sequence[tuple[Any, Choices, str]], count: int, column: str) -> list[int]:
    """Return the number of the right choice of each row."""
    marked = [_position(answer, given.marks) for answer, given, _ in every]
    if (found := _complete(marked)) is not None:
        return found
    forms = _forms(count)
    read = [[form.number(answer, given) for answer, given, _ in every] for form in forms]
    full = [
        (form, found) for form, numbers in zip(forms, read, strict=True) if (found := _complete(numbers)) is not None
    ]
    if not full:
        best = max(read, key=lambda numbers: sum(number is not None for number in numbers))
        row = best.index(None)
        names = [form.name for form in forms]
        known = any(number is not None for number in best)
        wanted = names[read.index(best)] if known else f"{', '.join(names[:-1])} or {names[-1]}"
        answer, _, place = every[row]
        raise InputError(f"Expected {wanted} in column {column}, got {answer!r} in {place}.")
    form, numbers = full[0]
    for other, others in full[1:]:
        if numbers != others:
            row = next(i for i, pair in enumerate(zip(numbers, others, strict=True)) if pair[0] != pair[1])
            raise InputError(
                f"Column {column} may give {form.name} or {other.name}, which differ in {every[row][2]}: write "
                f"{form.instead} instead."
            )
    if form.number is _by_text:
        for answer, given, place in every:
            if list(given.texts).count(str(plain_label(answer))) > 1:
                raise InputError(
                    f"Column {column} gives the text of a choice, but {answer!r} is the text of two choices in "
                    f"{place}: write letters instead."
                )
    return numbers


def _by_text(answer: Any, given: Choices) -> int | None:
    return _position(answer, given.texts)


def _complete(numbers: Sequence[int | None]) -> list[int] | None:
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None
