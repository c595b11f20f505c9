"""Read the rows of data files, of folders that ``datasets`` has saved, and of folders of images."""

from __future__ import annotations

import csv
import glob
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.columns import class_names
from attnreg.experiments.tasks.loading.files import VALIDATION, WHOLE, format_of, is_saved, shown, suffix_of

if TYPE_CHECKING:  # slow packages are imported where files are read
    import datasets

Columns = dict[str, list[Any]]


def import_datasets() -> Any:
    """Import ``datasets``, which is slow, and turn off its progress bars."""
    import datasets

    datasets.disable_progress_bars()
    return datasets


_HALF = re.compile("[\ud800-\udfff]")  # of the two codes of a character beyond 16 bits
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def read_saved(folder: Path) -> dict[str, datasets.Dataset] | None:
    """Read the splits of a folder written by ``save_to_disk`` of ``datasets``; ``None`` for any other folder.

    A single data set has the name :data:`attnreg.experiments.tasks.loading.files.WHOLE`.
    """
    if not is_saved(folder):
        return None
    datasets = import_datasets()
    try:
        saved = datasets.load_from_disk(str(folder), keep_in_memory=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"Cannot read {folder} as a saved data set: {one_line(error)}") from error
    # Rows may have been saved in the format of torch or numpy.
    if isinstance(saved, datasets.Dataset):
        return {WHOLE: saved.with_format(None)}
    return {str(name): saved[name].with_format(None) for name in saved}


def read_images(folder: Path) -> dict[str, datasets.Dataset]:
    """Read a folder of images as the hub's ``imagefolder``: a folder per split, with a folder per class.

    Without splits, the name is :data:`attnreg.experiments.tasks.loading.files.WHOLE`.
    """
    datasets = import_datasets()
    if not folder.is_dir():
        raise InputError(f"Expected --data-dir to be a folder of images, got {folder}: no such folder.")
    names = [name for name in ("train", *VALIDATION, "test") if (folder / name).is_dir()]
    # Explicit, since names of files and classes that begin with "train" or "test" would be taken for splits.
    parts = {name: folder.resolve() / name for name in names} or {"train": folder.resolve()}
    files = {name: f"{glob.escape(str(part))}/**" for name, part in parts.items()}
    with tempfile.TemporaryDirectory() as cache:
        try:
            splits = datasets.load_dataset("imagefolder", data_files=files, cache_dir=cache, keep_in_memory=True)
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
            reason = one_line(error.__cause__ or error)
            raise InputError(f"Cannot read {folder} as a folder of images: {reason}") from error
    return {str(name) if names else WHOLE: rows for name, rows in splits.items()}


def read_files(files: Sequence[Path], check: Callable[[Sequence[str], int], None] | None = None) -> datasets.Dataset:
    """Read files of one format as one table, or one folder that ``datasets`` has saved.

    ``check`` is called with the names of the columns and the number of rows; for files in text form, before
    ``datasets`` is imported.
    """
    columns = None
    with _naming(files):
        if not is_saved(files[0]) and format_of(files[0]) != "parquet":
            columns = columns_in(files)
            if check is not None:
                check([*columns], len(next(iter(columns.values()), ())))
        rows = _typed_rows(files) if columns is None else import_datasets().Dataset.from_dict(columns)
    if columns is None and check is not None:
        check(rows.column_names, len(rows))
    return rows


def columns_in(files: Sequence[Path]) -> Columns:
    """Read files of one format as columns.

    Tables in text form stay text: types that differ between files would spell one label in several ways. Integers
    have the class names that a typed table declares for them.
    """
    with _naming(files):
        if is_saved(files[0]) or (form := format_of(files[0])) == "parquet":
            rows, columns = _typed_rows(files), Columns()
            for name, values in rows[:].items():
                names = class_names(rows, name) or []  # -1, of a hidden label, has none
                columns[name] = [names[value] if value in range(len(names)) else value for value in values]
            return columns
        if empty := [file for file in files if not file.stat().st_size]:
            raise InputError(f"{empty[0]} is empty: it must have rows.")
        parts = [_objects_in(file) if form.startswith("json") else _table_in(file) for file in files]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise ValueError("not all have the same columns")
        return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _typed_rows(files: Sequence[Path]) -> datasets.Dataset:
    """Read .parquet files, or one folder that ``datasets`` has saved."""
    from pyarrow import parquet

    datasets = import_datasets()
    if (saved := read_saved(files[0])) is None:
        return datasets.concatenate_datasets([datasets.Dataset(parquet.read_table(file)) for file in files])
    if WHOLE not in saved:
        raise InputError(f"{files[0]} has splits itself, {', '.join(saved)}: use --data-dir to give it.")
    return saved[WHOLE]


