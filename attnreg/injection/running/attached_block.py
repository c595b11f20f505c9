"""Attached Transformer blocks and classifiers, for providers that skip blocks or change hidden states."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attnreg.draws import Draws
from attnreg.errors import InputError
from attnreg.injection.discovery import Discovery, ModelSite
from attnreg.injection.discovery.blocks import input_names
from attnreg.injection.discovery.hidden import HiddenModelSite
from attnreg.injection.running.attached_module import AttachedModule
from attnreg.injection.running.padding import BLOCK_MASKS, Padding, masks_of
from attnreg.injection.running.passes import Passes
from attnreg.injection.running.rates import Count, number_of
from attnreg.injection.running.repetition import checkpoint_around
from attnreg.injection.running.replaced_forward import ReplacedForward
from attnreg.sites import HiddenInfo, HiddenSite, Site, SiteInfo, Where

ADDS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
NORMS = {F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm}


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, or of a classifier, in a forward pass."""

    input_name: str  # name of the first argument
    only_states: bool  # whether it returns only hidden states
    info: SiteInfo | None  # of its self-attention, by which the provider decides; None if it cannot be skipped
    chosen: tuple[Site, ...]  # all chosen attention in the block, and its hidden states
    modules: tuple[AttachedModule, ...]  # one for every call in the block
    states: Mapping[Where, tuple[HiddenInfo, str]]  # its hidden states, and letters for their dimensions
    foreign: frozenset[str]  # names of the model's masks that had another number of tokens in the dry run


class AttachedBlock(ReplacedForward[BlockCall]):
    """Runs a block on hidden states as the provider changes them, and changes its output, unless it is skipped.

    If the provider skips the block, it returns its input hidden states.
    """

    def __init__(self, passes: Passes, module: nn.Module, records: Sequence[BlockCall | None], name: str) -> None:
        super().__init__(passes, module, records, name)
        self._names = input_names(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward, unless the block is skipped."""
        call = self.next()
        acts = call is not None and self.passes.acts_at(self.name, self.module)
        if call is None or not (acts or self.passes.taps):
            return self.plain(*args, **kwargs)
        if call.states:
            self.passes.check_entry(self.name)
        args, kwargs = self._changed_arguments(call, "embeddings", args, kwargs)
        skip = None
        if acts and call.info is not None:
            with self.passes.asking():
                skip = self.passes.provider.skip_at(call.info, self.passes.draws_at(call.info, "block"))
        compiling = torch.compiler.is_compiling()
        if skip is None or not (compiling or bool(skip)):
            return self._run(call, args, kwargs)
        hidden = _input_states(call, args, kwargs)
        # A cache must have the keys of all layers, which later passes continue.
        caches = not torch.is_grad_enabled() and any(hasattr(x, "get_seq_length") for x in (*args, *kwargs.values()))
        if call.only_states and not (compiling or caches or self.passes.latest.lists_attention):
            for module in call.modules:
                module.calls.done += 1
            output: Any = hidden
        else:
            # Compiled code would fix the decision. And other outputs of a block must be computed, which are returned
            # or stored in an argument for later blocks (T5's position bias, Gemma 3n's shared keys).
            output = self._run(call, args, kwargs)
        decision = skip.to(hidden.device) if compiling else None  # else it is read: nothing is copied to a GPU
        for info in call.chosen:
            self.passes.rates.note_skipped(info, decision)
        if decision is not None:
            return _with_states(output, lambda computed: torch.where(decision, hidden, computed))
        used = (*self.module.parameters(), *tree_leaves((args, kwargs)))
        return _with_states(output, lambda _: _with_zero_gradients(hidden, used))

    def _run(self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for where in ("input", "pooled"):
            args, kwargs = self._changed_arguments(call, where, args, kwargs)
        if "residual" in call.states:
            draws = self.passes.draws_at(call.states["residual"][0], "residual")  # one source for all additions
            change = functools.partial(self._changed, call, "residual", args=args, kwargs=kwargs, draws=draws)
            states = _input_states(call, args, kwargs)
            output = _ResidualConnections(self.name, states, change).run(self.plain, args, kwargs)
        else:
            output = self.plain(*args, **kwargs)
        if "output" not in call.states:
            return output
        return _with_states(output, lambda states: self._changed(call, "output", states, args, kwargs))

    def _changed_arguments(
        self, call: BlockCall, where: Where, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with changed hidden states."""
        if where not in call.states:
            return args, kwargs
        states = self._changed(call, where, _input_states(call, args, kwargs), args, kwargs)
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, call.input_name: states})

    def _changed(
        self,
        call: BlockCall,
        where: Where,
        states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draws: Draws | None = None,
    ) -> Tensor:
        """Return hidden states as the provider changes them, and record the share of values that it sets to zero."""
        passes, (info, axes) = self.passes, call.states[where]
        plain = states.transpose(0, 1) if axes == "tbc" else states
        if passes.taps:  # the model runs plainly
            changed = passes.taps[info.label](plain) if info.label in passes.taps else plain
            return changed.transpose(0, 1) if axes == "tbc" else changed
        shape, valid, unknown = tuple(plain.shape), None, False
        if axes != "bc":
            inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
            masks = {name: inputs.get(name) for name in BLOCK_MASKS}
            valid, unknown = (passes.latest.padding or Padding()).tokens(info.stack, shape, masks, call.foreign)
            valid = None if valid is None else valid.to(states.device)
        site = HiddenSite(
            **vars(info),
            shape=shape,
            valid=valid,
            padding_unknown=unknown,
            draws=draws or passes.draws_at(info, info.where),
            device=states.device,
            dtype=states.dtype,
            counter=functools.partial(passes.rates.counters, 2, 2 * len(passes.modules), states.device),
        )
        if passes.own_draws is None and passes.replayed_seed is None:
            changed = passes.provider.states_at(site, plain)
        else:
            with passes.asking():
                changed = passes.provider.states_at(site, plain)
        passes.rates.note_count(info, _count(site, plain, changed))
        return changed.transpose(0, 1) if axes == "tbc" else changed


