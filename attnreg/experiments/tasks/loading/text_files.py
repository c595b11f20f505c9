"""Read data files in text form, without datasets, so that what is wrong in them is said early."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.columns import check_names
from attnreg.experiments.tasks.loading.folder import (
    check_splits,
    choose_splits,
    find_files,
    folder_with_data,
    format_of,
    is_saved,
    names_of,
    parts_of,
    suffix_of,
)
from attnreg.experiments.tasks.task import Task

_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
# A carriage return that ends no line; in .csv, not within double quotes.
_RETURN_TSV = re.compile(r"\r(?!\n)")
_RETURN_CSV = re.compile(r'\A(?:[^"\r]|\r\n|"[^"]*")*+\r(?!\n)')
_HALF = re.compile("[\ud800-\udfff]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

Columns = dict[str, list[Any]]
_early: dict[tuple[Path, int, frozenset[str]], Columns] = {}  # read by a check, until the data is read


def columns_in(file: Path, wanted: Collection[str]) -> Columns:
    """Read a file in text form."""
    return _early.pop(_key(file, wanted), None) or _read(file, wanted)


def check_files(task: Task, data_dir: str | Path, *, needs_validation: bool) -> int | None:
    """Raise if a folder lacks a split, or a file in text form cannot be read or lacks a column.

    Returns the number of rows of train, if all of them are in files in text form.
    """
    folder = folder_with_data(Path(data_dir), names := names_of(task))
    if is_saved(folder):
        return None
    there, wanted = find_files(folder, names), [*task.columns, *task.choices, task.label]
    chosen = choose_splits(task, there, folder)
    check_splits(task, there, chosen, folder, needs_validation=needs_validation)
    sizes, parts = dict[Path, int](), {split: parts_of(name, there[name]) for split, name in chosen.items()}
    for split, files in parts.items():
        for file in files:
            if not file.is_file() or format_of(file) == "parquet" or not file.stat().st_size:
                continue
            with suppress(OSError, ValueError if split == "test" else OSError):  # reading the data says it
                key = _key(file, wanted)
                _early[key] = _early.get(key) or _read(file, wanted)
                check_names(task, [*_early[key]], f"split {split} of {data_dir}")
                sizes[file] = len(next(iter(_early[key].values())))
    train = parts.get("train", [])
    return sum(sizes[file] for file in train) if train and {*train} <= sizes.keys() else None


def _key(file: Path, wanted: Collection[str]) -> tuple[Path, int, frozenset[str]]:
    return file.resolve(), file.stat().st_mtime_ns, frozenset(wanted)


def _read(file: Path, wanted: Collection[str]) -> Columns:
    return _objects_in(file) if format_of(file).startswith("json") else _table_in(file, wanted)


def _text_of(file: Path) -> str:
    """Read a file of text, perhaps packed, or raise."""
    import pyarrow  # late: it is slow to import

    try:
        content = bytes(pyarrow.input_stream(str(file), compression=_PACKED.get(file.suffix.lower())).read())
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read {file}: {one_line(error)}.") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        raise InputError(
            f"Line {content[: error.start].count(10) + 1} of {file} is not UTF-8: convert the file, for example with "
            f"`iconv -f {encoding} -t utf-8`."
        ) from None


def _table_in(file: Path, wanted: Collection[str]) -> Columns:
    """Read a table in text form, all fields as text; a short row ends in empty fields."""
    text, form = _text_of(file), format_of(file)
    first, separator = text.partition("\n")[0], "\t" if form == "tsv" else ","
    quoting: Any = csv.QUOTE_NONE if form == "tsv" else csv.QUOTE_MINIMAL  # GLUE's .tsv has no quotes
    others = (mark for mark in _SEPARATORS if mark in first and separator not in first)
    found = (mark for mark in others if not wanted or {*wanted} & {name.strip('"\r ') for name in first.split(mark)})
    if other := next(found, None):
        raise InputError(
            f"{file} has {_SEPARATORS[other]} between its columns: a .{form} file needs {_SEPARATORS[separator]}."
        )
    if "\n" in text and (alone := re.search(_RETURN_TSV if form == "tsv" else _RETURN_CSV, text)):
        line = text.count("\n", 0, alone.end()) + 1
        quoted = "" if form == "tsv" else ", or put the text in double quotes"
        raise InputError(f"Line {line} of {file} holds a carriage return within a row: remove it{quoted}.")
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, quoting=quoting, strict=True)
    lines: list[tuple[int, list[str]]] = []
    try:
        lines.extend((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        begin, open_quote = lines[-1][0] + 1 if lines else 1, "unexpected end" in str(error)
        reason = "a double quote in it is never closed" if open_quote else str(error)
        raise InputError(f"Cannot read the row in line {begin} of {file}: {reason}.") from error
    if len(lines) < 2:
        raise InputError(f"{file} has no rows.")
    (_, names), *rows = lines
    if [row[0] for _, row in rows if len(row) > len(names)] == [str(number + 1) for number in range(len(rows))]:
        names = ["", *names]  # R numbers rows so, in a column without a name
    for line, row in rows:
        if row == names and len(names) > 1:
            raise InputError(f"Line {line} of {file} repeats the column names, as if files were joined: remove it.")
        if len(row) > len(names):
            how = "put a text with a comma in double quotes" if form == "csv" else "replace a tab in a text by a space"
            how = how if any(row[len(names) :]) else f"remove the {_SEPARATORS[separator][:-1]} at its end, or {how}"
            raise InputError(f"Line {line} of {file} has {len(row)} fields instead of {len(names)}: {how}.")
    columns = [column for column in zip_longest(names, *(row for _, row in rows), fillvalue="") if any(column)]
    if twice := [name for name, number in Counter(name for name, *_ in columns).items() if number > 1]:
        how = f"named {twice[0]}" if twice[0] else "without a name"
        raise InputError(f"{file} has two columns {how}: rename one of them.")
    return {name: column for name, *column in columns}  # one may have no name, such as the index that pandas writes


def _objects_in(file: Path) -> Columns:
    """Read JSON objects: one on each line, or an array of them, which may be the value of a field."""
    text, form, rows = _text_of(file), format_of(file), None
    start = text.lstrip()[:1]
    if start == "[" or (start == "{" and form == "json"):
        try:
            rows = _parsed(text)
        except ValueError as error:
            if start == "[" and form == "json":
                wanted = f"{suffix_of(file)}, which must be one array of objects"
                raise InputError(f"Cannot read {file} as {wanted}: {error}.") from error
    if isinstance(rows, dict):
        rows = _rows_in_field(rows, file)
    if rows is None:
        lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
        rows = [_object_in(line, f"Line {number} of {file}") for number, line in lines if line]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{file} has no rows." if not rows else _EXPECTED.format(file))
    if _SURROGATE.search(text):
        _check_characters(rows, file)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _check_characters(rows: list[dict[str, Any]], file: Path) -> None:
    """Raise if a text holds half of a surrogate pair, as of an emoji that was cut in two."""
    for number, row in enumerate(rows, 1):
        if half := _HALF.search(json.dumps(row, ensure_ascii=False)):
            code = f"\\u{ord(half[0]):04x}"
            what = "half of a character that was cut in two"
            raise InputError(f"Row {number} of {file} holds {code}, {what}: remove it.")


def _object_in(line: str, place: str) -> dict[str, Any]:
    try:
        row = _parsed(line)
    except ValueError as error:
        raise InputError(f"{place} must be one JSON object, but cannot be read: {error}.") from error
    if not isinstance(row, dict):
        raise InputError(f"{place} must be one JSON object, got {line[:60]!r}.")
    return row


_EXPECTED = '{} must be an array of objects, one for each row, or have it as in {{"data": [...]}}.'


def _rows_in_field(whole: dict[str, Any], file: Path) -> list[Any] | None:
    """Return the rows of an object that has them in a field; ``None`` if the object is a row itself."""
    lists = {name: value for name, value in whole.items() if isinstance(value, list) and value}
    fields = [name for name, value in lists.items() if all(isinstance(item, dict) for item in value)]
    if len(fields) > 1:
        raise InputError(f"{file} has rows in {' and '.join(fields)}: write each of them as a file.")
    if not fields and all(isinstance(value, (list, dict)) for value in whole.values()):
        raise InputError(_EXPECTED.format(file))
    if any("paragraphs" in row for name in fields for row in whole[name]):
        raise InputError(f"{file} nests questions in paragraphs: write a row for each, as the hub's SQuAD has them.")
    return whole[fields[0]] if fields else None


def _parsed(text: str) -> Any:
    """Parse JSON; an object that has a name twice is a ``ValueError``, as is one that is nested too deeply."""

    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        named = dict(pairs)
        if len(named) < len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"it has {twice!r} twice")
        return named

    try:
        return json.loads(text, object_pairs_hook=without_repetition)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
