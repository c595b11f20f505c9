"""Micro-batches: a batch in parts that fit into memory, with gradients that add up to those of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from attnreg.errors import InputError
from attnreg.outputs import IGNORED, a_batch, shifts_labels
from attnreg.regularizer.base import Regularizer
from attnreg.training.method import Batch


def split_batch(batch: Batch, count: int, model: nn.Module) -> list[tuple[Batch, float]]:
    """Split a batch by rows, each part with its weight: the loss of the batch is the weighted sum of theirs.

    A model's loss is a mean over rows or, where labels are -100 in places, over the other positions. Each part weighs
    as much as it has of these. Parts without any are left out. The model tells whether labels are shifted.
    """
    named = batch if isinstance(batch, Mapping) else a_batch(model, batch)
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.dim()}
    rows = {name: len(value) for name, value in tensors.items()}
    if len(set(rows.values())) != 1:
        raise InputError(f"Cannot split the batch: its tensors have different numbers of rows: {rows}.")
    first, size = next(iter(rows.items()))
    columns = [value.tensor_split(min(count, size)) for value in tensors.values()]
    parts = [{**batch, **dict(zip(tensors, each, strict=True))} for each in zip(*columns, strict=True)]
    shifted = shifts_labels(model)
    terms = [_terms(part, shifted, len(part[first])) for part in parts]
    total = sum(terms)
    if not total:  # the loss of the whole batch is no number either
        return [(batch, 1.0)]
    return [(part, own / total) for part, own in zip(parts, terms, strict=True) if own]


def _terms(part: Batch, shifted: bool, rows: int) -> int:
    """Return the number of terms in the mean that is the part's loss."""
    labels = part.get("labels")
    if labels is None or labels.is_floating_point():
        return rows
    return int(((labels[:, 1:] if shifted and labels.dim() == 2 else labels) != IGNORED).sum())


def check_splittable(provider: Regularizer) -> None:
    """Check that a provider masks each row by itself, so that parts of a batch are masked as in the whole batch."""
    for each in provider.parts():
        if each.decides_for_batch:
            raise InputError(
                f"{type(each).__name__} decides once for all rows of a batch, which micro-batches would not share: "
                "train on whole batches, without gradient accumulation."
            )
