"""Look for mistakes in the data before training, such as rows that dev shares with train, or absent classes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
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


def data_warnings(kind: Kind, train: Dataset, dev: Dataset, scored_on: str = "dev") -> list[str]:
    """Return one sentence for each probable mistake in rows that are not yet encoded."""
    found = (
        shared_rows(kind.task, train, dev, scored_on),
        *kind.label_warnings(train),
        similar_classes(kind.task.labels),
        rare_class(kind, train, dev, scored_on),
        None if kind.skips_empty_rows else empty_texts(kind.task, train),
        cut_inputs(kind, train),
        unknown_tokens(kind, train),
    )
    return [f"Warning: {sentence}" for sentence in found if sentence is not None]


def shared_rows(task: Task, train: Dataset, dev: Dataset, scored_on: str = "dev") -> str | None:
    """Say how many dev rows have the same texts as a training row."""
    known = set(_texts(task, train))
    count = sum(texts in known for texts in _texts(task, dev))
    if not count:
        return None
    return (
        f"{count} of {len(dev)} {scored_on} rows {'is' if count == 1 else 'are'} also in train (same texts), so the "
        "score is too high: remove such rows from train."
    )


def similar_classes(labels: Sequence[str]) -> str | None:
    """Name two classes that differ only in case or in spaces around them."""
    known: dict[str, str] = {}
    for label in labels:
        if (other := known.setdefault(label.strip().casefold(), label)) != label:
            both = f"the classes {other!r} and {label!r}"
            return f"{both} differ only in case or spaces: spell classes alike in all rows."
    return None


def rare_class(kind: Kind, train: Dataset, dev: Dataset, scored_on: str = "dev") -> str | None:
    """Name a class of at most two training rows, and none in dev, where others have at least ten times as many."""
    if not (kind.has_classes and kind.one_class_per_row):
        return None
    counts = Counter(kind.gold(train))
    few = len(train) / (10 * len(kind.task.labels))
    rare = [each for each in counts.keys() - {*kind.gold(dev)} if counts[each] <= min(2, few)]
    if not rare:
        return None
    names, number = kind.task.labels, min(rare)
    others = [name for name in names if name != names[number]]
    return (
        f"class {names[number]!r} has {counts[number]} of {len(train)} training rows and none in {scored_on}."
        f"{did_you_mean(names[number], others)}"
    )


def empty_texts(task: Task, train: Dataset) -> str | None:
    """Say how many rows have no text, or a choice without text."""
    for columns, counts, what in (
        (task.columns, all, f"no text in {' and '.join(task.columns)}"),
        (task.choices, any, "a choice without text"),
    ):
        rows = zip(*(map(_is_empty, column_of(train, name)) for name in columns), strict=True)
        if count := sum(counts(row) for row in rows):
            verb = "has" if count == 1 else "have"
            return f"{count} of {len(train)} training rows {verb} {what}: remove or fill them."
    return None


def _is_empty(text: Any) -> bool:
    if isinstance(text, list) and all(isinstance(word, str) for word in text):
        text = "".join(text)
    return not text.strip() if isinstance(text, str) else not text  # an image, or a conversation


def cut_inputs(kind: Kind, rows: Dataset, name: str = "training inputs") -> str | None:
    """Say how many inputs are cut and how long the longest one is, if more than a fifth are cut."""
    if kind.has_windows:
        return None
    lengths = kind.lengths(encoded) if (encoded := _encoded(replace(kind, max_length=_UNCUT), rows, CHECKED)) else []
    cut = sum(length > kind.max_length for length in lengths)
    if cut <= MUCH * len(lengths):
        return None
    which = "the first " if len(rows) > CHECKED else ""
    return (
        f"{cut} of {which}{len(lengths)} {name} ({cut / len(lengths):.0%}) are cut by --max-length {kind.max_length}; "
        f"the longest has {max(lengths)} tokens."
    )


def unknown_tokens(kind: Kind, rows: Dataset, name: str = "training inputs") -> str | None:
    """Say which share of the tokens is unknown to the tokenizer, if more than a third are, or that there are none."""
    if kind.reads_images:
        return None
    # A copy, because encoding sets the tokenizer's truncation, which would be saved with the model.
    if (encoded := _encoded(copy.deepcopy(kind), rows, _READ)) is None:
        return None
    tokenizer = kind.tokenizer
    special, unknown = set(tokenizer.all_special_ids), tokenizer.unk_token_id
    marks = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    if unknown in {*marks, tokenizer.pad_token_id}:  # GPT-2 has one token for all, and knows every byte
        unknown = None
    ids = chain.from_iterable(encoded["input_ids"][:])
    ids = chain.from_iterable(ids) if kind.needs_choices else ids
    tokens = [token for token in ids if token == unknown or token not in special]
    advice = "check that the tokenizer belongs to the model and fits the language of your texts."
    if not tokens and len(rows):
        return f"the tokenizer finds no token in the {name}: {advice}"
    share = sum(token == unknown for token in tokens) / max(1, len(tokens))
    if share <= _UNKNOWN:
        return None
    return f"{share:.0%} of the tokens in the {name} are unknown to the tokenizer ({tokenizer.unk_token}): {advice}"


def _encoded(kind: Kind, rows: Dataset, most: int) -> Dataset | None:
    """Encode the first rows; ``None`` if none of them has a token to predict, although others may."""
    with suppress(InputError):
        return kind.encode(rows.select(range(min(most, len(rows)))))
    return None


def _texts(task: Task, rows: Dataset) -> list[Any]:
    """Return what tells rows apart: their texts, or the pixels of their images."""
    columns = (column_of(rows, name) for name in (*task.columns, *task.choices))
    return list(zip(*(map(_identity, column) for column in columns), strict=True))


def _identity(value: Any) -> Any:
    return (value.size, value.mode, value.tobytes()) if hasattr(value, "tobytes") else repr(value)
