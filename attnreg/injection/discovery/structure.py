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
    keys: int | None  # which of the two origins is the keys' (0 or 1); ``None`` if neither is known
    sure: bool  # whether the layout follows from origins, not from convention
    streams: frozenset[int]  # the streams that queries come from
    rows: tuple[Tensor, Tensor] = field(repr=False)  # the origins of queries and of keys, each ``(2, ...)``
    in_order: bool = True  # whether queries and keys are in the same order, as far as known


def structure_of(origin: Tensor | None, call: Call, origins: Origins, heads: int | None = None) -> Structure | None:
    """Derive the kind of an attention; ``None`` if its scores, of this ``origin``, are no products of queries and keys.

    ``heads`` is H, if known (in ``nn.MultiheadAttention``).
    """
    if origin is None or not (has(origin, PRODUCT) or is_pair(origin)):
        return None
    shape, dim = call.shape, call.dim % len(call.shape)
    together = origins.positions(origin)
    if any(varies(together[part], dim) for part in PARTS) or not any(varies(origin[part], dim) for part in PARTS):
        origin = together
    moving = [varies(origin[part], dim) for part in PARTS]
    known = [is_known(origin, part) for part in PARTS]
    keys: int | None = None
    if moving[0] != moving[1]:
        keys = moving.index(True)
    elif all(known):
        others = [sum(varies(origin[part], place) for place in range(len(shape)) if place != dim) for part in PARTS]
        keys = 0 if others[0] < others[1] else 1
    elif any(known):
        keys = known.index(True)
    key_part = origin[PARTS[1 if keys is None else keys]]
    query_part = origin[PARTS[0 if keys is None else 1 - keys]]
    relation = _relation(query_part, key_part, shape, dim, origins)
    if heads is not None and len(shape) in (3, 4):
        layout, sure = (Layout("fqk", heads) if len(shape) == 3 else Layout()), True
    else:
        letters, own, sure = _letters(query_part, key_part, shape, dim)
        if call.query is not None:
            letters = [*("h" if letter == "q" else letter for letter in letters[:-2]), "q", "k"]
        layout = Layout("".join(letters), own)
    if relation == "self" and _asks_from_elsewhere(query_part, key_part, layout, shape):
        relation = "cross"
    before, after = _sinks(query_part, key_part, layout, shape, dim, origins) if relation == "self" else (0, 0)
    _, _, rows, columns = layout.sizes(shape)
    layout = replace(layout, sinks_before=before, sinks_after=after, rest_asks=0 < before + after == columns - rows)
    streams = frozenset(origins.streams(query_part))
    in_order = relation != "self" or not _is_shuffled(query_part, key_part, layout)
    return Structure(layout, relation, keys, sure, streams, (query_part, key_part), in_order)


def _relation(queries: Tensor, keys: Tensor, shape: tuple[int, ...], dim: int, origins: Origins) -> Relation:
    ours = origins.streams(queries)
    columns = [column for column in _columns(keys, dim, origins) if column]
    if not ours:
        # Queries do not depend on the input: parameters attend to each other, or to the input.
        square = any(size == shape[dim] for place, size in enumerate(shape) if place != dim)
        return "self" if not columns and square else "learned queries"
    # Self-attention: keys come from the queries' streams, except for learned vectors and a bias on all scores.
    columns = [column for column in columns if column & ours or not column <= origins.learned]
    return "self" if columns and all(column & ours for column in columns) and ours <= set().union(*columns) else "cross"


def _is_shuffled(queries: Tensor, keys: Tensor, layout: Layout) -> bool:
    """Whether queries are the keys, or some of them, in another order."""
    if not layout.has_queries or layout.has_sinks:
        return False
    rows, columns = (
        torch.stack([layout.canonical(end) for end in part]).amax(dim).flatten(1, 2).transpose(0, 1)  # (B * H, 2, N)
        for part, dim in ((queries, 4), (keys, 3))
    )
    if torch.equal(rows, columns):
        return False
    pairs = [[sorted(map(tuple, part.T.tolist())) for part in each] for each in zip(rows, columns, strict=True)]
    if rows.shape == columns.shape:
        return all(mine == theirs for mine, theirs in pairs)
    ordered = [(columns.diff() * sign >= 0).all((0, 2)) & ~(rows.diff() * sign >= 0).all((0, 2)) for sign in (-1, 1)]
    return bool(ordered[0][0] | ordered[1][1]) and all(set(mine) <= set(theirs) for mine, theirs in pairs)


