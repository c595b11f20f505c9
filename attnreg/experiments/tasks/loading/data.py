"""Load the data of a task from a folder or from the hub, or use the built-in rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks import agreement, columns
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.loading.files import (
    WHOLE,
    choose_names,
    find_files,
    folder_with_data,
    missing_split,
    names_of,
    not_on_hub,
    parts_of,
    spellings,
    wanted_names,
)
from attnreg.experiments.tasks.loading.reading import import_datasets, read_files, read_images, read_saved
from attnreg.experiments.tasks.models.place import offline_if_unreachable
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:  # it is slow to import
    import datasets

_Sources = Mapping[str, "datasets.Dataset | list[Path]"]  # rows or their files, by the name of the split
_Check = Callable[[str, Sequence[str], int], None]  # of a split, its columns and its number of rows


def load_data(
    task: Task,
    data_dir: str | Path | None = None,
    *,
    needs_validation: bool = True,
    classes: Mapping[str, str] | None = None,
    check_rows: Callable[[int], None] | None = None,
) -> tuple[Task, dict[str, datasets.Dataset]]:
    """Load the splits of a task and check them: columns, labels, no empty split.

    Args:
        task: the task.
        data_dir: a folder with ``train``, ``validation`` and optionally ``test``, with the hub's column names: written
            by ``save_to_disk`` of ``datasets``, or files as :mod:`attnreg.experiments.tasks.loading.files` finds them.
            Data that is not divided into splits, such as a single file, is ``train``, or ``validation`` for an
            evaluation-only task. By default the data comes from the hub, or is built in.
        needs_validation: whether a folder without ``validation`` is an error.
        classes: other names for classes, by their labels in the data.
        check_rows: a check of the number of training rows, called as soon as it is known.

    Returns:
        the task with class names, maybe from the data, and the splits by name: ``"train"`` (unless the task is
        evaluation-only), ``"validation"``, the task's other evaluation splits, and ``"test"`` if it has labels.

    Raises:
        InputError: if the data cannot be found or does not fit the task.

    Example:
        >>> from attnreg.experiments.tasks import get_task
        >>> task, splits = load_data(get_task("agreement"))
        >>> list(splits), len(splits["train"])
        (['train', 'validation', 'test'], 2000)
    """
    kind, where = kind_class(task.kind)(task), data_dir or task.hub or task.name

    def check(split: str, names: Sequence[str], count: int) -> None:
        if split != "test":  # which may have no labels
            columns.check_columns(task, names, count, f"split {split} of {where}")
        if check_rows is not None and split == "train":
            check_rows(count)

    is_built_in = data_dir is None and task.embedded is not None
    splits = _built_in(task, check) if is_built_in else _splits(task, data_dir, needs_validation, check)
    places = {name: f"split {name} of {where}" for name in splits}
    if "test" in splits:
        if task.label not in task.columns and not columns.has_labels(splits["test"], task.label):
            del splits["test"]  # GLUE's test labels are not public
        else:
            columns.check_columns(task, splits["test"].column_names, len(splits["test"]), places["test"])
    if classes:
        splits = _renamed(task, splits, classes)
    splits = dict(kind.plain(splits, places))
    if task.name == "custom" and kind.has_classes and not task.labels:
        _check_classes(kind, splits, places)
    kind.task = replace(kind.task, labels=kind.label_names(splits, where))
    for name, rows in splits.items():
        kind.check(rows, places[name])
    return kind.task, splits


def load_to_score(
    task: Task, data_dir: str | None, split: str, classes: Mapping[str, str] | None = None
) -> tuple[Task, dict[str, datasets.Dataset], str]:
    """Load the splits of a task to score a model on, and return also the name of the one that ``split`` names."""
    task = replace(task, evaluation_only=True)
    task, splits = load_data(task, data_dir, needs_validation=split == "validation", classes=classes)
    name = "validation" if split not in splits and _is_validation(split, task, data_dir) else split
    if name not in splits:
        raise InputError(f"No labelled {split} split in {data_dir or task.hub or task.name}.{columns.WITHOUT_LABELS}")
    return task, splits, name


def _is_validation(split: str, task: Task, data_dir: str | None) -> bool:
    """Whether the rows of this split are read as validation, as IMDB's test split and a single file are."""
    if data_dir is None:
        return split == task.validation[0]
    return named_sources(task, data_dir)[2].get("validation") in (split, WHOLE)


def load_inputs(task: Task, split: str, data_dir: str | Path | None = None) -> datasets.Dataset:
    """Load a split, from where :func:`load_data` would, or from a single file; all rows get the same label."""
    place = f"split {split} of {data_dir or task.hub or task.name}"
    where: Path | str = task.name
    if data_dir is None and task.embedded is not None:
        sources: _Sources = _built_in(task, lambda *_: None)
    else:
        where, sources = _find(task, data_dir, spellings(split))
    name = WHOLE if WHOLE in sources else choose_names({split: [spellings(split)]}, sources, where).get(split, split)
    if name not in sources:
        raise missing_split(split, sources, where)

    unlabelled = replace(task, label=task.columns[0], evaluation_only=False)  # whose labels are not asked for
    rows = _read(name, sources[name], lambda names, count: columns.check_columns(unlabelled, names, count, place))
    if task.label in rows.column_names:
        rows = rows.remove_columns(task.label)
    rows = rows.add_column(task.label, [task.labels[0] if task.labels else 0] * len(rows))
    kind_class(task.kind)(task).check(rows, place)
    return rows


