"""The data of a fit: the columns that hold texts and labels, and the rows that have both."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from attnreg.errors import InputError, UsageError, did_you_mean, listed
from attnreg.experiments.fit.answers import OF_CLASSES, OF_NUMBERS, numbers_in
from attnreg.experiments.fit.rows import FEWEST, Rows, check_groups, is_missing, units_of, units_per_class
from attnreg.experiments.tasks.columns import number_of, plain_label
from attnreg.experiments.tasks.loading.files import VALIDATION, find_files, folder_with_data, parts_of
from attnreg.experiments.tasks.loading.reading import Columns, columns_in

_TEXTS = ("text", "sentence", "content", "message", "review")
_LABELS = ("label", "labels", "class", "category", "target", "intent", "sentiment", "rating", "topic")
_ROWS = ("train", *VALIDATION)  # splits of a folder whose rows are fitted
_WORDS = 2.5  # of a text, on average; a column of names has fewer
_LETTERS = 25  # of a text in a script without spaces


class LabelledTexts(NamedTuple):
    """The rows of a file that have text and label."""

    texts: list[tuple[str, ...]]
    labels: list[str]
    row_numbers: list[int]  #: in the file, from 1
    left_out: dict[str, list[int]]  #: numbers of the other rows, by the reason


class FittedRows(NamedTuple):
    """The rows of a file that are fitted, and where they come from."""

    rows: Rows
    label: str  #: the column of labels
    labelled: LabelledTexts
    test: LabelledTexts | None  #: the rows of a folder's test split, if it has labels


def read_table(path: Path, splits: Sequence[str] = _ROWS) -> Columns:
    """Read a file, or some splits of a folder, as columns; without columns if a folder has none of the splits."""
    try:
        folder = folder_with_data(path, splits)
        tables = [columns_in(parts_of(name, files)) for name, files in find_files(folder, splits).items()]
    except InputError as error:
        raise InputError(str(error).replace("--data-dir", "DATA")) from error
    names = list(dict.fromkeys(name for table in tables for name in table))
    for table in tables:
        if missing := [name for name in names if name not in table]:
            raise InputError(f"The splits of {path} have different columns: one lacks {missing[0]}.")
    return {name: [value for table in tables for value in table[name]] for name in names}


def choose_columns(
    columns: Columns, texts: str | None, label: str | None, group: str | None, metric: str | None = None
) -> tuple[list[str], str]:
    """Return the columns of texts and of labels: the columns that options name, or else the only suitable ones.

    A column of labels has classes or numbers, or only what the metric is for.

    Raises:
        UsageError: if a column does not exist, if several columns or none are suitable, or if the first row was read
            as names of columns.
    """
    text_names = named_columns(columns, "--text-columns", texts)
    group_names = named_columns(columns, "--group-column", group, several=False)
    named_columns(columns, "--label-column", label, several=False)
    if label is None:
        others = [name for name in columns if name not in (*text_names, *group_names)]
        usual = [name for name in others if name.strip().lower() in _LABELS]
        # A column with a usual name, or the only other one, is taken as it is: checks of its labels say what is wrong.
        rest = [name for name in others if text_names or not _is_text(columns[name])]
        rest = [name for name in rest if len({*map(str, columns[name])}) < len(columns[name])] or rest  # no row numbers
        candidates = [
            name
            for name in others
            if (metric not in OF_NUMBERS and _is_label(columns[name]))
            or (metric not in OF_CLASSES and are_amounts(columns[name]))
        ]
        candidates = candidates or usual or rest[: len(rest) == 1]
        label = _only("labels", "--label-column", candidates, _LABELS, columns)
        if str(plain_label(label)) in {str(plain_label(value)) for value in columns[label]} and any(
            _is_text([name]) for name in columns
        ):
            raise UsageError(
                f"The first line should name the columns, but {label!r} there is also a label: put a line such as "
                f"text,label before it, or use --label-column if it is a name."
            )
    text_names = text_names or [text_column(columns, (label, *group_names))]
    if label in text_names:
        raise UsageError(f"Column {label} cannot hold texts and labels: use --text-columns and --label-column.")
    return text_names, label


def named_columns(columns: Columns, flag: str, names: str | None, *, several: bool = True) -> list[str]:
    """Return the columns that an option names, separated by commas unless the whole text is the name of a column."""
    if names is None:
        return []
    parts = [names] if names in columns or not several else [name.strip() for name in names.split(",")]
    for name in parts:
        if name not in columns:
            known = ", ".join(map(repr, columns))
            raise UsageError(f"{flag}: there is no column {name!r}, only {known}.{did_you_mean(name, columns)}")
    return parts


def text_column(columns: Columns, taken: Collection[str] = ()) -> str:
    """Return the only column that looks like texts, without the columns that are taken, or raise."""
    free = [name for name in columns if name not in taken]
    candidates = [name for name in free if _is_text(columns[name])] or [n for n in free if n.strip().lower() in _TEXTS]
    return _only("texts", "--text-columns", candidates, _TEXTS, columns)


def labelled_rows(
    data: Path,
    text_columns: str | None,
    label_column: str | None,
    group: str | None,
    metric: str | None,
    drop_rare: bool = False,
) -> FittedRows:
    """Read the rows to fit; print which columns hold texts and labels, and which rows are left out.

    With ``drop_rare``, rows of a class that has too few are left out instead of refused.
    """
    if not (columns := read_table(data)):
        raise InputError(f"No train file in {data}: give one file of rows, or a folder with train.csv or the like.")
    texts, label = choose_columns(columns, text_columns, label_column, group, metric)
    labelled = with_labels(columns, texts, label)
    numbers = metric in OF_NUMBERS or (metric is None and are_amounts(labelled.labels))
    plural = "numbers" if numbers else "labels"
    groups = None
    if group is not None:
        values = [columns[group][row - 1] for row in labelled.row_numbers]
        check_groups(values, labelled.row_numbers)
        groups = [*map(str, values)]
    if drop_rare and numbers:
        raise UsageError(f"--drop-rare is for classes, but the labels in {label} are predicted as numbers: remove it.")
    if drop_rare:
        labelled, groups = _without_rare(labelled, groups)
    print(f"{len(labelled.texts)} rows: texts in {', '.join(texts)}, {plural} in {label}.", flush=True)
    for why, row_numbers in labelled.left_out.items():
        print(f"Left out, with {why}: {len(row_numbers)} (row {listed([*map(str, row_numbers)])}).", flush=True)
    if numbers:
        numbers_in(labelled.labels, labelled.row_numbers)  # raises with the row of the file that has another label
    rows = Rows.checked(labelled.texts, labelled.labels, groups, metric=metric, numbers=numbers)
    return FittedRows(replace(rows, columns=texts), label, labelled, _test_rows(data, texts, label, numbers))


def _test_rows(data: Path, texts: Sequence[str], label: str, numbers: bool) -> LabelledTexts | None:
    """Return the rows of a folder's test split; ``None`` if it has none, or hides the labels (-1 or nothing)."""
    columns = read_table(data, ("test",)) if data.is_dir() else {}
    if label not in columns:
        return None
    if missing := [name for name in texts if name not in columns]:
        print(f"The test split has no column {missing[0]}, so it is not scored.", flush=True)
        return None
    try:
        rows = with_labels(columns, texts, label)
        if not {*rows.labels} - {"-1"}:
            return None
        if numbers:
            numbers_in(rows.labels, rows.row_numbers)
    except InputError as error:
        raise InputError(f"In the test split: {error}") from error
    return rows


