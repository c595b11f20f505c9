"""Load the data of a task from a folder or from the hub, or use the built-in rows."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from attnreg.errors import InputError
from attnreg.experiments.tasks import agreement
from attnreg.experiments.tasks.columns import class_names, column_of, names_of, top_column
from attnreg.experiments.tasks.definition import Task
from attnreg.experiments.tasks.hub import offline_if_unreachable
from attnreg.experiments.tasks.kinds import kind_class

READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".jsonl.gz": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),  # "NA" and "null" are words
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t", "quoting": csv.QUOTE_NONE}),  # GLUE's format
    ".parquet": ("parquet", {}),
}


def load_splits(task: Task, data_dir: str | Path | None = None) -> dict[str, datasets.Dataset]:
    """Load the splits of a task and check them: columns, labels, no empty split.

    Args:
        task: the task.
        data_dir: a folder with ``train``, ``validation`` and optionally ``test`` as ``.jsonl``, ``.jsonl.gz``,
            ``.csv``, ``.tsv`` or ``.parquet``, with the hub's column names. By default the data comes from the hub,
            or is built in.

    Returns:
        the splits by name: ``"train"`` (unless the task is evaluation-only), ``"validation"``, the task's other
        evaluation splits, and ``"test"`` if there is one with labels.

    Raises:
        InputError: if the data cannot be found or does not fit the task.

    Example:
        >>> from attnreg.experiments.tasks import get_task
        >>> splits = load_splits(get_task("agreement"))
        >>> list(splits), len(splits["train"])
        (['train', 'validation', 'test'], 2000)
    """
    return load_data(task, data_dir)[1]


def load_data(task: Task, data_dir: str | Path | None = None) -> tuple[Task, dict[str, datasets.Dataset]]:
    """Load the splits of a task; also return the task with its class names, which may come from the data.

    Args:
        task: the task.
        data_dir: as in :func:`load_splits`.

    Raises:
        InputError: if the data cannot be found or does not fit the task.
    """
    datasets.disable_progress_bars()
    if data_dir is not None:
        splits = dict(_from_folder(task, Path(data_dir)))
    elif task.embedded:
        of_split = getattr(agreement, task.embedded)
        splits = {name: datasets.Dataset.from_list(of_split(name)) for name in agreement.SIZES}
    elif task.hub is None:
        raise InputError(f"Task {task.name!r} is not on the hub: use --data-dir to give a folder with its files.")
    else:
        splits = _from_hub(task)
    kind, where = kind_class(task.kind), data_dir or task.hub or task.name
    places = {name: f"split {name} of {where}" for name in splits}
    if "test" in splits and kind.needs_labels and not _has_labels(task, splits["test"]):
        del splits["test"]  # GLUE's test labels are not public
    for name, rows in splits.items():
        _check_columns(task, rows, places[name])
    if task.name == "custom" and kind.has_classes and not task.labels:
        _check_classes(task, splits, places)
    task = replace(task, labels=kind.label_names(task, splits, where))
    for name, rows in splits.items():
        kind.check(task, rows, places[name])
    return task, splits


def _from_hub(task: Task) -> dict[str, datasets.Dataset]:
    assert task.hub is not None
    online = offline_if_unreachable()
    repository, configuration = task.hub
    named = repository if configuration is None else f"{repository} ({configuration})"
    try:
        found = dict(datasets.load_dataset(repository, configuration))
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        if not online:
            raise InputError(
                f"The hub cannot be reached, and {named} for task {task.name!r} is not in the local cache: use "
                "--data-dir to give a folder with train and validation as .jsonl, .csv, .tsv or .parquet."
            ) from error
        raise InputError(f"Cannot load {named} from the hub: {_one_line(error)}") from error
    primary, *further = task.validation
    wanted = {"validation": primary, **{name: name for name in further}}
    if not task.evaluation_only:
        wanted["train"] = "train"
    if missing := [name for name in wanted.values() if name not in found]:
        raise InputError(f"Split {missing[0]} is missing from {named}, which has {', '.join(found)}.")
    if "test" in found and primary != "test":
        wanted["test"] = "test"
    return {name: found[theirs] for name, theirs in wanted.items()}


def _from_folder(task: Task, folder: Path) -> Iterator[tuple[str, datasets.Dataset]]:
    if not folder.is_dir():
        raise InputError(f"Expected --data-dir to be a folder, got {folder}: no such folder.")
    primary, *further = task.validation
    splits = {"train": ["train"], "validation": ["validation", primary], **{name: [name] for name in further}}
    needed = {"train", "validation"}
    if task.evaluation_only:
        del splits["train"]
    texts = [*task.columns, *task.choices, *([task.label] if kind_class(task.kind).has_text_labels else [])]
    read = set()
    for split, names in {**splits, "test": ["test"]}.items():
        files = [folder / f"{name}{suffix}" for name in dict.fromkeys(names) for suffix in READERS]
        found = [file for file in files if file.is_file()]
        if not found and split in needed:
            raise InputError(f"No {split} file in {folder}: add one of {', '.join(file.name for file in files)}.")
        if split == "validation" and found:  # "validation" takes precedence over the hub's name of the split
            stem = found[0].name.partition(".")[0]
            found = [file for file in found if file.name.partition(".")[0] == stem]
        if len(found) > 1:
            raise InputError(f"{folder} has {len(found)} files for split {split}: keep only one of them.")
        if found and found[0] not in read:  # the test split may already be used as validation
            read.add(found[0])
            yield split, _read(found[0], texts, task.label)


def _read(file: Path, texts: Collection[str], label: str) -> datasets.Dataset:
    builder, options = READERS[next(suffix for suffix in READERS if file.name.endswith(suffix))]
    if builder == "csv":
        options = {**options, "converters": dict.fromkeys(texts, str)}  # numbers in a text column stay text
    if not file.stat().st_size:
        raise InputError(f"{file} is empty: it must have rows.")
    with tempfile.TemporaryDirectory() as cache:
        try:
            # In memory, because a cache on disk could become stale or fill the disk.
            return datasets.load_dataset(
                builder, data_files=str(file), split="train", cache_dir=cache, keep_in_memory=True, **options
            )
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError, EOFError, IndexError) as error:
            if builder == "csv" and label not in texts and type(error.__cause__).__module__.startswith("pyarrow"):
                try:  # a label far down is not a number, as the rows before it suggested: read labels as text
                    return _read(file, [*texts, label], label)
                except InputError:
                    pass
            raise InputError(_complaint(file, error)) from error


def _complaint(file: Path, error: BaseException) -> str:
    if ".jsonl" in file.name:
        number = 0
        try:
            with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"Line {number} of {file} must be one JSON object, got {line.strip()[:60]!r}."
        except (ValueError, OSError, EOFError) as reason:
            return f"Line {number} of {file} must be one JSON object, but cannot be read: {_one_line(reason)}."
    if "corresponds to no data" in str(error):
        return f"{file} has no rows."
    cause = error.__cause__ or error
    return f"Cannot read {file} as {file.suffix}: {_one_line(cause)}"


def _check_columns(task: Task, rows: datasets.Dataset, place: str) -> None:
    if not len(rows):
        raise InputError(f"There are no rows in {place}.")
    wanted = dict.fromkeys(top_column(name, rows.column_names) for name in (*task.columns, *task.choices, task.label))
    if missing := [column for column in wanted if column not in rows.column_names]:
        raise InputError(
            f"Missing columns in {place}: {', '.join(missing)}. Task {task.name!r} needs {', '.join(wanted)}; the data "
            f"has {', '.join(rows.column_names)}."
        )


def _has_labels(task: Task, rows: datasets.Dataset) -> bool:
    if not len(rows):
        return True  # an empty split must reach the check that rejects it
    if top_column(task.label, rows.column_names) not in rows.column_names:
        return False
    return any(label not in (-1, None) for label in column_of(rows, task.label))


def _check_classes(task: Task, splits: Mapping[str, datasets.Dataset], places: Mapping[str, str]) -> None:
    """Raise if a split has a class that train lacks, unless the data declares its classes."""
    if "train" not in splits or any(
        class_names(rows, top_column(task.label, rows.column_names)) for rows in splits.values()
    ):
        return
    kind = kind_class(task.kind)
    found = {name: names_of(kind.labels_in(task, rows), None) for name, rows in splits.items()}
    for name, classes in found.items():
        if strange := [label for label in classes if label not in found["train"]]:
            raise InputError(
                f"Label {strange[0]!r} in column {task.label} of {places[name]} does not occur in split train: spell "
                "classes alike in all splits, and remove the rows of classes that train lacks."
            )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
