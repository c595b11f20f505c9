"""The class names of data: checked, and given other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import class_names, may_be_class, names_of, plain_label
from attnreg.experiments.tasks.kinds import KINDS, kind_class
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset


def check_classes(task: Task, splits: Mapping[str, Dataset], places: Mapping[str, str]) -> None:
    """Raise if labels give no class names, or a split has a class that train lacks and the data does not declare."""
    kind = kind_class(task.kind)
    for name, rows in splits.items():
        for label in kind.labels_in(task, rows):
            if not may_be_class(label):
                others = ((other, kind_class(other).predicts_such(label)) for other in KINDS if other != task.kind)
                hint = next((f": to predict {what}, use --kind {other}" for other, what in others if what), "")
                what = f"names or numbers of classes in column {task.label} of {places[name]}"
                raise InputError(f"Expected {what}, got {label!r}{hint}.")
    if "train" not in splits or any(class_names(rows, task.label) for rows in splits.values()):
        return
    found = {name: names_of(kind.labels_in(task, rows)) for name, rows in splits.items()}
    for name, classes in found.items():
        if strange := [label for label in classes if label not in found["train"]]:
            raise InputError(
                f"Label {strange[0]!r} in column {task.label} of {places[name]} does not occur in split train: spell "
                "classes alike in all splits, and remove the rows of classes that train lacks."
            )


def rename_classes(task: Task, splits: Mapping[str, Dataset], names: Mapping[str, str]) -> dict[str, Dataset]:
    """Give the classes of a label column other names, by their labels in the data, or raise if one does not occur."""
    renamed, met = {}, set()
    for split, rows in splits.items():
        if task.label not in rows.column_names:
            raise InputError(f"Classes can be renamed in a label column, but split {split} has no column {task.label}.")
        declared = class_names(rows, task.label)
        labels = []
        for value in rows[task.label][:]:
            label = declared[value] if declared is not None and isinstance(value, int) else plain_label(value)
            met.add(str(label))
            labels.append(names.get(str(label), label))
        renamed[split] = rows.remove_columns(task.label).add_column(task.label, list(map(str, labels)))
    if strange := [label for label in names if label not in met]:
        raise InputError(
            f"No row has the label {strange[0]!r} that is to be renamed: column {task.label} has "
            f"{', '.join(sorted(met)[:20])}."
        )
    return renamed