def _asks_from_elsewhere(queries: Tensor, keys: Tensor, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether keys differ by position and queries do not, or neither does and their numbers differ."""
    if layout.dims.count("q") != 1:
        return False
    place, dim = layout.dims.index("q"), layout.dims.index("k")
    if varies(queries, place) or shape[place] == 1:
        return False
    return varies(keys, dim) or (is_known(queries, slice(0, 2)) and shape[place] != shape[dim])


def _columns(keys: Tensor, dim: int, origins: Origins) -> list[set[int]]:
    """Return the streams that the keys of each column come from."""
    part = compact(keys)
    others = [place + 1 for place in range(part.dim() - 1) if place != dim]
    return [{stream for stream in ends if stream >= 0} for ends in origins.ends(part.amax(others)).T.tolist()]


def _letters(queries: Tensor, keys: Tensor, shape: tuple[int, ...], dim: int) -> tuple[list[str], int, bool]:
    letters, heads, sure = ["?"] * len(shape), 1, True
    letters[dim] = "k"
    for place, size in enumerate(shape):
        if place == dim or size == 1:
            continue
        if differs(keys, place):
            letters[place], own = _flat(torch.cat([queries, keys]), place)
            heads *= own
        else:
            letters[place] = "q" if differs(queries, place) else "h"
    if len(shape) > 3 and "h" in letters:  # heads have a dimension of their own
        letters, heads = ["b" if letter in "fg" else letter for letter in letters], 1
    if letters.count("q") > 1 and not set("bfg") & set(letters):  # all samples share their keys
        place = letters.index("q")
        letters[place], heads = _flat(queries, place)
    is_local = "b" in letters and varies(keys, dim) and bool((queries[1] != NOTHING).any())
    if "q" not in letters and not (is_local and (letters.count("b") > 1 or letters.count("h") < 2)):
        near = dim - 1 if dim else 1
        if letters[near] in "h?":
            sure = letters[near] == "?"
            letters[near] = "q"
    if len(letters) > 3 and letters[0] == "h" and not set("bfg") & set(letters):
        letters[0], sure = "b", False  # origins no longer distinguish samples
    if letters == ["b", "b", "q", "k"]:
        letters[1] = "h"  # as in torch; here the keys of each head have their own origins
    open_places = [place for place, letter in enumerate(letters) if letter == "?"]
    for place in open_places:
        letters[place] = "b" if not set("bfg") & set(letters) else "h" if "h" not in letters else "1"
    if not set("bfg") & set(letters) and letters.count("h") == 1 and len(shape) == 3 and shape[letters.index("h")] > 1:
        sure = False  # samples and heads cannot be distinguished
    return letters, heads, sure


def _flat(parts: Tensor, place: int) -> tuple[str, int]:
    """Return whether a dimension of samples also holds heads (``b``, ``f`` or ``g``), and the number of heads."""
    rows = parts.movedim(place + 1, 0).flatten(1)
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
    ours = origins.streams(queries)
    is_padded = bool((queries.amax(dim + 1)[1] == NOTHING).any())  # padded keys are not sinks
    foreign = [not column & ours and not (is_padded and not column) for column in _columns(keys, dim, origins)]
    if len(foreign) != columns or all(foreign) or not any(foreign):
        return 0, 0
    before = next(i for i, is_foreign in enumerate(foreign) if not is_foreign)
    after = next(i for i, is_foreign in enumerate(reversed(foreign)) if not is_foreign)
    return (before, after) if before + after == sum(foreign) else (0, 0)
