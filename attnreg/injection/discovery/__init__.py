"""Finding where a model computes attention, by running it once and watching what happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from attnreg.injection.discovery.blocks import Block, block_of
from attnreg.injection.discovery.coverage import NOT_CHOSEN, LeftOut, left_out
from attnreg.injection.discovery.example_inputs import example_inputs as make_example_inputs
from attnreg.injection.discovery.finder import Finder, Sighting
from attnreg.injection.discovery.numbering import number_layers
from attnreg.injection.discovery.parts import Parts, in_parts
from attnreg.injection.discovery.snapshot import unchanged
from attnreg.injection.errors import NoAttentionError, why_hidden
from attnreg.injection.layout import Layout
from attnreg.masks import SiteInfo, Stack

__all__ = ["Discovery", "FoundSite", "LeftOut", "discover"]


@dataclass(frozen=True, eq=False)
class FoundSite:
    """An attention site of a model.

    Args:
        info: what providers are told of it.
        sighting: where it was seen.
        layout: of its scores.
        block: the Transformer block that holds it, if it is a self-attention in one.
        parts: what its parts differ in, where it is computed in several.
        others: the sightings of its other parts.
    """

    info: SiteInfo
    sighting: Sighting
    layout: Layout
    block: Block | None = None
    parts: Parts | None = None
    others: tuple[Sighting, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The module whose own forward computes it."""
        return self.sighting.place.module


@dataclass(frozen=True, eq=False)
class Discovery:
    """What a dry run of a model has shown.

    Args:
        sites: all attention that can be masked, in the order in which it runs.
        left_out: what else is attention, is named so, or looks like it.
        sightings: all that looked like attention, in the order in which it ran.
        names: of the model's modules.
    """

    sites: tuple[FoundSite, ...]
    left_out: tuple[LeftOut, ...]
    sightings: tuple[Sighting, ...]
    names: Mapping[nn.Module, str]

    def left_out_besides(self, chosen: Set[str]) -> tuple[LeftOut, ...]:
        """What is left out if the sites of these names are chosen."""
        rest = [site.info for site in self.sites if site.info.name not in chosen]
        return (*self.left_out, *(LeftOut(info.name, info.label, NOT_CHOSEN) for info in rest))


