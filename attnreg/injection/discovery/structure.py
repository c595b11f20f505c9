"""Derive the kind of an attention from the origins of its scores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from attnreg.injection.backends import Call
from attnreg.injection.backends.layout import Layout
from attnreg.injection.discovery.origins import NOTHING, PRODUCT, Origins, compact
from attnreg.injection.discovery.rules import PARTS, differs, has, is_known, is_pair, varies

Relation = Literal["self", "cross", "learned queries"]


@dataclass(frozen=True)
class Structure:
    """The kind of an attention."""

    layout: Layout  # layout of its scores
    relation: Relation  # whether queries are among the keys, come from elsewhere, or do not depend on the input
    key_part: int | None  # index in ``PARTS`` of the keys' origins; ``None`` if no origin is known
    is_certain: bool  # whether the layout follows from origins, not from convention
    streams: frozenset[int]  # the streams that queries come from
    origins: tuple[Tensor, Tensor] = field(repr=False)  # of queries and of keys, ``(2, ...)``
    same_order: bool = True  # whether queries and keys are in the same order, as far as known


def structure_of(origin: Tensor | None, call: Call, origins: Origins, heads: int | None = None) -> Structure | None:
    """Derive the kind of an attention; ``None`` if scores of this ``origin`` are not products of queries and keys.

    ``heads`` is H, if known (in ``nn.MultiheadAttention``).
    """
    if origin is None or not (has(origin, PRODUCT) or is_pair(origin)):
        return None
    shape, dim = call.shape, call.dim % len(call.shape)
    positions = origins.positions(origin)
    if any(varies(positions[part], dim) for part in PARTS) or not any(varies(origin[part], dim) for part in PARTS):
        origin = positions
    moving = [varies(origin[part], dim) for part in PARTS]
    known = [is_known(origin, part) for part in PARTS]
    key_part: int | None = None
    if moving[0] != moving[1]:
        key_part = moving.index(True)
    elif all(known):
        counts = [sum(varies(origin[part], axis) for axis in range(len(shape)) if axis != dim) for part in PARTS]
        key_part = 0 if counts[0] < counts[1] else 1
    elif any(known):
        key_part = known.index(True)
    keys = origin[PARTS[1 if key_part is None else key_part]]
    queries = origin[PARTS[0 if key_part is None else 1 - key_part]]
    relation = _relation(queries, keys, shape, dim, origins)
    if heads is not None and len(shape) in (3, 4):
        layout, is_certain = (Layout("fqk", heads) if len(shape) == 3 else Layout()), True
    else:
        letters, folded_heads, is_certain = _letters(queries, keys, shape, dim)
        if call.query is not None:
            letters = [*("h" if letter == "q" else letter for letter in letters[:-2]), "q", "k"]
        layout = Layout("".join(letters), folded_heads)
    if relation == "self" and _are_queries_foreign(queries, keys, layout, shape):
        relation = "cross"
    before, after = _sinks(queries, keys, layout, shape, dim, origins) if relation == "self" else (0, 0)
    _, _, rows, columns = layout.sizes(shape)
    layout = replace(layout, sinks_before=before, sinks_after=after, was_square=0 < before + after == columns - rows)
    streams = frozenset(origins.streams(queries))
    same_order = relation != "self" or not _is_shuffled(queries, keys, layout)
    return Structure(layout, relation, key_part, is_certain, streams, (queries, keys), same_order)


def _relation(queries: Tensor, keys: Tensor, shape: tuple[int, ...], dim: int, origins: Origins) -> Relation:
    streams = origins.streams(queries)
    columns = [column for column in _columns(keys, dim, origins) if column]
    if not streams:
        # Queries do not depend on the input: parameters attend to parameters, or to the input.
        square = any(size == shape[dim] for axis, size in enumerate(shape) if axis != dim)
        return "self" if not columns and square else "learned queries"
    # Self-attention: keys come from the queries' streams, except for learned vectors and a bias on all scores.
    columns = [column for column in columns if column & streams or not column <= origins.learned]
    is_self = bool(columns) and all(column & streams for column in columns) and streams <= set().union(*columns)
    return "self" if is_self else "cross"


def _is_shuffled(queries: Tensor, keys: Tensor, layout: Layout) -> bool:
    """Whether queries have the positions of the keys, or of some of the keys, in another order."""
    if not layout.has_queries or layout.has_sinks:
        return False
    rows, columns = (
        torch.stack([layout.canonical(end) for end in part]).amax(dim).flatten(1, 2).transpose(0, 1)  # (B * H, 2, N)
        for part, dim in ((queries, 4), (keys, 3))
    )
    if torch.equal(rows, columns):
        return False
    pairs = [[sorted(map(tuple, part.T.tolist())) for part in pair] for pair in zip(rows, columns, strict=True)]
    if rows.shape == columns.shape:
        return all(row == column for row, column in pairs)
    ordered = [(columns.diff() * sign >= 0).all((0, 2)) & ~(rows.diff() * sign >= 0).all((0, 2)) for sign in (-1, 1)]
    return bool(ordered[0][0] | ordered[1][1]) and all(set(row) <= set(column) for row, column in pairs)


def _are_queries_foreign(queries: Tensor, keys: Tensor, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether only keys differ by position, or neither keys nor queries do, and their numbers differ."""
    if layout.dims.count("q") != 1:
        return False
    query_dim, key_dim = layout.dims.index("q"), layout.dims.index("k")
    if varies(queries, query_dim) or shape[query_dim] == 1:
        return False
    return varies(keys, key_dim) or (is_known(queries, slice(0, 2)) and shape[query_dim] != shape[key_dim])


