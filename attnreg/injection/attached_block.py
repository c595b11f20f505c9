"""Attached Transformer blocks, for providers that skip blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attnreg.injection.connection import Connection
from attnreg.injection.discovery import FoundSite
from attnreg.injection.discovery.blocks import Block
from attnreg.injection.module import AttachedModule
from attnreg.injection.shadow import Shadow
from attnreg.masks import SiteInfo
from attnreg.provider.protocols import skipped


@dataclass(frozen=True)
class BlockCall:
    """One call of a block in a forward pass."""

    block: Block
    info: SiteInfo  # of its self-attention, which the provider is asked about
    chosen: tuple[SiteInfo, ...]  # all chosen attention in the block
    modules: tuple[AttachedModule, ...]


class AttachedBlock(Shadow[BlockCall]):
    """Returns its input hidden states unchanged if the provider skips the block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward, unless the block is skipped."""
        call = self.next()
        if call is None or not self.handle.acts_on(self.module):
            return self.plain(*args, **kwargs)
        skip = skipped(self.handle.provider, call.info, self.handle.draws_at(call.info, "block"))
        compiling = torch.compiler.is_compiling()
        if skip is None or not (compiling or bool(skip)):
            return self.plain(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs[call.block.first]
        if call.block.alone and not compiling:
            for module in call.modules:
                module.pass_over()
            output = hidden
        else:
            # Compiled code would fix the decision. And a block's other outputs, returned or stored in an argument for
            # later blocks (T5's position bias, Gemma 3n's shared keys), must be computed.
            output = self.plain(*args, **kwargs)
        for info in call.chosen:
            self.handle.rates.note_skipped(info, skip.to(hidden.device))
        if compiling:
            return _replaced(output, lambda computed: torch.where(skip.to(hidden.device), hidden, computed))
        if len(self.whats) > 1:
            # A tensor saved for the backward pass, so that gradient checkpointing counts this call like the others.
            hidden = torch.where(skip.to(hidden.device), hidden, 0.0)
        return _replaced(output, lambda _: _touching(hidden, (*self.module.parameters(), *tree_leaves((args, kwargs)))))


def attached_blocks(
    handle: Connection,
    found: Sequence[FoundSite],
    chosen: Set[str],
    modules: Mapping[nn.Module, AttachedModule],
    names: Mapping[nn.Module, str],
) -> list[AttachedBlock]:
    """Return the attached blocks of the chosen self-attention."""
    inside: dict[tuple[nn.Module, int], list[FoundSite]] = defaultdict(list)
    for site in found:
        if site.block is not None:
            inside[site.block.module, site.block.call].append(site)
    calls: dict[nn.Module, list[BlockCall | None]] = defaultdict(list)
    for (module, _), sites in inside.items():
        own = next(site for site in sites if site.info.stack != "cross")
        assert own.block is not None
        call = BlockCall(
            own.block,
            own.info,
            tuple(site.info for site in sites if site.info.name in chosen),
            tuple(modules[site.module] for site in sites if site.module in modules),
        )
        calls[module].append(call if own.info.name in chosen else None)
    return [AttachedBlock(handle, module, each, names[module]) for module, each in calls.items() if any(each)]


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