def discover(model: nn.Module, example_inputs: Mapping[str, Any] | Sequence[Any] | None = None) -> Discovery:
    """Find the attention sites of a model.

    The model runs once, in eval mode, without gradients and hooks, on a tiny input. Attention is what multiplies values
    with weights that came out of a softmax (or a fused kernel) of products of queries and keys; whether it is
    self-attention is decided by where its queries and keys come from. The model is afterwards as it was.

    Args:
        model: any model.
        example_inputs: keyword arguments (or a tuple of positional ones) for one forward pass, with at least two
            samples; made up for most transformers models and for torch's own Transformer modules.

    Returns:
        the sites, and what is left out; a module that several layers share (as in ALBERT) is a site per call.

    Raises:
        NoAttentionError: if the model cannot be run, or no attention is seen.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
        >>> found = discover(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        >>> [site.info.name for site in found.sites]
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    finder = _dry_run(model, example_inputs)
    _refuse_shuffled(finder.sightings)
    left = left_out(finder, model)
    sightings = [sighting for sighting in finder.sightings if sighting.is_attention]
    _settle(sightings, finder.names)
    sites = _sites(model, finder.names, sightings)
    if not sites:
        seen = "; ".join(str(each) for each in left[:3])
        raise NoAttentionError(
            f"No attention that can be masked was found in {type(model).__name__}: "
            + (f"{seen}." if seen else why_hidden(model))
        )
    return Discovery(sites, left, tuple(finder.sightings), finder.names)


def _sites(model: nn.Module, names: Mapping[nn.Module, str], sightings: Sequence[Sighting]) -> tuple[FoundSite, ...]:
    parts = in_parts(sightings)
    later = {sighting for _, others in parts.values() for sighting in others}
    sightings = [sighting for sighting in sightings if sighting not in later]
    paths = [names.get(sighting.place.module, type(sighting.place.module).__name__) for sighting in sightings]
    stacks = [_stack(sighting) for sighting in sightings]
    layers: list[int] = [0] * len(sightings)
    depth: dict[Stack, int] = {}
    for stack in dict.fromkeys(stacks):
        places = [i for i, each in enumerate(stacks) if each == stack]
        numbers, depth[stack] = number_layers(model, [paths[i] for i in places])
        for i, number in zip(places, numbers, strict=True):
            layers[i] = number
    seen: Counter[tuple[nn.Module, int]] = Counter()
    sites = []
    for sighting, stack, path, layer in zip(sightings, stacks, paths, layers, strict=True):
        place, reading = sighting.place, sighting.reading
        assert reading is not None
        seen[place.module, place.index] += 1
        again = seen[place.module, place.index]
        info = SiteInfo(
            name=path + (f"#{place.index + 1}" if place.index else "") + (f"@{again}" if again > 1 else ""),
            layer=layer,
            num_layers=depth[stack],
            stack=stack,
            heads=sighting.heads,
            head_size=sighting.head_size,
            shares_keys=reading.layout.has_queries,
            in_parts=sighting in parts,
        )
        block = block_of(model, path, sighting.running)
        kind, others = parts.get(sighting, (None, []))
        sites.append(FoundSite(info, sighting, reading.layout, block, kind, tuple(others)))
    return tuple(sites)


def _settle(sightings: Sequence[Sighting], names: Mapping[nn.Module, str]) -> None:
    """Give attention whose layout could not be told that of others, in modules of its class or as large as it.

    Raises:
        NoAttentionError: if there are none, and samples cannot be told from heads.
    """
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
                f"Samples and heads share a dimension at {names.get(sighting.place.module)}, and one sample does not "
                "show their order: pass `example_inputs` with two samples."
            )


def _refuse_shuffled(sightings: Sequence[Sighting]) -> None:
    """What a class of modules does to its queries once it may always do."""
    classes = {type(each.place.module) for each in sightings if each.reading and not each.reading.in_order}
    for sighting in sightings:
        if sighting.reading is not None and type(sighting.place.module) in classes:
            sighting.reading = replace(sighting.reading, in_order=False)


def _stack(sighting: Sighting) -> Stack:
    assert sighting.reading is not None
    if sighting.reading.relation != "self":
        return "cross"
    inside_decoder = any(isinstance(call.module, nn.TransformerDecoderLayer) for call in sighting.running)
    return "decoder" if sighting.causal or inside_decoder else "encoder"


def _dry_run(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any] | None) -> Finder:
    attempts: list[tuple[nn.Module, Any]] = [(model, inputs)]
    if inputs is None:
        # A head may want more than its backbone: an end-of-sentence token, several choices.
        base = getattr(model, "base_model", model)
        attempts = [(each, made) for each in dict.fromkeys((model, base)) for made in make_example_inputs(each)]
        if not attempts:
            raise NoAttentionError(
                f"What {type(model).__name__} takes is not known: pass the arguments of one forward pass with two "
                "samples, `attach(..., example_inputs={...})`."
            )
    problems: list[Exception] = []
    for runnable, given in attempts:
        args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
        try:
            with unchanged(model) as tensors:
                finder = Finder(model, tensors, (args, kwargs))
                with finder.watching():
                    runnable(*args, **kwargs)
        except Exception as error:
            problems.append(error)
        else:
            return finder
    problem = problems[0]
    raise NoAttentionError(
        f"{type(model).__name__} does not run on example inputs ({type(problem).__name__}: "
        f"{' '.join(str(problem).split())}): pass inputs that fit, `attach(..., example_inputs={{...}})`."
    ) from problem
