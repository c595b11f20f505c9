"""Recognize one attention that is computed in several parts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from attnreg.injection.discovery.finder import Sighting
from attnreg.injection.discovery.origins import NOTHING, compact

Parts = Literal["rows", "blocks", "values"]


def in_parts(sightings: Sequence[Sighting]) -> dict[Sighting, tuple[Parts, list[Sighting]]]:
    """Group the sightings of attention that is computed in parts: by the first part, the kind and the other parts.

    Kinds: ``"rows"`` have their own queries and keys, such as one image or window each, and another batch may have
    more; ``"blocks"`` have their own queries, and layouts may differ (block-sparse attention); ``"values"`` have the
    same queries and keys, but other values.
    """
    groups: dict[int, list[Sighting]] = defaultdict(list)
    for sighting in sightings:
        groups[id(sighting.place)].append(sighting)
    found: dict[Sighting, tuple[Parts, list[Sighting]]] = {}
    for first, *others in groups.values():
        kinds = {_kind(a, b) for a, b in itertools.combinations([first, *others], 2)}
        if None in kinds or not kinds or kinds > {"values"}:
            continue
        found[first] = "blocks" if "blocks" in kinds else min(kind for kind in kinds if kind), others
    return found


def _kind(a: Sighting, b: Sighting) -> Parts | None:
    """Return how two sightings in one module call are parts of one attention; ``None`` if they are not."""
    one, other = a.reading, b.reading
    assert one is not None
    assert other is not None
    alike = (a.backend, one.layout, a.heads) == (b.backend, other.layout, b.heads)
    if alike and a.asked is not None and b.asked is not None and all(map(_is_same, a.asked, b.asked)):
        return "values"
    if {one.relation, other.relation} != {"self"} or not one.streams & other.streams:
        return None
    queries, keys = (_are_apart(mine, theirs) for mine, theirs in zip(one.rows, other.rows, strict=True))
    return None if not queries else "rows" if alike and keys else "blocks"


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _are_apart(mine: Tensor, theirs: Tensor) -> bool:
    places, others = _places(mine), _places(theirs)
    return bool(places) and bool(others) and not places & others


def _places(part: Tensor) -> set[tuple[int, ...]]:
    """Return the distinct known origins of ``(2, ...)``."""
    ends = compact(part).flatten(1)
    return set(map(tuple, ends[:, ends[1] != NOTHING].unique(dim=1).T.tolist()))
