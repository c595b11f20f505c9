"""Read columns: text, class labels, numbers and nested fields such as ``translation.en``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from attnreg.errors import InputError, did_you_mean, listed
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset

_WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,99})(\.0*)?")
_FRACTION = re.compile(r"[+-]?((\d+\.\d*|\.\d+)(e[+-]?\d+)?|\d+e[+-]?\d+|nan|inf(inity)?)")
WITHOUT_LABELS = " To predict rows without labels, use `attnreg predict`."  # ends a message of `attnreg evaluate`
NO_LISTS = ": use .jsonl or .parquet, because .csv and .tsv cannot store lists"  # where a text should be a list


def top_column(column: str, names: Iterable[str]) -> str:
    """Return the column of a dotted name: ``translation`` for ``translation.en``, unless that is a column itself."""
    return column if column in names else column.partition(".")[0]


def check_columns(task: Task, names: Sequence[str], count: int, place: str) -> None:
    """Raise if data have no rows, or lack one of the columns that a task needs."""
    if not count:
        raise InputError(f"There are no rows in {place}.")
    wanted = dict.fromkeys(top_column(name, names) for name in (*task.columns, *task.choices, task.label))
    if missing := [column for column in wanted if column not in names]:
        raise InputError(
            f"Missing columns in {place}: {', '.join(missing)}. Task {task.name!r} needs {', '.join(wanted)}; the data "
            f"has {', '.join(map(repr, names))}.{did_you_mean(missing[0], names)}"
            f"{' The first line of a .csv or .tsv file must hold the column names.' * (len(missing) == len(wanted))}"
            f"{WITHOUT_LABELS if task.evaluation_only and missing == [task.label] else ''}"
        )


def column_of(rows: Dataset | Mapping[str, Any], column: str) -> list[Any]:
    """Return the values of a column or of a nested field, with ``None`` where the field is missing.

    Example:
        >>> column_of({"translation": [{"en": "yes"}, {}]}, "translation.en")
        ['yes', None]
    """
    top = top_column(column, rows if isinstance(rows, Mapping) else rows.column_names)
    values = list(rows[top][:])  # a slice, because reading row by row is slow
    for name in filter(None, column[len(top) + 1 :].split(".")):
        values = [value.get(name) if isinstance(value, dict) else None for value in values]
    return values


def has_labels(rows: Dataset, label: str) -> bool:
    """Whether a split has labels; a test split may have -1 or nothing in all rows."""
    if not len(rows):
        return True  # an empty split must reach the check that rejects it
    exists = top_column(label, rows.column_names) in rows.column_names
    return exists and any(str(plain_label(value)) not in ("-1", "None", "") for value in column_of(rows, label))


def texts_of(rows: Dataset, column: str, place: str) -> list[str]:
    """Return the values of a text column, or raise."""
    values = column_of(rows, column)
    return converted(values, lambda text: text if isinstance(text, str) else None, f"text in column {column}", place)


def converted(
    values: Iterable[Any], convert: Callable[[Any], Any], expected: str, place: str, text_hint: str = ""
) -> list[Any]:
    """Convert the values of rows, or raise if a value becomes ``None``; the message says what was ``expected``.

    ``text_hint`` ends the message if the value is a text.
    """
    results = []
    for row, value in enumerate(values, 1):
        if (result := convert(value)) is None:
            hint = text_hint if isinstance(value, str) else ""
            raise InputError(f"Expected {expected}, got {value!r} in row {row} of {place}{hint}.")
        results.append(result)
    return results


class Classes:
    """Map labels to class numbers. A label is a class name or, if classes are ``numbered``, a class number.

    Example:
        >>> classes = Classes(["no", "yes"])
        >>> classes.number("yes"), classes.number("1"), classes.number(2), classes.number(True)
        (1, 1, None, None)
        >>> Classes(["1", "3"]).number(3)
        1
    """

    def __init__(self, labels: Sequence[str], *, numbered: bool = True) -> None:
        self.labels, self._declared = labels, not numbered
        plain = {plain_label(name): number for number, name in reversed([*enumerate(labels)])}
        self._numbered = numbered and not any(isinstance(label, int) for label in plain)
        numbers = dict(enumerate(range(len(labels)))) if self._numbered else {}
        self._known: dict[Any, int] = {**numbers, **plain, **{name: number for number, name in enumerate(labels)}}

    def number(self, value: Any) -> int | None:
        """Return the class number of a label, or ``None`` if the label is unknown."""
        if not isinstance(value, (str, int, float)):
            return None
        return self._known.get(value if isinstance(value, str) and value in self._known else plain_label(value))

    def __str__(self) -> str:
        if self._numbered:
            return listed([f"{number} ({name})" for number, name in enumerate(self.labels)], 20)
        return listed(self.labels, 20) + " (for another label, use --class LABEL=CLASS)" * self._declared


def plain_label(value: Any) -> Any:
    """Normalize a label: ``True`` and ``"true"`` become ``"True"``; ``2.0``, ``"2.0"`` and ``"+2"`` become ``2``.

    Text files, JSON and typed tables spell the same label in these ways; ``"007"`` is a name.
    """
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return str(value).capitalize()
    if isinstance(value, str):
        return int(value.partition(".")[0]) if _WHOLE.fullmatch(value.strip()) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def names_of(values: Iterable[Any]) -> list[str]:
    """Return the class names of labels: sorted integers (also as text), then sorted words.

    Empty texts do not count, nor do fractions; in a column of numbers, fractions may be texts.

    Example:
        >>> names_of([10, 2, "2", "", "b", "a"])
        ['2', '10', 'a', 'b']
    """
    plain = {plain_label(value) for value in values if isinstance(value, (str, int, float)) and value != ""}
    words = {value for value in plain if isinstance(value, str)}
    if all(_FRACTION.fullmatch(value.strip().lower()) for value in words):
        words = set()
    return [*map(str, sorted(value for value in plain if isinstance(value, int))), *sorted(words)]


def number_of(value: Any) -> float | None:
    """Return a value, or the number that it spells, as a float; ``None`` unless it is a finite number.

    Example:
        >>> number_of(2), number_of("1.5"), number_of("?"), number_of("nan"), number_of(True)
        (2.0, 1.5, None, None, None)
    """
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    return None


def class_names(rows: Dataset, label: str) -> list[str] | None:
    """Return the class names that the data declares for the integers of a label column, or ``None``."""
    feature = rows.features.get(top_column(label, rows.column_names))
    return getattr(getattr(feature, "feature", feature), "names", None)  # a column of lists has a feature of elements


def named_labels(rows: Dataset, label: str, place: str) -> list[Any]:
    """Return the values of a label column, or lists of them, with the names that the data declares for integers.

    Raises:
        InputError: if an integer has no name, although the data declares some.
    """
    values, names = column_of(rows, label), class_names(rows, label)
    if names is None:
        return values

    def name_of(row: int, value: Any) -> Any:
        if isinstance(value, int) and value not in range(len(names)):
            raise InputError(f"Expected a class of {listed(names, 20)}, got label {value} in row {row} of {place}.")
        return names[value] if isinstance(value, int) else value

    return [map_labels(value, partial(name_of, row)) for row, value in enumerate(values, 1)]


def map_labels(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a changed label, or a list of changed labels."""
    return [change(label) for label in value] if isinstance(value, list) else change(value)
