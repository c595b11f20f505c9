"""The file of a fit: its columns, which of them hold texts and labels, and its rows with predictions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from attnreg.errors import InputError, UsageError, did_you_mean, listed
from attnreg.experiments.fit.answers import OF_CLASSES, OF_NUMBERS, numbers_in
from attnreg.experiments.fit.rows import Rows, is_missing
from attnreg.experiments.tasks.columns import number_of, plain_label
from attnreg.experiments.tasks.loading.files import VALIDATION, find_files, folder_with_data, parts_of
from attnreg.experiments.tasks.loading.reading import Columns, columns_in

_TEXTS = ("text", "sentence", "content", "message", "review")
_LABELS = ("label", "labels", "class", "category", "target", "intent", "sentiment", "rating", "topic")
_ROWS = ("train", *VALIDATION)  # splits of a folder that are fitted
_WORDS = 2.5  # of a text, on average; a column of names has fewer
_LETTERS = 25  # of a text in a script without spaces


class LabelledTexts(NamedTuple):
    """The rows of a file that have text and label."""

    texts: list[tuple[str, ...]]
    labels: list[str]
    places: list[int]  #: in the file, from 1
    left_out: dict[str, list[int]]  #: places of other rows, by the reason


class FittedRows(NamedTuple):
    """The rows of a file that are fitted, and where they come from."""

    rows: Rows
    label: str  #: the column of labels
    given: LabelledTexts


def read_table(place: Path, splits: Sequence[str] = _ROWS) -> Columns:
    """Read a file, or some splits of a folder, as columns; none, if a folder has none of the splits."""
    try:
        folder = folder_with_data(place, splits)
        found = find_files(folder, splits)
        tables = [columns_in(parts_of(name, files)) for name, files in found.items()]
    except InputError as error:
        raise InputError(str(error).replace("--data-dir", "DATA")) from error
    names = list(dict.fromkeys(name for table in tables for name in table))
    for table in tables:
        if missing := [name for name in names if name not in table]:
            raise InputError(f"The splits of {place} have different columns: one lacks {missing[0]}.")
    return {name: [value for table in tables for value in table[name]] for name in names}


def choose_columns(
    columns: Columns, texts: str | None, label: str | None, group: str | None, metric: str | None = None
) -> tuple[list[str], str]:
    """Return the columns of texts and of labels: those that are given, else the only ones that look like it.

    Labels look like classes or, unless the metric is for the others, like numbers.

    Raises:
        UsageError: if a column does not exist, or several or none look like it.
    """
    given = named_columns(columns, "--text-columns", texts)
    group_names = named_columns(columns, "--group-column", group, several=False)
    named_columns(columns, "--label-column", label, several=False)
    if label is None:
        others = [name for name in columns if name not in (*given, *group_names)]
        named = [name for name in others if name.strip().lower() in _LABELS]
        # A column of that name, or the only other one, holds the labels whatever they are: what is wrong with them
        # will be said.
        rest = [name for name in others if given or not _is_text(columns[name])]
        rest = [name for name in rest if len({*map(str, columns[name])}) < len(columns[name])] or rest  # no row numbers
        found = [
            name
            for name in others
            if (metric not in OF_NUMBERS and _is_label(columns[name]))
            or (metric not in OF_CLASSES and are_amounts(columns[name]))
        ]
        found = found or named or rest[: len(rest) == 1]
        label = _only("labels", "--label-column", found, _LABELS, columns)
    given = given or [text_column(columns, (label, *group_names))]
    if label in given:
        raise UsageError(f"Column {label} cannot hold texts and labels: use --text-columns and --label-column.")
    return given, label


def named_columns(columns: Columns, flag: str, names: str | None, *, several: bool = True) -> list[str]:
    """Return the columns that an option names, separated by commas unless a column's own name has them."""
    if names is None:
        return []
    found = [names] if names in columns or not several else [name.strip() for name in names.split(",")]
    for name in found:
        if name not in columns:
            known = ", ".join(map(repr, columns))
            raise UsageError(f"{flag}: there is no column {name!r}, only {known}.{did_you_mean(name, columns)}")
    return found


def text_column(columns: Columns, others: Collection[str] = ()) -> str:
    """Return the only column that looks like texts, besides some others, or raise."""
    there = [name for name in columns if name not in others]
    found = [name for name in there if _is_text(columns[name])] or [n for n in there if n.strip().lower() in _TEXTS]
    return _only("texts", "--text-columns", found, _TEXTS, columns)