@contextmanager
def _naming(files: Sequence[Path]) -> Iterator[None]:
    """Name the files in the errors of reading them."""
    import pyarrow

    try:
        yield
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError) as error:
        source = f"{files[0]} as {suffix_of(files[0])}"
        if len(files) > 1:
            source = f"{shown(files)} as one table, their columns or types differ"
        mixed = str(suffix_of(files[0])).startswith(".json") and isinstance(error, (pyarrow.ArrowException, TypeError))
        raise InputError(f"Cannot read {source}: {one_line(error)}{' (a column needs one type)' * mixed}") from error


def _text_of(file: Path) -> str:
    """Read a file of text, perhaps packed, or raise."""
    import pyarrow

    try:
        content = bytes(pyarrow.input_stream(str(file), compression=_CODECS.get(file.suffix.lower())).read())
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(10) + 1
        raise InputError(f"Line {line} of {file} is not UTF-8: convert the file, for example with `iconv`.") from None


def _table_in(file: Path) -> Columns:
    """Read a table in text form, all fields as text; a short row ends in empty fields."""
    import pandas

    form, text = format_of(file), _text_of(file).replace("\r\n", "\n")
    text = text if "\n" in text else text.replace("\r", "\n")
    quoting: Any = csv.QUOTE_NONE if form == "tsv" else csv.QUOTE_MINIMAL  # GLUE's .tsv has no quotes
    options: dict[str, Any] = {"sep": "\t" if form == "tsv" else ",", "quoting": quoting, "lineterminator": "\n"}
    try:  # without a header, pandas renames no column and takes none for an index
        text = text.strip("\n")
        # An empty line within a single column is a row, whose text is empty.
        options["skip_blank_lines"] = options["sep"] in text.partition("\n")[0]
        lines = pandas.read_csv(io.StringIO(text), dtype=str, header=None, keep_default_na=False, **options).fillna("")
    except pandas.errors.EmptyDataError:
        lines = pandas.DataFrame()
    except pandas.errors.ParserError as error:
        advice = "replace tabs in texts by spaces" if form == "tsv" else "put texts with commas in double quotes"
        if form == "csv" and ";" in (header := text.partition("\n")[0]) and "," not in header:
            advice = "separate columns by commas, not by ';'"
        raise InputError(f"Cannot read {file}: {one_line(error).rpartition('error: ')[2]}: {advice}.") from error
    if len(lines) < 2:
        raise InputError(f"{file} has no rows.")
    names, rows = [*lines.iloc[0]], lines.iloc[1:]
    if len(names) == 1 and (mark := next((mark for mark in ",;\t|" if mark in names[0]), None)):
        right = "tabs" if form == "tsv" else "commas"
        raise InputError(f"The only column of {file} is {names[0]!r}: separate columns by {right}, not by {mark!r}.")
    if len(names) > 1 and (headers := (rows == names).all(axis=1)).any():
        row = int(headers.to_numpy().argmax()) + 1
        raise InputError(f"Row {row} of {file} repeats the column names, as if files were joined: remove it.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{file} has two columns named {twice[0]!r}: rename one of them.")
    if form == "csv":
        _check_quotes(text, file)
    return {name: [*rows[number]] for number, name in enumerate(names)}


def _check_quotes(text: str, file: Path) -> None:
    """Refuse a quotation mark within a quoted text, which may begin a text that swallows the rows below it."""
    begin, usual = 1, csv.field_size_limit(len(text) + 1)
    lines = csv.reader((line.replace("\r", " ") for line in text.split("\n")), strict=True)
    try:
        for _ in lines:
            begin = lines.line_num + 1
    except csv.Error as error:
        place = f"{file}: in the row from line {begin} to {lines.line_num}"
        advice = "put a text with quotation marks between quotation marks, and write its own twice"
        raise InputError(f"Cannot read {place}, {error}: {advice}.") from None
    finally:
        csv.field_size_limit(usual)


def _objects_in(file: Path) -> Columns:
    """Read JSON objects: one per line, or an array of objects, which may be the value of a field."""
    text = _text_of(file)
    try:
        rows = json.loads(text)
    except ValueError:  # not one value, so one per line
        rows = [_object_in(line, f"Line {n} of {file}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if isinstance(rows, dict):  # rows in a field, but a single row of a .jsonl
        lists = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        is_row = format_of(file) == "jsonl" or any(not isinstance(value, (list, dict)) for value in rows.values())
        rows = lists[0] if len(lists) == 1 and format_of(file) == "json" else [rows] if is_row else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f'{file} must be an array of objects, one per row, or have it as in {{"data": [...]}}.')
    if not rows:
        raise InputError(f"{file} has no rows.")
    for number, row in enumerate(rows if r"\ud" in text.lower() else (), 1):
        if _HALF.search(json.dumps(row, ensure_ascii=False)):
            raise InputError(f"Row {number} of {file} has half of a character, as where an emoji is cut: remove it.")
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _object_in(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} must be one JSON object, but cannot be read: {error}.") from error
