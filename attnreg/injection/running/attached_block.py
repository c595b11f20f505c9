"""Attached Transformer blocks and classifiers, for providers that skip blocks or change hidden states."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attnreg.draws import Draws
from attnreg.injection.discovery import Discovery, FoundSite
from attnreg.injection.discovery.blocks import Block
from attnreg.injection.discovery.hidden import FoundHidden
from attnreg.injection.running.attached_attention import AttachedModule
from attnreg.injection.running.forward_pass import OF_BLOCKS, Padding
from attnreg.injection.running.passes import Passes
from attnreg.injection.running.rates import share
from attnreg.injection.running.residual import ResidualConnections
from attnreg.injection.running.shadow import Shadow, input_names
from attnreg.sites import HiddenInfo, HiddenSite, Site, SiteInfo, Where


@dataclass(frozen=True)
class BlockCall:
    """One call of a block in a forward pass."""

    block: Block
    info: SiteInfo | None  # of its self-attention, which the provider is asked about; None if it cannot be skipped
    chosen: tuple[Site, ...]  # all chosen attention in the block, and its hidden states
    modules: tuple[AttachedModule, ...]
    states: Mapping[Where, FoundHidden] = field(default_factory=dict)


class AttachedBlock(Shadow[BlockCall]):
    """Runs a block on hidden states as the provider changes them, and changes its output, unless it is skipped.

    If the provider skips the block, it returns its input hidden states.
    """

    def __init__(self, passes: Passes, module: nn.Module, whats: Sequence[BlockCall | None], name: str) -> None:
        super().__init__(passes, module, whats, name)
        names = input_names(module)
        self._masks_at = {name: names.index(name) if name in names else len(names) for name in OF_BLOCKS}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward, unless the block is skipped."""
        call = self.next()
        acts = call is not None and self.acts()
        if call is None or not (acts or self.passes.taps):
            return self.plain(*args, **kwargs)
        if call.states:
            self.passes.check_entry(self.name)
        args, kwargs = self._entered(call, "embeddings", args, kwargs)
        skip = None
        if acts and call.info is not None:
            with self.passes.asking():
                skip = self.passes.provider.skip_at(call.info, self.passes.draws_at(call.info, "block"))
        compiling = torch.compiler.is_compiling()
        if skip is None or not (compiling or bool(skip)):
            return self._run(call, args, kwargs)
        hidden: Tensor = args[0] if args else kwargs[call.block.first]
        if call.block.alone and not compiling:
            for module in call.modules:
                module.calls.done += 1
            output = hidden
        else:
            # Compiled code would fix the decision. And a block's other outputs, returned or stored in an argument for
            # later blocks (T5's position bias, Gemma 3n's shared keys), must be computed.
            output = self._run(call, args, kwargs)
        for info in call.chosen:
            self.passes.rates.note_skipped(info, skip.to(hidden.device))
        if compiling:
            return _replaced(output, lambda computed: torch.where(skip.to(hidden.device), hidden, computed))
        return _replaced(output, lambda _: _touching(hidden, (*self.module.parameters(), *tree_leaves((args, kwargs)))))

    def _run(self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._entered(call, "input", args, kwargs)
        if "residual" in call.states:
            hidden = args[0] if args else kwargs[call.block.first]
            draws = self.passes.draws_at(call.states["residual"].info, "residual")  # one source for all of them
            change = functools.partial(self._changed, call, "residual", args=args, kwargs=kwargs, draws=draws)
            output = ResidualConnections(self.name, hidden, change).run(self.plain, *args, **kwargs)
        else:
            output = self.plain(*args, **kwargs)
        if "output" not in call.states:
            return output
        return _replaced(output, lambda states: self._changed(call, "output", states, args, kwargs))

    def _entered(
        self, call: BlockCall, where: Where, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with changed hidden states."""
        if where not in call.states:
            return args, kwargs
        if args:
            return (self._changed(call, where, args[0], args, kwargs), *args[1:]), kwargs
        states = self._changed(call, where, kwargs[call.block.first], args, kwargs)
        return args, {**kwargs, call.block.first: states}

    def _changed(
        self,
        call: BlockCall,
        where: Where,
        states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draws: Draws | None = None,
    ) -> Tensor:
        masks = {name: args[at] if at < len(args) else kwargs.get(name) for name, at in self._masks_at.items()}
        return changed_states(self.passes, call.states[where].info, states, call.states[where].axes, masks, draws)


def attached_blocks(
    passes: Passes,
    found: Discovery,
    chosen: Set[str],
    states: Sequence[FoundHidden],
    modules: Mapping[nn.Module, AttachedModule],
) -> list[AttachedBlock]:
    """Return the attached blocks of these hidden states and, if the provider skips blocks, of chosen self-attention."""
    skips = passes.provider.may_skip_blocks
    inside: dict[tuple[nn.Module, int], list[FoundSite]] = defaultdict(list)
    for site in found.sites:
        if site.block is not None:
            inside[site.block.module, site.block.call].append(site)
    around: dict[tuple[nn.Module, int], dict[Where, FoundHidden]] = defaultdict(dict)
    for each in states:
        if each.block is not None:
            around[each.module, each.index][each.info.where] = each
    last: dict[nn.Module, int] = {}
    for module, index in (*inside, *((call.module, call.index) for call in found.entries)):
        last[module] = max(index, last.get(module, 0))
    calls: dict[nn.Module, list[BlockCall | None]] = {}
    for module in dict.fromkeys(module for module, _ in (*inside, *around)):
        each_call = range(last.get(module, 0) + 1)
        calls[module] = [
            _call(inside.get((module, i), ()), around.get((module, i), {}), chosen if skips else frozenset(), modules)
            for i in each_call
        ]
    return [AttachedBlock(passes, module, each, found.names[module]) for module, each in calls.items() if any(each)]


def _call(
    sites: Sequence[FoundSite],
    states: Mapping[Where, FoundHidden],
    chosen: Set[str],
    modules: Mapping[nn.Module, AttachedModule],
) -> BlockCall | None:
    own = next((site for site in sites if site.info.stack != "cross" and site.info.name in chosen), None)
    blocks = [each.block for each in (*(() if own is None else (own,)), *states.values()) if each.block is not None]
    if not blocks:
        return None
    return BlockCall(
        blocks[0],
        None if own is None else own.info,
        (
            *(site.info for site in sites if site.info.name in chosen),
            *(each.info for where, each in states.items() if where != "embeddings"),
        ),
        tuple(modules[site.module] for site in sites if site.module in modules),
        states,
    )


def _replaced(output: Any, by: Callable[[Tensor], Tensor]) -> Any:
    return by(output) if isinstance(output, Tensor) else type(output)((by(output[0]), *output[1:]))


def _touching(hidden: Tensor, used: Iterable[Any]) -> Tensor:
    """Return the same values, with zero gradients for all tensors that the block would have used.

    DistributedDataParallel waits for every parameter, also for one outside the block that only the block uses.
    """
    if not torch.is_grad_enabled():
        return hidden
    for tensor in used:
        if isinstance(tensor, Tensor) and tensor.requires_grad and tensor is not hidden:
            hidden = hidden + tensor.flatten()[:0].sum().to(hidden)
    return hidden


class AttachedClassifier(Shadow[HiddenInfo]):
    """Runs a linear layer on the pooled state as the provider changes it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, on changed states if the provider acts."""
        info = self.next()
        if info is None or not (self.acts() or self.passes.taps):
            return self.plain(*args, **kwargs)
        self.passes.check_entry(self.name)
        if args:
            return self.plain(changed_states(self.passes, info, args[0], "bc"), *args[1:], **kwargs)
        return self.plain(**{**kwargs, "input": changed_states(self.passes, info, kwargs["input"], "bc")})


def changed_states(
    passes: Passes,
    info: HiddenInfo,
    states: Tensor,
    axes: str,
    masks: Mapping[str, Any] | None = None,
    draws: Draws | None = None,
) -> Tensor:
    """Return hidden states as the provider changes them, and record the share of values that it sets to zero.

    ``axes`` are their dimensions, ``"btc"``, ``"tbc"`` or ``"bc"``; ``masks`` the masks that the block is given.
    """
    before = states.transpose(0, 1) if axes == "tbc" else states
    if passes.taps:  # the model runs plainly
        after = passes.taps[info.label](before) if info.label in passes.taps else before
        return after.transpose(0, 1) if axes == "tbc" else after
    shape = tuple(before.shape)
    padding = passes.latest.padding or Padding()
    valid, unknown = (None, False) if axes == "bc" else padding.tokens(info.stack, shape, masks)
    valid = None if valid is None else valid.to(states.device)
    site = HiddenSite(
        **vars(info),
        shape=shape,
        valid=valid,
        padding_unknown=unknown,
        draws=draws or passes.draws_at(info, info.where),
        device=states.device,
        dtype=states.dtype,
    )
    with passes.asking(states.device):
        after = passes.provider.states_at(site, before)
    with torch.no_grad():  # values that the model's own dropout has set to zero do not count
        present = before != 0
        dropped = present & (after == 0)
        passes.rates.note_states(info, share(dropped.sum(-1), present.sum(-1), valid))
    return after.transpose(0, 1) if axes == "tbc" else after