def with_labels(columns: Columns, texts: Sequence[str], label: str) -> LabelledTexts:
    """Return the rows that have text and label, and the numbers of the other rows."""
    kept, left_out = list[int](), dict[str, list[int]]()
    row_texts = texts_of_rows(columns, texts)
    if several := next((value for value in columns[label] if isinstance(value, (list, dict))), None):
        raise InputError(f"Expected one label per row in column {label}, got {several!r}.")
    for row, (parts, value) in enumerate(zip(row_texts, columns[label], strict=True)):
        if is_missing(value) or not any(text.strip() for text in parts):
            left_out.setdefault("no label" if is_missing(value) else "no text", []).append(row + 1)
        else:
            kept.append(row)
    labels = [str(plain_label(columns[label][row])) for row in kept]
    return LabelledTexts([row_texts[row] for row in kept], labels, [row + 1 for row in kept], left_out)


def _without_rare(labelled: LabelledTexts, groups: list[str] | None) -> tuple[LabelledTexts, list[str] | None]:
    """Return the rows, and their groups, of classes with enough rows that differ or, if there are groups, groups."""
    texts, labels, numbers, left_out = labelled
    counts = units_per_class(labels, units_of(texts, groups))
    rare = sorted(label for label, count in counts.items() if count < FEWEST)
    if not rare:
        return labelled, groups
    kept = [row for row, label in enumerate(labels) if label not in rare]
    why = f"a class of fewer than {FEWEST} {'rows that differ' if groups is None else 'groups'} ({listed(rare)})"
    out = {why: [number for number, label in zip(numbers, labels, strict=True) if label in rare]}
    rest = LabelledTexts(
        [texts[n] for n in kept], [labels[n] for n in kept], [numbers[n] for n in kept], left_out | out
    )
    return rest, groups and [groups[row] for row in kept]


