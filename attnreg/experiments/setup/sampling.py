"""Choose the rows that a run trains on and is scored on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset

from attnreg.errors import InputError
from attnreg.experiments.options.settings import Settings, too_few_rows
from attnreg.experiments.tasks.columns import column_of, plain_label
from attnreg.experiments.tasks.loading.data import load_data
from attnreg.experiments.tasks.task import Task

_OF_FOLDS = 0  # the seed of the order that --folds divides, the same for all runs


class RunData(NamedTuple):
    """The task of a run, with its classes, all splits, and the rows to train on and to score on."""

    task: Task
    splits: Mapping[str, Any]
    train: Any
    dev: Any


def read_data(settings: Settings) -> RunData:
    """Read the data of a run and choose its rows; without torch, so that what is wrong with them is said early."""
    on_dev = settings.scored_on == "dev"
    task, splits = load_data(settings.chosen_task(), settings.data_dir, needs_validation=on_dev)
    return RunData(task, splits, *choose_rows(splits, settings, task))


def choose_rows(splits: Mapping[str, Any], settings: Settings, task: Task) -> tuple[Any, Any]:
    """Shuffle train; return the rows to train on, and the rows of dev or of train to score on."""
    rows, dev = splits["train"], splits.get("validation")
    settings.check_rows(len(rows))
    if (folds := settings.folds) is not None:
        order, fold = rows.shuffle(seed=_OF_FOLDS), settings.seed % folds
        dev = order.shard(folds, fold, contiguous=False)
        rows = order.select([row for row in range(len(order)) if row % folds != fold])
    train = rows.shuffle(seed=settings.seed)
    if (held := settings.validation_rows) is not None:
        train, dev = split_off(train, held, len(train) - held)
    chosen: Sequence[int] = range(settings.train_size or len(train))
    if settings.shots is not None or settings.stratified:
        labels = [plain_label(label) for label in column_of(train, task.label)]
        chosen = stratified(labels, len(chosen)) if settings.shots is None else _shots(labels, settings.shots)
    return train.select(chosen), dev


def split_off(rows: Dataset, size: int, left: int, flag: str | None = None) -> tuple[Dataset, Dataset]:
    """Split off the last rows, at least ``size``, so that ``left`` rows remain to train on, or raise if none does.

    ``flag`` names the option that asked for it, if one did.
    """
    if left < 1:
        raise too_few_rows(size, len(rows), flag)
    return rows.select(range(left)), rows.select(range(left, len(rows)))


def stratified(labels: Sequence[Hashable], size: int) -> list[int]:
    """Choose rows in their order, so that each class has its share, up to rounding."""
    of_class = _of_class(labels)
    exact = {label: size * len(rows) / len(labels) for label, rows in of_class.items()}
    count = {label: int(share) for label, share in exact.items()}
    most_left = sorted(exact, key=lambda label: exact[label] - count[label], reverse=True)
    for label in most_left[: size - sum(count.values())]:
        count[label] += 1
    return sorted(row for label, rows in of_class.items() for row in rows[: count[label]])


def _shots(labels: Sequence[Hashable], shots: int) -> list[int]:
    of_class = _of_class(labels)
    for label, rows in of_class.items():
        if len(rows) < shots:
            raise InputError(f"Expected --shots of at most {len(rows)}, rows of class {label} in train, got {shots}.")
    return sorted(row for rows in of_class.values() for row in rows[:shots])


def _of_class(labels: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    of_class = defaultdict(list)
    for row, label in enumerate(labels):
        of_class[label].append(row)
    return of_class
