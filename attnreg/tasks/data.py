"""Reading a task's data: from a folder, from the hub, or embedded."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from attnreg.errors import InputError
from attnreg.tasks import agreement
from attnreg.tasks.hub import offline_if_unreachable
from attnreg.tasks.task import Task

READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".jsonl.gz": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),  # "NA" and "null" are words
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t", "quoting": csv.QUOTE_NONE}),  # as GLUE's files are written
    ".parquet": ("parquet", {}),
}


def load_splits(task: Task, data_dir: str | Path | None = None) -> dict[str, datasets.Dataset]:
    """The splits of a task, checked: its text columns, its integer labels, no empty split.

    Args:
        task: the task.
        data_dir: a folder with ``train``, ``validation`` and perhaps ``test`` as ``.jsonl``, ``.jsonl.gz``, ``.csv``,
            ``.tsv`` or ``.parquet``, in the hub's columns; by default the hub, or the rows that come with the package.

    Returns:
        ``"train"``, ``"validation"`` and, where there is one with labels, ``"test"``.

    Raises:
        InputError: if the data cannot be found or does not fit.

    Example:
        >>> from attnreg.tasks import get_task
        >>> {name: len(rows) for name, rows in load_splits(get_task("agreement")).items()}
        {'train': 2000, 'validation': 1000, 'test': 1000}
    """
    datasets.disable_progress_bars()
    if data_dir is not None:
        splits = dict(_from_folder(Path(data_dir)))
    elif task.hub is None:
        splits = {name: datasets.Dataset.from_list(agreement.rows(name)) for name in agreement.SIZES}
    else:
        splits = _from_hub(task)
    checked = {name: _check(task, name, rows, data_dir) for name, rows in splits.items()}
    return {name: rows for name, rows in checked.items() if rows is not None}


def _from_hub(task: Task) -> dict[str, datasets.Dataset]:
    assert task.hub is not None
    online = offline_if_unreachable()
    repository, configuration = task.hub
    try:
        return dict(datasets.load_dataset(repository, configuration))
    except (ConnectionError, OSError, ValueError) as error:
        if not online:
            raise InputError(
                f"Expected a network or --data-dir for task {task.name!r}, got neither: the hub cannot be reached and "
                f"{repository} ({configuration}) is not in the local cache; --data-dir takes a folder with train and "
                f"validation as .jsonl, .csv, .tsv or .parquet."
            ) from error
        raise InputError(f"Expected {repository} ({configuration}) on the hub, got: {_one_line(error)}") from error


def _from_folder(folder: Path) -> Iterator[tuple[str, datasets.Dataset]]:
    if not folder.is_dir():
        raise InputError(f"Expected --data-dir to be a folder, got {folder}: no such folder.")
    for split in ("train", "validation", "test"):
        files = [folder / f"{split}{suffix}" for suffix in READERS if (folder / f"{split}{suffix}").is_file()]
        if not files and split != "test":
            names = ", ".join(f"{split}{suffix}" for suffix in READERS)
            raise InputError(f"Expected one of {names} in {folder}, found none.")
        if len(files) > 1:
            raise InputError(f"Expected one file for split {split} in {folder}, found {len(files)}: keep one of them.")
        if files:
            yield split, _read(files[0])


def _read(file: Path) -> datasets.Dataset:
    builder, options = READERS[next(suffix for suffix in READERS if file.name.endswith(suffix))]
    if not file.stat().st_size:
        raise InputError(f"Expected rows in {file}, got an empty file.")
    with tempfile.TemporaryDirectory() as cache:
        try:
            # Kept in memory: a cache keyed by the file would be one more place that can go stale or fill up.
            return datasets.load_dataset(
                builder, data_files=str(file), split="train", cache_dir=cache, keep_in_memory=True, **options
            )
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError, EOFError, IndexError) as error:
            raise InputError(_complaint(file, error)) from error


def _complaint(file: Path, error: BaseException) -> str:
    if ".jsonl" in file.name:
        number = 0
        try:
            with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"Expected one JSON object a line, got {line.strip()[:60]!r} at {file}, line {number}."
        except (ValueError, OSError, EOFError) as reason:
            return f"Expected one JSON object a line, got a broken one at {file}, line {number}: {_one_line(reason)}."
    if "corresponds to no data" in str(error):
        return f"Expected rows in {file}, got none."
    cause = error.__cause__ or error
    return f"Expected a readable {file.suffix} file, got {file}: {_one_line(cause)}"


def _check(task: Task, split: str, rows: datasets.Dataset, where: Any) -> datasets.Dataset | None:
    place = f"split {split} of {where or task.hub or task.name}"
    if not len(rows):
        raise InputError(f"Expected rows in {place}, got none.")
    wanted = (*task.columns, "label")
    if missing := [column for column in wanted if column not in rows.column_names]:
        raise InputError(
            f"Expected columns {', '.join(wanted)} for task {task.name!r}, got {', '.join(rows.column_names)}: "
            f"{', '.join(missing)} missing in {place}."
        )
    labels = rows["label"]
    known = range(len(task.labels))
    if split == "test" and all(label == -1 for label in labels):
        return None  # GLUE keeps its test labels to itself
    for number, label in enumerate(labels):
        if label not in known or isinstance(label, bool):
            names = ", ".join(f"{i} ({name})" for i, name in enumerate(task.labels))
            raise InputError(f"Expected labels {names}, got {label!r} in row {number + 1} of {place}.")
    for column in task.columns:
        for number, text in enumerate(rows[column]):
            if not isinstance(text, str):
                raise InputError(f"Expected text in column {column}, got {text!r} in row {number + 1} of {place}.")
    return rows


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
