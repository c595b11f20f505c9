"""Find the places where hidden states pass: around Transformer blocks, and before the classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from attnreg.errors import InputError
from attnreg.injection.discovery import Discovery, ModelSite
from attnreg.injection.discovery.blocks import ModuleCall, lists_around
from attnreg.sites import HiddenInfo, Site, Where


class HiddenModelSite(NamedTuple):
    """A hidden-state site of a model."""

    info: HiddenInfo  # the site as providers see it
    call: ModuleCall  # of the block, or of the linear layer that takes the pooled state
    axes: str  # the dimensions of the states, ``"btc"``, ``"tbc"`` or ``"bc"``; empty if they are unknown

    @property
    def module(self) -> nn.Module:
        """The block or linear layer."""
        return self.call.module

    @property
    def around(self) -> list[nn.Module]:
        """The modules around it that run once in a pass, outermost first, and itself."""
        return [each.module for each in (*self.call.around, self.call) if not each.is_repeated]


class _Place(NamedTuple):
    """A block: its position, its call, the axes of its states, and whether it is chosen."""

    site: Site
    call: ModuleCall
    axes: str
    chosen: bool
    attention: ModelSite | None = None  # its self-attention


def hidden_sites(
    model: nn.Module, found: Discovery, chosen: Sequence[ModelSite], is_chosen: Callable[[Site], bool]
) -> list[HiddenModelSite]:
    """Return the hidden-state sites of a model, in the order in which they run.

    Blocks are those around ``chosen`` attention, and the entries beside them, such as Mamba layers, that return hidden
    states in their input shape. If no attention is found (a kernel hides it), they are the entries of the model's lists
    that do. ``is_chosen`` tells of a block without attention.
    """
    places = _around_attention(found, chosen)
    places += list(_beside(found, places, is_chosen) if places else _without_attention(model, found, is_chosen))
    order = {id(call): number for number, call in enumerate(found.entries)}
    places.sort(key=lambda place: order.get(id(place.call), -1))
    sites = []
    first: dict[tuple[str, str], _Place] = {}
    for place in places:
        site, call = place.site, place.call
        begun = first.setdefault((site.stack, _outermost_list(model, found, call)), place)
        wheres: tuple[Where, ...] = ("input", "output", "residual")
        if place is begun or (place.attention and place.attention.begins_again(begun.attention)):
            wheres = ("embeddings", *wheres)
        if place.chosen:
            sites += [HiddenModelSite(HiddenInfo(**vars(site), where=where), call, place.axes) for where in wheres]
    classifier = found.classifier
    if classifier is not None and classifier.rows == found.samples and not classifier.is_repeated:
        last = next((place.site for place in reversed(places) if place.chosen), Site())
        info = HiddenInfo(**{**vars(last), "name": found.names[classifier.module]}, where="pooled")
        sites.append(HiddenModelSite(info, classifier, "bc"))
    return sites


def _named(found: Discovery, call: ModuleCall) -> str:
    return found.names[call.module] + (f"#{call.index + 1}" if call.index else "")


def _around_attention(found: Discovery, chosen: Sequence[ModelSite]) -> list[_Place]:
    places: dict[int, _Place] = {}
    for site in found.sites:
        block, info = site.block, site.info
        if block is None or info.stack == "cross":
            continue
        if id(block) not in places:
            name = _named(found, block)
            place = Site(name=name, layer=info.layer, num_layers=info.num_layers, stack=info.stack)
            axes = _axes(site, block.shape, found.samples)
            places[id(block)] = _Place(place, block, axes, site in chosen, site)
    return list(places.values())


def _beside(found: Discovery, places: Sequence[_Place], is_chosen: Callable[[Site], bool]) -> Iterator[_Place]:
    """Yield the entries without attention of lists that hold blocks."""
    lists = {found.names[place.call.module].rpartition(".")[0]: place for place in reversed(places)}
    for call in found.entries:
        held, _, key = found.names[call.module].rpartition(".")
        if held not in lists or call.attention_count or not call.is_block:
            continue
        other, beside, axes = lists[held][:3]
        its_key = found.names[beside.module].rpartition(".")[2]
        if key.isdigit() and its_key.isdigit():
            layer = other.layer + int(key) - int(its_key)
            site = Site(name=_named(found, call), layer=layer, num_layers=other.num_layers, stack=other.stack)
            yield _Place(site, call, axes, is_chosen(site))


def _without_attention(model: nn.Module, found: Discovery, is_chosen: Callable[[Site], bool]) -> Iterator[_Place]:
    """Yield the entries of outermost lists, of two or more, that return hidden states in their input shape."""
    lists: dict[int, str] = {}
    for number, call in enumerate(found.entries):
        held = found.names[call.module].rpartition(".")[0]
        if call.is_block and len(call.shape) == 3 and held == _outermost_list(model, found, call):
            lists[number] = held
    calls = [found.entries[number] for number, held in lists.items() if list(lists.values()).count(held) > 1]
    for layer, call in enumerate(calls):
        site = Site(name=_named(found, call), layer=layer, num_layers=len(calls))
        axes = "btc" if call.shape[0] == found.samples != call.shape[1] else ""
        yield _Place(site, call, axes, is_chosen(site))


def _outermost_list(model: nn.Module, found: Discovery, call: ModuleCall) -> str:
    """Return the name of the outermost list around a module; ``""`` without one."""
    return next((path for path, _, _ in lists_around(model, found.names[call.module])), "")


def _axes(site: ModelSite, shape: tuple[int, ...], samples: int) -> str:
    """Return the dimensions of a block's states, which follow from the numbers of samples and queries."""
    if len(shape) != 3:
        return ""
    batch, _, queries, _ = site.layout.sizes(site.attention.shape)
    if batch == queries and site.layout.has_queries:
        raise InputError(
            f"Samples and tokens of the hidden states around {site.info.name} cannot be distinguished, because there "
            f"are {batch} of both: pass `example_inputs` with different numbers."
        )
    if shape[:2] == (queries, batch):
        return "tbc"
    return "btc" if shape[:2] == (batch, queries) or shape[0] == samples != shape[1] else ""
