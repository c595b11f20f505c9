"""Find the places where hidden states pass: around Transformer blocks, and before the classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from attnreg.errors import InputError
from attnreg.injection.discovery import Discovery, ModelSite
from attnreg.injection.discovery.blocks import ModuleCall, lists_around, may_hold_blocks
from attnreg.sites import HiddenInfo, Site, Where


class HiddenModelSite(NamedTuple):
    """A hidden-state site of a model."""

    info: HiddenInfo  # the site as providers see it
    call: ModuleCall  # the call of the block, or of the linear layer that takes the pooled state
    axes: str  # the dimensions of the states, ``"btc"``, ``"tbc"`` or ``"bc"``; empty if they are unknown

    @property
    def module(self) -> nn.Module:
        """The block or linear layer."""
        return self.call.module

    @property
    def around(self) -> list[nn.Module]:
        """Itself and the modules around it, outermost first, without modules that run more than once in a pass."""
        return [call.module for call in (*self.call.around, self.call) if not call.is_repeated]


class _Block(NamedTuple):
    """A block: its position, its call, the axes of its states, and whether it is chosen."""

    site: Site
    call: ModuleCall
    axes: str
    chosen: bool
    attention: ModelSite | None = None  # its self-attention


def hidden_sites(
    model: nn.Module, discovery: Discovery, chosen: Sequence[ModelSite], is_chosen: Callable[[Site], bool]
) -> list[HiddenModelSite]:
    """Return the hidden-state sites of a model, in the order in which they run.

    Blocks are the blocks around ``chosen`` attention, and the entries beside them in lists that number layers, such as
    Mamba layers, that return hidden states in their input shape. If no attention was seen (a kernel hides it), they are
    all list entries that return such states. ``is_chosen`` tells whether a block without attention is chosen.
    """
    blocks = _around_attention(discovery, chosen)
    if blocks:
        blocks += list(_beside(model, discovery, blocks, is_chosen))
    else:
        blocks = list(_without_attention(model, discovery, is_chosen))
    order = {id(call): number for number, call in enumerate(discovery.entries)}
    blocks.sort(key=lambda block: order.get(id(block.call), -1))
    sites = []
    firsts: dict[tuple[str, str], _Block] = {}
    for block in blocks:
        site, call = block.site, block.call
        first = firsts.setdefault((site.stack, _outermost_list(model, discovery, call)), block)
        wheres: tuple[Where, ...] = ("input", "output", "residual")
        if block is first or (block.attention and block.attention.begins_again(first.attention)):
            wheres = ("embeddings", *wheres)
        if block.chosen:
            sites += [HiddenModelSite(HiddenInfo(**vars(site), where=where), call, block.axes) for where in wheres]
    classifier = discovery.classifier
    if classifier is not None and classifier.rows == discovery.samples and not classifier.is_repeated:
        last = next((block.site for block in reversed(blocks) if block.chosen), Site())
        info = HiddenInfo(**{**vars(last), "name": discovery.names[classifier.module]}, where="pooled")
        sites.append(HiddenModelSite(info, classifier, "bc"))
    return sites


def _name(discovery: Discovery, call: ModuleCall) -> str:
    return discovery.names[call.module] + (f"#{call.index + 1}" if call.index else "")


def _around_attention(discovery: Discovery, chosen: Sequence[ModelSite]) -> list[_Block]:
    blocks: dict[int, _Block] = {}
    for site in discovery.sites:
        block, info = site.block, site.info
        if block is None or info.stack == "cross":
            continue
        if id(block) not in blocks:
            name = _name(discovery, block)
            around = Site(name=name, layer=info.layer, num_layers=info.num_layers, stack=info.stack)
            axes = _axes(site, block.shape, discovery.samples)
            blocks[id(block)] = _Block(around, block, axes, site in chosen, site)
    return list(blocks.values())


def _beside(
    model: nn.Module, discovery: Discovery, blocks: Sequence[_Block], is_chosen: Callable[[Site], bool]
) -> Iterator[_Block]:
    """Yield the entries without attention of lists that number the layers of the blocks in them."""
    first_blocks = {discovery.names[block.call.module].rpartition(".")[0]: block for block in reversed(blocks)}
    for call in discovery.entries:
        path, _, key = discovery.names[call.module].rpartition(".")
        if path not in first_blocks or call.attention_count or not call.is_block:
            continue
        # A Sequential of a positional encoding, blocks and a norm numbers no layers: the first block is layer 0.
        if not may_hold_blocks(model.get_submodule(path)):
            continue
        first, first_call, axes = first_blocks[path][:3]
        first_key = discovery.names[first_call.module].rpartition(".")[2]
        if key.isdigit() and first_key.isdigit():
            layer = first.layer + int(key) - int(first_key)
            if not 0 <= layer < first.num_layers:  # a list around this one numbers the layers
                continue
            site = Site(name=_name(discovery, call), layer=layer, num_layers=first.num_layers, stack=first.stack)
            yield _Block(site, call, axes, is_chosen(site))


def _without_attention(model: nn.Module, discovery: Discovery, is_chosen: Callable[[Site], bool]) -> Iterator[_Block]:
    """Yield the entries of outermost lists, if two or more in a list return hidden states in their input shape."""
    paths: dict[ModuleCall, str] = {}
    for call in discovery.entries:
        path = discovery.names[call.module].rpartition(".")[0]
        if call.is_block and len(call.shape) == 3 and path == _outermost_list(model, discovery, call):
            paths[call] = path
    calls = [call for call, path in paths.items() if list(paths.values()).count(path) > 1]
    for layer, call in enumerate(calls):
        site = Site(name=_name(discovery, call), layer=layer, num_layers=len(calls))
        axes = "btc" if call.shape[0] == discovery.samples != call.shape[1] else ""
        yield _Block(site, call, axes, is_chosen(site))


def _outermost_list(model: nn.Module, discovery: Discovery, call: ModuleCall) -> str:
    """Return the name of the outermost list around a module; ``""`` without one."""
    return next((path for path, _, _ in lists_around(model, discovery.names[call.module])), "")


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
