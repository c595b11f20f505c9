"""Read data files, and folders that ``datasets`` has saved."""

from __future__ import annotations

import csv
import json
import logging
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.loading.faults import DAMAGED, columns_in, opened, reason_of, rows_in_field
from attnreg.experiments.tasks.loading.folder import VALIDATION, WHOLE, format_of, is_saved, shown, suffix_of

_OPTIONS: dict[str, dict[str, Any]] = {
    "csv": {"sep": ",", "quoting": csv.QUOTE_MINIMAL, "keep_default_na": False},  # "NA" and "null" are words
    "tsv": {"sep": "\t", "quoting": csv.QUOTE_NONE, "keep_default_na": False},  # GLUE's format
}
_MORE_FIELDS = "__index_level_0__"  # pandas' name for the first field of rows with more fields than column names
_FAILURES = (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowException, *DAMAGED, ValueError, IndexError)


def read_saved(folder: Path) -> dict[str, datasets.Dataset] | None:
    """Read the splits of a folder written by ``save_to_disk`` of ``datasets``; ``None`` if it is another folder.

    A single data set has the name :data:`attnreg.experiments.tasks.loading.folder.WHOLE`.
    """
    if not is_saved(folder):
        return None
    try:
        saved = datasets.load_from_disk(str(folder), keep_in_memory=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"Cannot read {folder} as a saved data set: {one_line(error)}") from error
    # Rows may have been saved in the format of torch or numpy.
    if isinstance(saved, datasets.Dataset):
        return {WHOLE: saved.with_format(None)}
    return {str(name): saved[name].with_format(None) for name in saved}


def read_images(folder: Path) -> dict[str, datasets.Dataset]:
    """Read a folder of images as the hub's ``imagefolder``: a folder for each split, with one for each class.

    Without splits, the name is :data:`attnreg.experiments.tasks.loading.folder.WHOLE`.
    """
    if not folder.is_dir():
        raise InputError(f"Expected --data-dir to be a folder of images, got {folder}: no such folder.")
    named = any((folder / name).is_dir() for name in ("train", *VALIDATION, "test"))
    with tempfile.TemporaryDirectory() as cache:
        try:
            found = datasets.load_dataset(
                "imagefolder", data_dir=str(folder.resolve()), cache_dir=cache, keep_in_memory=True
            )
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
            reason = one_line(error.__cause__ or error)
            raise InputError(f"Cannot read {folder} as a folder of images: {reason}") from error
    return {str(name): rows for name, rows in found.items()} if named else {WHOLE: found["train"]}


def read_files(files: Sequence[Path], texts: Collection[str], label: str) -> datasets.Dataset:
    """Read files of one format as one table, or one folder that ``datasets`` has saved.

    The columns ``texts`` stay text even if they look like numbers; ``label`` becomes text if a label far down is none.
    """
    if (saved := read_saved(files[0])) is not None:
        if WHOLE not in saved:
            raise InputError(f"{files[0]} has splits of its own, {', '.join(saved)}: use --data-dir to give it.")
        return saved[WHOLE]
    if empty := [file for file in files if not file.stat().st_size]:
        raise InputError(f"{empty[0]} is empty: it must have rows.")
    names, options = [label], _OPTIONS.get(format_of(files[0]))
    if options is not None:
        for file in files:
            columns = columns_in(file, options["sep"], options["quoting"], [*texts, label])
            names += columns
    # Types of columns are inferred from the first rows; those which later rows do not fit are then read as text.
    attempts = [list(texts)] if options is None else [list(texts), sorted({*texts, *names} - {label}), [*texts, *names]]
    while True:
        try:
            rows = _load(files, attempts.pop(0))
            break
        except InputError:
            raise
        except _FAILURES as error:
            if not attempts or not type(error.__cause__).__module__.startswith("pyarrow"):
                raise InputError(_complaint(files, texts, label, error)) from error
    if options is not None and _MORE_FIELDS in rows.column_names:
        numbers = rows[_MORE_FIELDS][:]
        if numbers != list(range(1, len(numbers) + 1)):  # R numbers rows so, in a column without a name
            raise InputError(
                f"The rows of {shown(files)} have more fields than the first line has column names, "
                f"{', '.join(columns)}: name every column."
            )
        rows = rows.remove_columns(_MORE_FIELDS)
    return rows


def _load(files: Sequence[Path], texts: Collection[str]) -> datasets.Dataset:
    form = format_of(files[0])
    options = dict(_OPTIONS.get(form, {}))
    if options:
        options["converters"] = dict.fromkeys(texts, str)  # numbers in a text column stay text
    with tempfile.TemporaryDirectory() as cache, _quiet():
        # In memory, because a cache on disk could become stale or fill the disk.
        rows = datasets.load_dataset(
            {"tsv": "csv", "jsonl": "json"}.get(form, form),
            data_files=[_plain_path(file, Path(cache) / str(number)) for number, file in enumerate(files)],
            split="train",
            cache_dir=cache,
            keep_in_memory=True,
            **options,
        )
        rows.data.table.validate(full=True)  # the encoding of JSON is not checked when it is read
        return rows


def _plain_path(file: Path, other: Path) -> str:
    """Return a path that ``datasets`` reads as that of one file of rows; it begins with ``other`` if need be."""
    if format_of(file) == "json" and (rows := rows_in_field(file)) is not None:
        other = other.with_suffix(".jsonl")
        other.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(other)
    if file.suffix.lower() == ".zst":
        other = other.with_suffix(f".{format_of(file)}")
        with opened(file) as content:
            other.write_bytes(content.read())
        return str(other)
    path = file.absolute()
    if set(str(path)) & set("*?[") or "::" in str(path):  # signs of a pattern, or of a path within an archive
        other = other.with_suffix(str(suffix_of(file)))
        other.symlink_to(path)
        return str(other)
    return str(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the log of ``datasets``, which repeats the errors that it raises."""
    log = logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _complaint(files: Sequence[Path], texts: Collection[str], label: str, error: BaseException) -> str:
    if len(files) > 1:
        for file in files:
            read_files([file], texts, label)  # raises if one of them is damaged
        cause = one_line(error.__cause__ or error)
        return f"Cannot read {shown(files)} as one table, their columns or types differ: {cause}"
    return reason_of(files[0], error)
