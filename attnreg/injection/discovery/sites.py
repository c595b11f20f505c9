"""The attention sites of a model: the attentions of a dry run, numbered by layer, with their parts put together."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from attnreg.errors import NoAttentionError
from attnreg.injection.backends.base import Parts
from attnreg.injection.backends.layout import Layout
from attnreg.injection.discovery.blocks import ModuleCall, block_of, number_layers
from attnreg.injection.discovery.finder import AttentionCall
from attnreg.injection.discovery.origins import NOTHING, compact
from attnreg.sites import SiteInfo, Stack


@dataclass(frozen=True, eq=False)
class ModelSite:
    """An attention site of a model."""

    info: SiteInfo  # the site as providers see it
    attention: AttentionCall  # where the dry run saw it
    layout: Layout  # layout of its scores
    block: ModuleCall | None = None  # the Transformer block that contains it, if it is self-attention in a block
    parts: Parts | None = None  # how the attention is split, if it is computed in several parts
    others: tuple[AttentionCall, ...] = ()  # the attentions of its other parts

    @property
    def module(self) -> nn.Module:
        """The module whose forward computes the attention."""
        return self.attention.caller.module

    def begins_again(self, first: ModelSite | None) -> bool:
        """Whether it is a later call of the module of ``first``, on another sequence."""
        if first is None or first.module is not self.module or first.attention.caller is self.attention.caller:
            return False
        structures = (site.attention.structure for site in (first, self))
        first_streams, streams = (frozenset() if structure is None else structure.streams for structure in structures)
        return bool(first_streams and streams) and first_streams.isdisjoint(streams)


def sites_of(
    model: nn.Module, names: Mapping[nn.Module, str], attentions: Sequence[AttentionCall]
) -> tuple[ModelSite, ...]:
    """Return the attention sites of a model, from the names of its modules and the attentions of a dry run."""
    _complete_layouts(attentions, names)
    parts = _in_parts(attentions)
    later = {attention for _, later_parts in parts.values() for attention in later_parts}
    attentions = [attention for attention in attentions if attention not in later]
    stacks = [_stack(attention) for attention in attentions]
    layers: dict[AttentionCall, tuple[int, int]] = {}  # the layer, and the depth of its stack
    for stack in dict.fromkeys(stacks):
        inside = [attention for attention, its_stack in zip(attentions, stacks, strict=True) if its_stack == stack]
        numbers, depth = number_layers(model, [names[attention.caller.module] for attention in inside])
        layers |= {attention: (number, depth) for attention, number in zip(inside, numbers, strict=True)}
    seen: Counter[tuple[nn.Module, int]] = Counter()
    sites = []
    for attention, stack in zip(attentions, stacks, strict=True):
        caller, structure, path = attention.caller, attention.structure, names[attention.caller.module]
        assert structure is not None
        kind, later_parts = parts.get(attention, (None, []))
        seen[caller.module, caller.index] += 1
        count = seen[caller.module, caller.index]
        info = SiteInfo(
            name=path + (f"#{caller.index + 1}" if caller.index else "") + (f"@{count}" if count > 1 else ""),
            layer=layers[attention][0],
            num_layers=layers[attention][1],
            stack=stack,
            heads=attention.heads,
            head_size=attention.head_size,
            shares_keys=structure.layout.has_queries and kind != "blocks",
            in_parts=attention in parts,
        )
        block = block_of(model, path, attention.running)
        sites.append(ModelSite(info, attention, structure.layout, block, kind, tuple(later_parts)))
    return tuple(sites)


def _complete_layouts(attentions: Sequence[AttentionCall], names: Mapping[nn.Module, str]) -> None:
    """Give attention of unclear layout the layout of attention in modules of the same class, or of the same size."""
    known: dict[Any, Layout] = {}
    for attention in reversed(attentions):  # so that the first of a class or size counts
        if attention.structure is not None and attention.structure.is_certain:
            for key in (type(attention.caller.module), attention.shape[0]):
                known[key, attention.backend, attention.rank] = attention.structure.layout
    for attention in attentions:
        structure = attention.structure
        if structure is None or structure.is_certain:
            continue
        kind = attention.backend, attention.rank
        layout = known.get((type(attention.caller.module), *kind)) or known.get((attention.shape[0], *kind))
        if layout is not None:
            attention.structure = replace(structure, layout=layout)
        elif attention.rank == 3:
            raise NoAttentionError(
                f"Samples and heads share a dimension at {names[attention.caller.module]}, and their order is not "
                "clear from one sample. Pass `example_inputs` with two samples."
            )


def _stack(attention: AttentionCall) -> Stack:
    assert attention.structure is not None
    if attention.structure.relation != "self":
        return "cross"
    inside_decoder = any(isinstance(call.module, nn.TransformerDecoderLayer) for call in attention.running)
    return "decoder" if attention.causal or inside_decoder else "encoder"


def _in_parts(attentions: Sequence[AttentionCall]) -> dict[AttentionCall, tuple[Parts, list[AttentionCall]]]:
    """Group the parts of attention that is computed in parts: the kind and the other parts, by the first part."""
    groups: dict[int, list[AttentionCall]] = defaultdict(list)
    for attention in attentions:
        groups[id(attention.caller)].append(attention)
    parts: dict[AttentionCall, tuple[Parts, list[AttentionCall]]] = {}
    for first, *later_parts in groups.values():
        kinds = {_kind(a, b) for a, b in itertools.combinations([first, *later_parts], 2)}
        if None in kinds or not kinds or kinds > {"values"}:
            continue
        parts[first] = next(kind for kind in kinds if kind) if len(kinds) == 1 else "blocks", later_parts
    return parts


def _kind(a: AttentionCall, b: AttentionCall) -> Parts | None:
    """Return how two attentions in one module call are parts of one attention; ``None`` if they are not."""
    one, other = a.structure, b.structure
    assert one is not None
    assert other is not None
    alike = (a.backend, one.layout, a.heads) == (b.backend, other.layout, b.heads)
    pairs = [*zip(a.queries_and_keys or (), b.queries_and_keys or (), strict=False)]
    equal = ((x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride()) for x, y in pairs)
    if alike and pairs and all(equal):
        return "values"
    if {one.relation, other.relation} != {"self"} or not one.streams & other.streams:
        return None
    sets = ((_distinct(x), _distinct(y)) for x, y in zip(one.origins, other.origins, strict=True))
    queries_differ, keys_differ = (bool(x and y) and not x & y for x, y in sets)
    if not queries_differ:
        return None
    return "rows" if alike and keys_differ else "blocks"


def _distinct(origin: Tensor) -> set[tuple[int, ...]]:
    """Return the distinct known origins among ``(2, ...)``."""
    ends = compact(origin).flatten(1)
    return set(map(tuple, ends[:, ends[1] != NOTHING].unique(dim=1).T.tolist()))
