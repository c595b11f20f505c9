"""The rows that a run trains on and is scored on, and probable mistakes in them."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import InputError, did_you_mean, listed
from attnreg.experiments.options.settings import Settings, too_few_rows
from attnreg.experiments.tasks.columns import column_of, number_of, plain_label
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.loading.data import load_data
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:  # it is slow to import
    from datasets import Dataset

_OF_FOLDS = 0  # the seed of the order that --folds divides, the same for all runs


class RunData(NamedTuple):
    """The task of a run, with its classes, all splits, and the rows to train on and to score on."""

    task: Task
    splits: Mapping[str, Any]
    train: Any
    dev: Any


def read_data(settings: Settings) -> RunData:
    """Read the data of a run and choose its rows; without torch, so that mistakes in the data are reported early."""
    on_dev = settings.scored_on == "dev"
    task, splits = load_data(
        settings.chosen_task(), settings.data_dir, needs_validation=on_dev, check_rows=settings.check_rows
    )
    rows, dev = splits["train"], splits.get("validation")
    if (folds := settings.folds) is not None:
        order, fold = rows.shuffle(seed=_OF_FOLDS), settings.seed % folds
        dev = order.shard(folds, fold, contiguous=False)
        rows = order.select([row for row in range(len(order)) if row % folds != fold])
    train = rows.shuffle(seed=settings.seed)
    if (held_out := settings.validation_rows) is not None:
        train, dev = split_off(train, held_out, len(train) - held_out)
    chosen: Sequence[int] = range(settings.train_size or len(train))
    if settings.shots is not None or settings.stratified:
        labels = [plain_label(label) for label in column_of(train, task.label)]
        chosen = stratified(labels, len(chosen)) if settings.shots is None else _shots(labels, settings.shots)
    return RunData(task, splits, train.select(chosen), dev)


def split_off(rows: Dataset, size: int, left: int, flag: str | None = None) -> tuple[Dataset, Dataset]:
    """Split off the last rows, at least ``size``, so that ``left`` rows remain to train on; raise if none remains.

    ``flag`` names the option for it, if there is one.
    """
    if left < 1:
        raise too_few_rows(size, len(rows), flag)
    return rows.select(range(left)), rows.select(range(left, len(rows)))


def stratified(labels: Sequence[Hashable], size: int) -> list[int]:
    """Choose rows in their order, so that every class has its share, up to rounding."""
    of_class = _of_class(labels)
    exact = {label: size * len(rows) / len(labels) for label, rows in of_class.items()}
    count = {label: int(share) for label, share in exact.items()}
    by_remainder = sorted(exact, key=lambda label: exact[label] - count[label], reverse=True)
    for label in by_remainder[: size - sum(count.values())]:
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


CHECKED = 1000  # rows whose length is checked
MUCH = 0.2  # the share of these rows that may be cut
_READ = 200  # rows whose tokens are checked
_UNKNOWN = 1 / 3  # the share of these tokens that may be unknown
_UNCUT = 1_000_000
_SEVERAL = 5  # rows, of another class


def data_warnings(
    kind: Kind, train: Dataset, dev: Dataset, scored_on: str = "dev", splits: Mapping[str, Dataset] | None = None
) -> Iterator[str]:
    """Yield one sentence per probable mistake in rows that are not encoded yet.

    ``splits`` are whole, in the order of the data, so that warnings can number their rows.
    """
    yield from shared_rows(kind.task, train, dev, scored_on)
    for name, rows in ({"train": train, scored_on: dev} if splits is None else splits).items():
        yield from without_text(kind, name, rows)
    yield from label_warnings(kind, train)
    if kind.one_class_per_row or kind.one_number_per_row:
        for name, rows in ((scored_on, dev), *([("training", train)] if kind.one_number_per_row else [])):
            if len(rows) > 1 and len(labels := {*kind.gold(rows)}) == 1:
                label = kind.task.labels[labels.pop()] if kind.has_classes else labels.pop()
                yield f"all {len(rows)} {name} rows have the label {label!r}, so scores say little."
    if kind.has_classes and kind.one_class_per_row:
        yield from rare_class(kind, train, dev, scored_on)
    yield from input_warnings(kind, train)


def shared_rows(task: Task, train: Dataset, dev: Dataset, scored_on: str) -> Iterator[str]:
    """Say how many dev rows have the same texts as a training row."""
    train_texts = set(_texts(task, train))
    if count := sum(texts in train_texts for texts in _texts(task, dev)):
        shared = f"{count} of {len(dev)} {scored_on} rows {'is' if count == 1 else 'are'} also in train (same texts)"
        yield f"{shared}, so the score is too high: remove such rows from train."


def without_text(kind: Kind, split: str, rows: Dataset) -> Iterator[str]:
    """Name the rows without text, from 1, and text columns that hold numbers only."""
    if kind.reads_images:
        return
    empty = [row for row, texts in enumerate(_texts(kind.task, rows), 1) if {*texts} <= {"''", "' '", "[]"}]
    if empty:
        numbers = listed([*map(str, empty)])
        words = ("row", "has", "it") if len(empty) == 1 else ("rows", "have", "them")
        yield f"{words[0]} {numbers} of {split} {words[1]} no text: remove {words[2]}."
    for column in kind.task.columns if split == "train" else ():
        if all(number_of(value) is not None for value in column_of(rows, column)):
            yield f"text column {column} holds a number in every row and no text: check --text-columns."


def label_warnings(kind: Kind, rows: Dataset) -> Iterator[str]:
    """Yield warnings of the labels of training rows: those of their kind, and texts with several labels."""
    yield from kind.label_warnings(rows)
    if kind.reads_images or not (kind.has_classes and kind.one_class_per_row):
        return
    labels_of = defaultdict(set)
    for texts, label in zip(_texts(kind.task, rows), kind.gold(rows), strict=True):
        labels_of[texts].add(label)
    ambiguous = [(texts, labels) for texts, labels in labels_of.items() if len(labels) > 1]
    if ambiguous:
        (first, *_), labels = ambiguous[0]
        count = f"{len(ambiguous)} training text{' has' if len(ambiguous) == 1 else 's have'}"
        example = f"'{shorten(first[1:-1], 60)}' with {' and '.join(sorted(kind.task.labels[n] for n in labels))}"
        yield f"{count} several labels in different rows, such as {example}: correct them."


def rare_class(kind: Kind, train: Dataset, dev: Dataset, scored_on: str) -> Iterator[str]:
    """Name a class of at most two training rows, and none in dev, where others have at least ten times as many.

    With few rows, a class of one row is named where another class has five.
    """
    names, counts = kind.task.labels, Counter(kind.gold(train))
    limit = max(min(2, len(train) / (10 * len(names))), max(counts.values()) >= _SEVERAL)
    if rare := [number for number in counts.keys() - {*kind.gold(dev)} if counts[number] <= limit]:
        number = min(rare)
        others = [name for name in names if name != names[number]]
        count = f"{counts[number]} of {len(train)} training rows and none in {scored_on}"
        yield f"class {names[number]!r} has {count}.{did_you_mean(names[number], others)}"


def input_warnings(kind: Kind, rows: Dataset, name: str = "training inputs") -> Iterator[str]:
    """Say if more than a fifth of the inputs are cut, or more than a third of the tokens, or all, are unknown."""
    if kind.reads_images:
        return
    # A copy, because encoding sets the tokenizer's truncation, which would be saved with the model.
    uncut = replace(copy.deepcopy(kind), max_length=_UNCUT)
    try:
        encoded = uncut.encode(rows.select(range(min(CHECKED, len(rows)))))
    except InputError:
        return  # none of these rows has a token to predict, although others may
    lengths, limit = uncut.lengths(encoded), kind.max_length
    cut = 0 if kind.has_windows else sum(length > limit for length in lengths)
    if cut > MUCH * len(lengths):
        prefix = "the first " if len(rows) > CHECKED else ""
        share = f"{cut} of {prefix}{len(lengths)} {name} ({cut / len(lengths):.0%})"
        yield f"{share} are cut by --max-length {limit}; the longest has {max(lengths)} tokens."
    tokenizer = kind.tokenizer
    special, unknown = set(tokenizer.all_special_ids), tokenizer.unk_token_id
    marks = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    if unknown in {*marks, tokenizer.pad_token_id}:  # GPT-2 has one token for all of them, and knows every byte
        unknown = None
    ids = chain.from_iterable(encoded["input_ids"][:_READ])
    ids = chain.from_iterable(ids) if kind.needs_choices else ids
    tokens = [token for token in ids if token == unknown or token not in special]
    unread = sum(token == unknown for token in tokens) / max(1, len(tokens))
    advice = "check that the tokenizer belongs to the model and fits the language of your texts."
    if not tokens and len(rows):
        yield f"the tokenizer finds no token in the {name}: {advice}"
    elif unread > _UNKNOWN:
        yield f"{unread:.0%} of the tokens in the {name} are unknown to the tokenizer ({tokenizer.unk_token}): {advice}"


def _texts(task: Task, rows: Dataset) -> list[Any]:
    """Return the texts of rows, or the pixels of their images, to compare rows."""
    columns = (column_of(rows, name) for name in (*task.columns, *task.choices))
    keys = ([(x.size, x.mode, x.tobytes()) if hasattr(x, "tobytes") else repr(x) for x in column] for column in columns)
    return list(zip(*keys, strict=True))