def _columns(keys: Tensor, dim: int, origins: Origins) -> list[set[int]]:
    """Return the streams that the keys come from, by column."""
    part = compact(keys)
    other_dims = [axis + 1 for axis in range(part.dim() - 1) if axis != dim]
    return [{stream for stream in ends if stream >= 0} for ends in origins.ends(part.amax(other_dims)).T.tolist()]


def _letters(queries: Tensor, keys: Tensor, shape: tuple[int, ...], dim: int) -> tuple[list[str], int, bool]:
    letters, heads, is_certain = ["?"] * len(shape), 1, True
    letters[dim] = "k"
    for axis, size in enumerate(shape):
        if axis == dim or size == 1:
            continue
        if differs(keys, axis):
            letters[axis], folded_heads = _folded(torch.cat([queries, keys]), axis)
            heads *= folded_heads
        else:
            letters[axis] = "q" if differs(queries, axis) else "h"
    if len(shape) > 3 and "h" in letters:  # heads have a separate dimension
        letters, heads = ["b" if letter in "fg" else letter for letter in letters], 1
    if letters.count("q") > 1 and not set("bfg") & set(letters):  # all samples share their keys
        axis = letters.index("q")
        letters[axis], heads = _folded(queries, axis)
    is_local = "b" in letters and varies(keys, dim) and bool((queries[1] != NOTHING).any())
    if "q" not in letters and not (is_local and (letters.count("b") > 1 or letters.count("h") < 2)):
        near = dim - 1 if dim else 1
        if letters[near] in "h?":
            is_certain = letters[near] == "?"
            letters[near] = "q"
    if len(letters) > 3 and letters[0] == "h" and not set("bfg") & set(letters):
        letters[0], is_certain = "b", False  # origins no longer distinguish samples
    if letters == ["b", "b", "q", "k"]:
        letters[1] = "h"  # as in torch; here the keys of different heads have different origins
    for axis in [axis for axis, letter in enumerate(letters) if letter == "?"]:
        letters[axis] = "b" if not set("bfg") & set(letters) else "h" if "h" not in letters else "1"
    if not set("bfg") & set(letters) and letters.count("h") == 1 and len(shape) == 3 and shape[letters.index("h")] > 1:
        is_certain = False  # samples and heads cannot be distinguished
    return letters, heads, is_certain


def _folded(origin: Tensor, axis: int) -> tuple[str, int]:
    """Return whether a dimension of samples also holds heads (``b``, ``f`` or ``g``), and the number of heads."""
    rows = origin.movedim(axis + 1, 0).flatten(1)
    size = len(rows)
    distinct = len(rows.unique(dim=0))
    if distinct == size or size % distinct:
        return "b", 1
    heads = size // distinct
    if (rows.unflatten(0, (distinct, heads)) == rows.unflatten(0, (distinct, heads))[:, :1]).all():
        return "f", heads
    if (rows.unflatten(0, (heads, distinct)) == rows[:distinct]).all():
        return "g", heads
    return "b", 1


def _sinks(
    queries: Tensor, keys: Tensor, layout: Layout, shape: tuple[int, ...], dim: int, origins: Origins
) -> tuple[int, int]:
    """Return the numbers of leading and trailing columns that are not query positions."""
    _, _, rows, columns = layout.sizes(shape)
    if rows == columns:
        return 0, 0
    streams = origins.streams(queries)
    is_padded = bool((queries.amax(dim + 1)[1] == NOTHING).any())  # padded keys are not sinks
    foreign = [not column & streams and not (is_padded and not column) for column in _columns(keys, dim, origins)]
    if len(foreign) != columns or all(foreign) or not any(foreign):
        return 0, 0
    before = next(i for i, is_foreign in enumerate(foreign) if not is_foreign)
    after = next(i for i, is_foreign in enumerate(reversed(foreign)) if not is_foreign)
    return (before, after) if before + after == sum(foreign) else (0, 0)
