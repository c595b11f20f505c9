"""One attention that is computed in several calls of one function."""

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
    """Those that are computed in parts, by the first of them.

    Parts are either ``"rows"``: queries and keys of their own, such as those of one image or one window, of which
    another batch may have more; or ``"blocks"``: queries of their own, each block in its own way (block-sparse
    attention); or ``"values"``: other values for the same queries and keys.

    Args:
        sightings: all attention.
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
    """What two attentions in one call of a module are to each other, if they are parts of one."""
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
    """The origins ``(2, ...)`` that there are, each once."""
    ends = compact(part).flatten(1)
    return set(map(tuple, ends[:, ends[1] != NOTHING].unique(dim=1).T.tolist()))
