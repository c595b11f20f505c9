"""The attention sites of a model: what a dry run has seen, numbered by layer and with its parts together."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnreg.errors import NoAttentionError
from attnreg.injection.backends.base import Parts
from attnreg.injection.backends.layout import Layout
from attnreg.injection.discovery.blocks import ModuleCall, block_of, number_layers
from attnreg.injection.discovery.finder import Sighting
from attnreg.injection.discovery.origins import NOTHING, compact
from attnreg.injection.discovery.reading import Reading
from attnreg.sites import SiteInfo, Stack


@dataclass(frozen=True, eq=False)
class FoundSite:
    """An attention site of a model."""

    info: SiteInfo  # the site as providers see it
    sighting: Sighting  # where the dry run saw it
    layout: Layout  # layout of its scores
    block: ModuleCall | None = None  # the Transformer block that contains it, if it is self-attention in a block
    parts: Parts | None = None  # how it is split, if it is computed in several parts
    others: tuple[Sighting, ...] = ()  # the sightings of its other parts

    @property
    def module(self) -> nn.Module:
        """The module whose own forward computes the attention."""
        return self.sighting.place.module

    def begins_again(self, first: FoundSite | None) -> bool:
        """Whether it is a later call of the module of ``first``, on another sequence instead of the states of that."""
        if first is None or first.module is not self.module or first.sighting.place is self.sighting.place:
            return False
        readings = (each.sighting.reading for each in (first, self))
        streams, others = (frozenset() if reading is None else reading.streams for reading in readings)
        return bool(streams and others) and streams.isdisjoint(others)


def sites_of(model: nn.Module, names: Mapping[nn.Module, str], sightings: Sequence[Sighting]) -> tuple[FoundSite, ...]:
    """Return the attention sites of a model, given the names of its modules and the attention seen in them."""
    _settle(sightings, names)
    parts = _in_parts(sightings)
    later = {sighting for _, others in parts.values() for sighting in others}
    sightings = [sighting for sighting in sightings if sighting not in later]
    stacks = [_stack(sighting) for sighting in sightings]
    layers: dict[Sighting, tuple[int, int]] = {}  # and the depth of its stack
    for stack in dict.fromkeys(stacks):
        inside = [sighting for sighting, each in zip(sightings, stacks, strict=True) if each == stack]
        numbers, depth = number_layers(model, [names[sighting.place.module] for sighting in inside])
        layers |= {sighting: (number, depth) for sighting, number in zip(inside, numbers, strict=True)}
    seen: Counter[tuple[nn.Module, int]] = Counter()
    sites = []
    for sighting, stack in zip(sightings, stacks, strict=True):
        place, reading, path = sighting.place, sighting.reading, names[sighting.place.module]
        assert reading is not None
        kind, others = parts.get(sighting, (None, []))
        seen[place.module, place.index] += 1
        again = seen[place.module, place.index]
        info = SiteInfo(
            name=path + (f"#{place.index + 1}" if place.index else "") + (f"@{again}" if again > 1 else ""),
            layer=layers[sighting][0],
            num_layers=layers[sighting][1],
            stack=stack,
            heads=sighting.heads,
            head_size=sighting.head_size,
            shares_keys=reading.layout.has_queries and kind != "blocks",
            in_parts=sighting in parts,
        )
        block = block_of(model, path, sighting.running)
        sites.append(FoundSite(info, sighting, reading.layout, block, kind, tuple(others)))
    return tuple(sites)


def _settle(sightings: Sequence[Sighting], names: Mapping[nn.Module, str]) -> None:
    """Give attention of unclear layout the layout of attention in modules of the same class, or of the same size."""
    layouts = [(each, each.reading.layout) for each in reversed(sightings) if each.reading and each.reading.sure]
    known: dict[Any, Layout] = {(each.shape[0], each.backend, each.rank): layout for each, layout in layouts}
    known |= {(type(each.place.module), each.backend, each.rank): layout for each, layout in layouts}
    for sighting in sightings:
        reading = sighting.reading
        if reading is None or reading.sure:
            continue
        kind = sighting.backend, sighting.rank
        layout = known.get((type(sighting.place.module), *kind)) or known.get((sighting.shape[0], *kind))
        if layout is not None:
            sighting.reading = replace(reading, layout=layout)
        elif sighting.rank == 3:
            raise NoAttentionError(
                f"Samples and heads share a dimension at {names[sighting.place.module]}, and their order is not "
                "clear from one sample. Pass `example_inputs` with two samples."
            )


def _stack(sighting: Sighting) -> Stack:
    assert sighting.reading is not None
    if sighting.reading.relation != "self":
        return "cross"
    inside_decoder = any(isinstance(call.module, nn.TransformerDecoderLayer) for call in sighting.running)
    return "decoder" if sighting.causal or inside_decoder else "encoder"


def _in_parts(sightings: Sequence[Sighting]) -> dict[Sighting, tuple[Parts, list[Sighting]]]:
    """Group the sightings of attention that is computed in parts: by the first part, the kind and the other parts."""
    groups: dict[int, list[Sighting]] = defaultdict(list)
    for sighting in sightings:
        groups[id(sighting.place)].append(sighting)
    found: dict[Sighting, tuple[Parts, list[Sighting]]] = {}
    for first, *others in groups.values():
        kinds = {_kind(a, b) for a, b in itertools.combinations([first, *others], 2)}
        if None in kinds or not kinds or kinds > {"values"}:
            continue
        found[first] = next(kind for kind in kinds if kind) if len(kinds) == 1 else "blocks", others
    return found


def _kind(a: Sighting, b: Sighting) -> Parts | None:
    """Return how two sightings in one module call are parts of one attention; ``None`` if they are not."""
    one, other = a.reading, b.reading
    assert one is not None
    assert other is not None
    alike = (a.backend, one.layout, a.heads) == (b.backend, other.layout, b.heads)
    pairs = [*zip(a.asked or (), b.asked or (), strict=False)]
    same = ((x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride()) for x, y in pairs)
    if alike and pairs and all(same):
        return "values"
    if {one.relation, other.relation} != {"self"} or not one.streams & other.streams:
        return None
    places = ((_places(mine), _places(theirs)) for mine, theirs in zip(one.rows, other.rows, strict=True))
    queries, keys = (bool(mine and theirs) and not mine & theirs for mine, theirs in places)  # whether they are apart
    if not queries:
        return None
    return "rows" if alike and keys else "queries" if alike and _begin_alike(one, other) else "blocks"


def _begin_alike(one: Reading, other: Reading) -> bool:
    """Whether two readings have the same keys, or one the first keys of the other."""
    if not one.layout.has_queries:
        return False
    a, b = (
        torch.stack([each.layout.canonical(end) for end in each.rows[1]]).amax((2, 3)) for each in (one, other)
    )  # (2, B, K)
    keys = min(a.shape[-1], b.shape[-1])
    return torch.equal(a[..., :keys], b[..., :keys])


def _places(part: Tensor) -> set[tuple[int, ...]]:
    """Return the distinct known origins of ``(2, ...)``."""
    ends = compact(part).flatten(1)
    return set(map(tuple, ends[:, ends[1] != NOTHING].unique(dim=1).T.tolist()))