def _count(site: HiddenSite, before: Tensor, after: Tensor) -> Count:
    """Count the values that were set to zero, without the values that the model's dropout had set to zero before."""
    if site._counts and not site._zeroed:
        return Count(site._counts[0][1], functools.reduce(operator.add, (counts[0] for counts in site._counts)))
    with torch.no_grad():
        present = before != 0
        dropped = present & functools.reduce(operator.or_, site._zeroed, after == 0)
        valid = None if site.valid is None else site.valid[..., None]
        if valid is not None:
            present, dropped = present & valid, dropped & valid
        return Count(number_of(present), number_of(dropped))


def attached_blocks(
    passes: Passes,
    discovery: Discovery,
    chosen: Sequence[ModelSite],
    states: Sequence[HiddenModelSite],
    modules: Mapping[nn.Module, AttachedModule],
) -> list[AttachedBlock]:
    """Return the attached blocks of these hidden states and, if the provider skips blocks, of chosen self-attention."""
    skips = chosen if passes.provider.may_skip_blocks else ()
    sites_in: dict[tuple[nn.Module, int], list[ModelSite]] = defaultdict(list)
    for site in discovery.sites:
        if site.block is not None:
            sites_in[site.block.module, site.block.index].append(site)
    states_at: dict[tuple[nn.Module, int], dict[Where, HiddenModelSite]] = defaultdict(dict)
    for hidden in states:
        states_at[hidden.module, hidden.call.index][hidden.info.where] = hidden
    calls: dict[nn.Module, list[BlockCall | None]] = {module: [] for module, _ in (*sites_in, *states_at)}
    last: dict[nn.Module, int] = defaultdict(int)
    for module, index in (*sites_in, *((call.module, call.index) for call in discovery.entries)):
        last[module] = max(index, last[module])
    for module, records in calls.items():
        for call in ((module, index) for index in range(last[module] + 1)):
            records.append(_call(sites_in.get(call, ()), states_at.get(call, {}), skips, modules))
    return [AttachedBlock(passes, block, calls[block], discovery.names[block]) for block in calls if any(calls[block])]