def labelled_rows(
    data: Path, text_columns: str | None, label_column: str | None, group: str | None, metric: str | None
) -> FittedRows:
    """Read the rows to fit; say which columns are taken for what, and which rows are left out."""
    if not (columns := read_table(data)):
        raise InputError(f"No train file in {data}: give one file of rows, or a folder with train.csv or the like.")
    texts, label = choose_columns(columns, text_columns, label_column, group, metric)
    given = with_labels(columns, texts, label)
    numbers = metric in OF_NUMBERS or (metric is None and are_amounts(given.labels))
    what = "numbers" if numbers else "labels"
    print(f"{len(given.texts)} rows: texts in {', '.join(texts)}, {what} in {label}.", flush=True)
    for why, places in given.left_out.items():
        print(f"Left out, with {why}: {len(places)} (row {listed([*map(str, places)], 5)}).", flush=True)
    if numbers:
        numbers_in(given.labels, given.places)  # says which row of the file has another label
    groups = None if group is None else [str(columns[group][place - 1]) for place in given.places]
    rows = Rows.checked(given.texts, given.labels, groups, metric=metric, numbers=numbers)
    return FittedRows(replace(rows, columns=texts), label, given)


def with_labels(columns: Columns, texts: Sequence[str], label: str) -> LabelledTexts:
    """Return the rows that have text and label, and the places of the others."""
    kept, left_out = list[int](), dict[str, list[int]]()
    of_rows = texts_of_rows(columns, texts)
    if several := next((value for value in columns[label] if isinstance(value, (list, dict))), None):
        raise InputError(f"Expected one label for each row in column {label}, got {several!r}.")
    for row, (each, answer) in enumerate(zip(of_rows, columns[label], strict=True)):
        if is_missing(answer) or not any(text.strip() for text in each):
            left_out.setdefault("no label" if is_missing(answer) else "no text", []).append(row + 1)
        else:
            kept.append(row)
    labels = [str(plain_label(columns[label][row])) for row in kept]
    return LabelledTexts([of_rows[row] for row in kept], labels, [row + 1 for row in kept], left_out)


def are_amounts(values: Sequence[Any]) -> bool:
    """Whether all values are numbers, and some have fractions."""
    numbers = [number_of(value) for value in values if not is_missing(value)]
    return None not in numbers and any(number % 1 for number in numbers if number is not None)


def texts_of_rows(columns: Mapping[str, Sequence[Any]], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the texts of each row; a missing one is empty."""
    for name in names:
        for row, value in enumerate(columns[name], 1):
            if not (value is None or isinstance(value, str) or value != value):
                raise InputError(f"Expected text in column {name}, got {value!r} in row {row}.")
    values = [[value if isinstance(value, str) else "" for value in columns[name]] for name in names]
    return list(zip(*values, strict=True))


def _only(what: str, flag: str, found: list[str], usual: Sequence[str], columns: Columns) -> str:
    """Return the only column found, or the only one with a usual name, or ask for it."""
    named = [name for name in found if name.strip().lower() in usual]
    named = named or [name for name in found if {*re.findall(r"[a-z]+", name.lower())} & {*usual}]
    for some in (found, named):
        if len(some) == 1:
            return some[0]
    several = f"{listed(found, 5)} could" if found else f"none of {listed([*map(repr, columns)], 8)} seems to"
    raise UsageError(f"Which column holds the {what}? Of the data's columns, {several}: use {flag} NAME.")


def _is_label(values: Sequence[Any]) -> bool:
    """Whether a column has few values, each of them several times."""
    there = [str(plain_label(value)) for value in values if value is not None and value != ""]
    different = len(set(there))
    return 2 <= different <= len(there) / 3 and not any(isinstance(value, (list, dict)) for value in values)


def _is_text(values: Sequence[Any]) -> bool:
    """Whether a column has many different texts of several words."""
    there = [value for value in values if isinstance(value, str) and value.strip()]
    if not there or len(set(there)) < len(there) / 3:
        return False
    words, letters = (sum(map(size, there)) / len(there) for size in (lambda text: len(text.split()), len))
    return words >= _WORDS or (letters >= _LETTERS and not all(map(str.isascii, there)))  # long ASCII words are ids
