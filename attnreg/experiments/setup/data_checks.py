"""Look for mistakes in the data before training, such as rows that dev shares with train, or absent classes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from datasets import Dataset

from attnreg.errors import InputError, did_you_mean
from attnreg.experiments.tasks.columns import column_of
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.task import Task

CHECKED = 1000  # rows whose length is looked at
MUCH = 0.2  # of these rows
_READ = 200  # rows whose tokens are looked at
_UNKNOWN = 1 / 3  # of these tokens
_UNCUT = 1_000_000


def data_warnings(kind: Kind, train: Dataset, dev: Dataset, scored_on: str = "dev") -> Iterator[str]:
    """Yield one sentence for each probable mistake in rows that are not yet encoded."""
    yield from row_warnings(kind.task, train, dev, scored_on)
    yield from kind.label_warnings(train)
    if kind.one_class_per_row or kind.one_number_per_row:
        for name, rows in ((scored_on, dev), *([("training", train)] if kind.one_number_per_row else [])):
            if len(rows) > 1 and len(labels := {*kind.gold(rows)}) == 1:
                label = kind.task.labels[labels.pop()] if kind.has_classes else labels.pop()
                yield f"all {len(rows)} {name} rows have the label {label!r}, so scores say little."
    if kind.has_classes and kind.one_class_per_row:
        yield from rare_class(kind, train, dev, scored_on)
    yield from input_warnings(kind, train)


def row_warnings(task: Task, train: Dataset, dev: Dataset, scored_on: str) -> Iterator[str]:
    """Say how many dev rows have the same texts as a training row, and how many training rows have none."""
    trained = _texts(task, train)
    known = set(trained)
    if count := sum(texts in known for texts in _texts(task, dev)):
        shared = f"{count} of {len(dev)} {scored_on} rows {'is' if count == 1 else 'are'} also in train (same texts)"
        yield f"{shared}, so the score is too high: remove such rows from train."
    if empty := sum({*texts} == {"''"} for texts in trained):
        yield f"{empty} of {len(train)} training rows {'has' if empty == 1 else 'have'} no text: remove them."


def rare_class(kind: Kind, train: Dataset, dev: Dataset, scored_on: str) -> Iterator[str]:
    """Name a class of at most two training rows, and none in dev, where others have at least ten times as many."""
    names, counts = kind.task.labels, Counter(kind.gold(train))
    few = min(2, len(train) / (10 * len(names)))
    if rare := [each for each in counts.keys() - {*kind.gold(dev)} if counts[each] <= few]:
        number = min(rare)
        others = [name for name in names if name != names[number]]
        count = f"{counts[number]} of {len(train)} training rows and none in {scored_on}"
        yield f"class {names[number]!r} has {count}.{did_you_mean(names[number], others)}"


def input_warnings(kind: Kind, rows: Dataset, name: str = "training inputs") -> Iterator[str]:
    """Say if more than a fifth of the inputs are cut, or more than a third of the tokens, or all, are not known."""
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
        which = "the first " if len(rows) > CHECKED else ""
        share = f"{cut} of {which}{len(lengths)} {name} ({cut / len(lengths):.0%})"
        yield f"{share} are cut by --max-length {limit}; the longest has {max(lengths)} tokens."
    tokenizer = kind.tokenizer
    special, unknown = set(tokenizer.all_special_ids), tokenizer.unk_token_id
    marks = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    if unknown in {*marks, tokenizer.pad_token_id}:  # GPT-2 has one token for all, and knows every byte
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
    """Return what tells rows apart: their texts, or the pixels of their images."""
    columns = (column_of(rows, name) for name in (*task.columns, *task.choices))
    told = ([(x.size, x.mode, x.tobytes()) if hasattr(x, "tobytes") else repr(x) for x in column] for column in columns)
    return list(zip(*told, strict=True))