def _call(
    sites: Sequence[ModelSite],
    states: Mapping[Where, HiddenModelSite],
    chosen: Sequence[ModelSite],
    modules: Mapping[nn.Module, AttachedModule],
) -> BlockCall | None:
    chosen_here = [site for site in sites if site in chosen]
    self_attention = next((site for site in chosen_here if site.info.stack != "cross"), None)
    block = next((hidden.call for hidden in states.values()), None) if self_attention is None else self_attention.block
    if block is None:
        return None
    infos = {where: (hidden.info, hidden.axes) for where, hidden in states.items()}
    changed = (info for where, (info, _) in infos.items() if where != "embeddings")
    called = {(part.caller.module, part.caller.index) for site in sites for part in (site.attention, *site.others)}
    attached = tuple(modules[module] for module, _ in called if module in modules)
    info = None if self_attention is None else self_attention.info
    acted_on = (*(site.info for site in chosen_here), *changed)
    foreign = frozenset[str]().union(*map(_foreign, states.values()))
    return BlockCall(block.input_name, block.only_states, info, acted_on, attached, infos, foreign)


def _foreign(states: HiddenModelSite) -> frozenset[str]:
    call, axes = states.call, states.axes
    masks = masks_of(call.around[0]) if call.around and "t" in axes else {}
    return frozenset(name for name, mask in masks.items() if mask.shape[-1] != call.shape[axes.index("t")])


def _input_states(call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs[call.input_name]


def _with_states(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(output) if isinstance(output, Tensor) else type(output)((change(output[0]), *output[1:]))


def _with_zero_gradients(hidden: Tensor, used: Iterable[Any]) -> Tensor:
    """Return the hidden states, with zero gradients for all tensors that the block would have used.

    DistributedDataParallel waits for every parameter, also for one outside the block that only the block uses.
    """
    tensors = [each for each in used if isinstance(each, Tensor) and each.requires_grad and each is not hidden]
    if not (tensors and torch.is_grad_enabled()):
        return hidden
    return hidden + torch.cat([each.flatten()[:0].to(hidden) for each in tensors]).sum()


class _ResidualConnections(TorchFunctionMode):
    """Changes the updates that a block adds to its hidden states, which must lead from one addition to the next.

    There may be a normalization after an addition, as in BERT.
    """

    def __init__(self, name: str, states: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._name, self._change = name, change
        self._states = [states]  # the present hidden states, also normalized
        self._checkpoint = checkpoint_around()
        self._is_nested = False  # whether an addition ran in a checkpoint within the block
        self._count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ADDS and len(args) == 2 and not kwargs:
            index = next((index for index in (0, 1) if self._is_state(args[index])), None)
            if index is not None and isinstance(args[1 - index], Tensor) and args[1 - index].shape == args[index].shape:
                self._is_nested |= checkpoint_around() is not self._checkpoint
                update = self._change(args[1 - index])
                self._states = [func(update, args[1]) if index else func(args[0], update)]
                self._count += 1
                return self._states[0]
        result = func(*args, **kwargs)
        if func in NORMS and self._is_state(args[0]):
            self._states.append(result)
        return result

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block's forward; raise unless residual connections lead from its input to its output."""
        with self:
            output = forward(*args, **kwargs)
        states = output if isinstance(output, Tensor) else output[0]
        if self._is_nested or not (self._count and self._is_state(states)):
            why = "run in a checkpoint inside of it" if self._is_nested else "do not lead from its input to its output"
            raise InputError(
                f"The residual connections of {self._name} {why}: use `where='output'`, or leave its layer out."
            )
        return output

    def _is_state(self, value: Any) -> bool:
        return any(value is state for state in self._states)
