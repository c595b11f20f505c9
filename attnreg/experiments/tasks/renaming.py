"""Other names for the classes of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import class_names, plain_label
from attnreg.experiments.tasks.definition import Task

if TYPE_CHECKING:
    from datasets import Dataset


def rename_classes(task: Task, splits: Mapping[str, Dataset], names: Mapping[str, str]) -> dict[str, Dataset]:
    """Give the classes of a label column other names.

    Args:
        task: the task.
        splits: the data by split.
        names: the new name of each class, by its label in the data.

    Raises:
        InputError: if the column is missing or nested, or no row has one of the labels.

    Example:
        >>> from datasets import Dataset
        >>> task = Task(name="mine", summary="", columns=("text",), metrics=("accuracy",))
        >>> rows = Dataset.from_dict({"text": ["a", "b"], "label": ["pos", "neg"]})
        >>> rename_classes(task, {"test": rows}, {"pos": "positive"})["test"]["label"][:]
        ['positive', 'neg']
    """
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
        column = [str(label) for label in labels]
        renamed[split] = rows.remove_columns(task.label).add_column(task.label, column)
    if strange := [label for label in names if label not in met]:
        raise InputError(
            f"No row has the label {strange[0]!r} that is to be renamed: column {task.label} has "
            f"{', '.join(sorted(met)[:20])}."
        )
    return renamed
