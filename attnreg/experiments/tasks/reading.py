"""Read rows from files, and from folders that ``datasets`` has saved."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import datasets

from attnreg.errors import InputError
from attnreg.experiments.tasks.files import VALIDATION, WHOLE, shown, suffix_of

_TSV = {"keep_default_na": False, "sep": "\t", "quoting": csv.QUOTE_NONE}  # GLUE's format
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),  # "NA" and "null" are words
    ".tsv": ("csv", _TSV),
    ".parquet": ("parquet", {}),
}


def read_saved(folder: Path) -> dict[str, datasets.Dataset] | None:
    """Read a folder written by ``save_to_disk`` of ``datasets``; ``None`` if it is another folder.

    Returns:
        the splits by name. A single data set has the name :data:`attnreg.experiments.tasks.files.WHOLE`.

    Raises:
        InputError: if a file is missing or damaged.
    """
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return None
    try:
        saved = datasets.load_from_disk(str(folder), keep_in_memory=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"Cannot read {folder} as a saved data set: {one_line(error)}") from error
    return {WHOLE: saved} if isinstance(saved, datasets.Dataset) else {str(k): saved[k] for k in saved}


def read_images(folder: Path) -> dict[str, datasets.Dataset]:
    """Read a folder of images as the hub's ``imagefolder``: a folder for each split, with one for each class.

    Returns:
        the splits by name. Without splits, the name is :data:`attnreg.experiments.tasks.files.WHOLE`.

    Raises:
        InputError: if there is no such folder, or it has no images.
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
    """Read files of one format as one table.

    Args:
        files: the files, in order.
        texts: columns that stay text even if they look like numbers.
        label: the label column. It becomes text if a label far down is not a number.

    Raises:
        InputError: if a file is empty or damaged, or the files have different columns.
    """
    builder, options = _READERS[str(suffix_of(files[0])).removesuffix(".gz")]
    if builder == "csv":
        options = {**options, "converters": dict.fromkeys(texts, str)}  # numbers in a text column stay text
    if empty := [file for file in files if not file.stat().st_size]:
        raise InputError(f"{empty[0]} is empty: it must have rows.")
    paths = [str(file) for file in files]
    with tempfile.TemporaryDirectory() as cache:
        try:
            # In memory, because a cache on disk could become stale or fill the disk.
            return datasets.load_dataset(
                builder, data_files=paths, split="train", cache_dir=cache, keep_in_memory=True, **options
            )
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError, EOFError, IndexError) as error:
            if builder == "csv" and label not in texts and type(error.__cause__).__module__.startswith("pyarrow"):
                try:  # a label far down is not a number, as the rows before it suggested: read labels as text
                    return read_files(files, [*texts, label], label)
                except InputError:
                    pass
            raise InputError(_complaint(files, texts, label, error)) from error


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


def _complaint(files: Sequence[Path], texts: Collection[str], label: str, error: BaseException) -> str:
    cause = error.__cause__ or error
    if len(files) > 1:
        for file in files:
            read_files([file], texts, label)  # raises if one of them is damaged
        return f"Cannot read {shown(files)} as one table, their columns or types differ: {one_line(cause)}"
    (file,) = files
    suffix = str(suffix_of(file))
    if suffix.startswith(".jsonl"):
        number = 0
        try:
            with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"Line {number} of {file} must be one JSON object, got {line.strip()[:60]!r}."
        except (ValueError, OSError, EOFError) as reason:
            return f"Line {number} of {file} must be one JSON object, but cannot be read: {one_line(reason)}."
    if "corresponds to no data" in str(error):
        return f"{file} has no rows."
    wanted = ", which must be one array of objects" if suffix.startswith(".json") else ""
    return f"Cannot read {file} as {suffix}{wanted}: {one_line(cause)}"