def are_amounts(values: Sequence[Any]) -> bool:
    """Whether all values are numbers, and some have fractions."""
    numbers = [number_of(value) for value in values if not is_missing(value)]
    return None not in numbers and any(number % 1 for number in numbers if number is not None)


def texts_of_rows(columns: Mapping[str, Sequence[Any]], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the texts of every row; a missing text is empty."""
    for name in names:
        for row, value in enumerate(columns[name], 1):
            if not (value is None or isinstance(value, str) or value != value):
                raise InputError(f"Expected text in column {name}, got {value!r} in row {row}.")
    values = [[value if isinstance(value, str) else "" for value in columns[name]] for name in names]
    return list(zip(*values, strict=True))


def _only(content: str, flag: str, candidates: list[str], usual: Sequence[str], columns: Columns) -> str:
    """Return the only candidate among the columns, or the only one with a usual name, or ask for the column."""
    named = [name for name in candidates if name.strip().lower() in usual]
    named = named or [name for name in candidates if {*re.findall(r"[a-z]+", name.lower())} & {*usual}]
    for names in (candidates, named):
        if len(names) == 1:
            return names[0]
    choice = f"{listed(candidates)} could" if candidates else f"none of {listed([*map(repr, columns)], 8)} seems to"
    pair = f", or {flag} NAME,NAME for pairs" if content == "texts" else ""
    raise UsageError(f"Which column holds the {content}? Of the data's columns, {choice}: use {flag} NAME{pair}.")


def _is_label(values: Sequence[Any]) -> bool:
    """Whether a column has few values, which repeat."""
    labels = [str(plain_label(value)) for value in values if value is not None and value != ""]
    different = len(set(labels))
    return 2 <= different <= len(labels) / 3 and not any(isinstance(value, (list, dict)) for value in values)


def _is_text(values: Sequence[Any]) -> bool:
    """Whether a column has many different texts of several words."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if not texts or len(set(texts)) < len(texts) / 3:
        return False
    words, letters = (sum(map(size, texts)) / len(texts) for size in (lambda text: len(text.split()), len))
    return words >= _WORDS or (letters >= _LETTERS and not all(map(str.isascii, texts)))  # long ASCII words are ids