def named_sources(task: Task, data_dir: str | Path | None) -> tuple[Path | str, _Sources, dict[str, str]]:
    """Return where the data is, its sources, and the names that splits have there."""
    where, sources = _find(task, data_dir, names_of(task))
    if WHOLE in sources:
        return where, sources, {"validation" if task.evaluation_only else "train": WHOLE}
    return where, sources, choose_names(wanted_names(task), sources, where)


def _find(task: Task, data_dir: str | Path | None, names: Collection[str]) -> tuple[Path | str, _Sources]:
    if data_dir is None:
        return _read_hub(task)
    has_images, path = kind_class(task.kind).reads_images, Path(data_dir)
    folder = path if has_images and path.is_dir() else folder_with_data(path, names)
    sources: _Sources = read_saved(folder) or find_files(folder, names)
    return folder, read_images(folder) if has_images and not sources else sources


def _read_hub(task: Task) -> tuple[str, dict[str, datasets.Dataset]]:
    """Return the name of a task's data on the hub, and all of its splits."""
    if task.hub is None:
        raise not_on_hub(task)
    offline_if_unreachable()
    name = "{} ({})".format(*task.hub) if task.hub[1] else task.hub[0]
    try:
        return name, dict(import_datasets().load_dataset(*task.hub))
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Cannot load {name} for task {task.name!r} from the hub or the local cache: use --data-dir to give a "
            f"folder with train and validation. {one_line(error)}"
        ) from error


def _read(
    name: str, rows: datasets.Dataset | list[Path], check: Callable[[Sequence[str], int], None]
) -> datasets.Dataset:
    if isinstance(rows, list):
        return read_files(parts_of(name, rows), check)
    check(rows.column_names, len(rows))
    return rows


def _built_in(task: Task, check: _Check) -> dict[str, datasets.Dataset]:
    """Generate the rows of a built-in task."""
    rows_of = getattr(agreement, str(task.embedded))
    check("train", [*rows_of("train")[0]], agreement.SIZES["train"])
    from_list = import_datasets().Dataset.from_list
    return {name: from_list(rows_of(name)) for name in agreement.SIZES}


def _splits(
    task: Task, data_dir: str | Path | None, needs_validation: bool, check: _Check
) -> dict[str, datasets.Dataset]:
    where, sources, chosen = named_sources(task, data_dir)
    for split, is_needed in (("train", not task.evaluation_only), ("validation", needs_validation)):
        if is_needed and split not in chosen:
            hint = ", or score on rows of train with --validation-rows (in a comparison: --folds)"
            has_train = split != "train" and not task.evaluation_only
            raise missing_split(split, sources, where, hint if has_train else "")
    return {split: _read(name, sources[name], partial(check, split)) for split, name in chosen.items()}


def _check_classes(kind: Kind, splits: Mapping[str, datasets.Dataset], places: Mapping[str, str]) -> None:
    """Raise if a split has a class that train lacks and the data does not declare."""
    column = kind.task.label
    if "train" not in splits or any(columns.class_names(rows, column) for rows in splits.values()):
        return
    classes = {name: columns.names_of(kind.labels_in(rows)) for name, rows in splits.items()}
    for name, labels in classes.items():
        if strange := [label for label in labels if label not in classes["train"]]:
            raise InputError(
                f"Label {strange[0]!r} in column {column} of {places[name]} does not occur in split train: spell "
                "classes alike in all splits, and remove the rows of classes that train lacks."
            )


def _renamed(
    task: Task, splits: Mapping[str, datasets.Dataset], names: Mapping[str, str]
) -> dict[str, datasets.Dataset]:
    """Rename classes of a label column, by their labels in the data, or raise if one does not occur."""
    renamed, seen = {}, set[str]()
    names = {str(columns.plain_label(label)): name for label, name in names.items()}

    def rename(value: Any) -> str:
        seen.add(label := str(columns.plain_label(value)))
        return names.get(label, label)

    for split, rows in splits.items():
        if task.label not in rows.column_names:
            raise InputError(f"Classes can be renamed in a label column, but split {split} has no column {task.label}.")
        labels = columns.named_labels(rows, task.label, f"split {split}")
        labels = [columns.map_labels(value, rename) for value in labels]
        renamed[split] = rows.remove_columns(task.label).add_column(task.label, labels)
    if strange := [label for label in names if label not in seen]:
        known = ", ".join(sorted(seen)[:20])
        raise InputError(f"No row has the label {strange[0]!r} that is to be renamed: column {task.label} has {known}.")
    return renamed
