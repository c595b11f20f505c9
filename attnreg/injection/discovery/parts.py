"""One attention that is computed in several calls of one function."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from attnreg.injection.discovery.finder import Sighting
from attnreg.injection.discovery.origins import NOTHING, compact

Parts = Literal["rows", "values"]


def in_parts(sightings: Sequence[Sighting]) -> dict[Sighting, tuple[Parts, list[Sighting]]]:
    """Those that are computed in parts, by the first of them.

    A part is either of ``"rows"``: queries and keys of its own, such as those of one image or one window, of which
    another batch may have more; or of ``"values"``: other values for the same queries and keys.

    Args:
        sightings: all attention.
    """
    groups: dict[Any, list[Sighting]] = defaultdict(list)
    for sighting in sightings:
        groups[id(sighting.place), sighting.backend, sighting.rank].append(sighting)
    found: dict[Sighting, tuple[Parts, list[Sighting]]] = {}
    for first, *others in groups.values():
        kinds = {_kind(a, b) for a, b in itertools.combinations([first, *others], 2)}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is not None:
            found[first] = kind, others
    return found


def _kind(a: Sighting, b: Sighting) -> Parts | None:
    """What two attentions in one call of a module are to each other, if they are parts of one."""
    one, other = a.reading, b.reading
    assert one is not None
    assert other is not None
    if (one.layout, one.relation, a.heads) != (other.layout, other.relation, b.heads):
        return None
    if a.asked is not None and b.asked is not None and all(map(_is_same, a.asked, b.asked)):
        return "values"
    rows = zip(one.rows, other.rows, strict=True)
    if one.relation != "self" or one.streams != other.streams:
        return None
    return "rows" if all(_are_apart(mine, theirs) for mine, theirs in rows) else None


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _are_apart(mine: Tensor, theirs: Tensor) -> bool:
    places, others = _places(mine), _places(theirs)
    return bool(places) and bool(others) and not places & others


def _places(part: Tensor) -> set[tuple[int, ...]]:
    """The origins ``(2, ...)`` that there are, each once."""
    ends = compact(part).flatten(1)
    return set(map(tuple, ends[:, ends[1] != NOTHING].unique(dim=1).T.tolist()))
