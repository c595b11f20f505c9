"""Attaching providers to models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from torch import nn

from attnreg.errors import InputError
from attnreg.injection.discovery import FoundSite, discover
from attnreg.injection.handle import AttachHandle
from attnreg.injection.shadow import MARK
from attnreg.masks import Stack, layer_indices, on_layers
from attnreg.provider import MaskProvider, may_skip_blocks, that_look_at_batches


def attach(
    model: nn.Module,
    provider: MaskProvider,
    *,
    layers: Sequence[int] | None = None,
    stacks: Sequence[Stack] | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
) -> AttachHandle:
    """Let a provider mask the attention of a model while both are in training mode.

    Everything is checked before the model is touched. While attached, the model keeps its class, parameters and
    ``state_dict`` keys; in eval mode it is bitwise the plain model.

    Args:
        model: any model whose attention runs through softmax, torch's fused attention or ``nn.MultiheadAttention``.
        provider: the provider, or a composition (``a & b``).
        layers: layer indices within each stack, negative ones from its end; all by default.
        stacks: of ``"encoder"``, ``"decoder"``, ``"cross"``; by default every self-attention, no cross-attention.
        example_inputs: arguments for one forward pass, if the model is neither a transformers model with token ids
            or images nor one of torch's own Transformer modules.

    Returns:
        a handle; also a context manager.

    Raises:
        NoAttentionError: if no attention is seen in the model.
        ValueError: if a layer or stack is not there, the provider cannot serve the sites, or the model is compiled:
            attach first, then compile.
        RuntimeError: if a provider is attached already.

    Example:
        >>> import torch, attnreg
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> with attnreg.attach(model, attnreg.AttentionDropout(0.5, placement="scores"), layers=[1]) as handle:
        ...     y = model(torch.randn(4, 3, 8))
        >>> [site.label for site in handle.sites]
        ['encoder.1']
        >>> attnreg.is_attached(model)
        False
    """
    if not isinstance(provider, MaskProvider):
        raise TypeError(f"Expected `provider` to be a MaskProvider, got {type(provider).__name__}.")
    if is_attached(model):
        raise RuntimeError(
            "Expected a model without a provider, got one that has one: compose providers with `a & b`, or call "
            "`attnreg.detach(model)` first."
        )
    for name, wanted in (("layers", layers), ("stacks", stacks)):
        if wanted is not None and (isinstance(wanted, (str, int)) or not len(wanted)):
            raise InputError(f"Expected `{name}` to be a list that is not empty, or None for all, got {wanted!r}.")
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
        raise InputError(
            f"Expected a model that is not compiled yet, got {type(model).__name__}: attach first, then compile."
        )
    found = discover(model, example_inputs)
    chosen = _choose(found, layers, stacks)
    that_look_at_batches(provider)  # which must fit together
    provider.check([site.info for site in chosen])
    if may_skip_blocks(provider):
        _check_blocks(chosen)
    provider.bind(model)
    return AttachHandle(model, provider, found, {site.info.name for site in chosen})


def detach(model: nn.Module) -> None:
    """Take away whatever provider is attached to a model (or to a part or the whole of it). Twice is fine."""
    for handle in _handles(model):
        handle.detach()


def is_attached(model: nn.Module) -> bool:
    """Whether a provider is attached to a model, or to any part of it."""
    return bool(_handles(model))


def handle_of(model: nn.Module, provider: MaskProvider) -> AttachHandle:
    """The handle by which a provider, alone or within a composition, is attached to a model.

    Raises:
        RuntimeError: if it is not.
    """
    for handle in _handles(model):
        if any(module is provider for module in handle.provider.modules()):
            return handle
    raise RuntimeError(
        f"Expected this {type(provider).__name__} to be attached to the model, found it is not: call "
        "`attnreg.attach(model, provider)` first."
    )


def _handles(model: nn.Module) -> list[AttachHandle]:
    marks = (module.__dict__.get(MARK) for module in model.modules())
    return list({id(mark.handle): mark.handle for mark in marks if mark is not None}.values())


def _check_blocks(chosen: Sequence[FoundSite]) -> None:
    bare = [site.info.name for site in chosen if site.block is None and site.info.stack != "cross"]
    if bare:
        raise InputError(
            "Expected every self-attention within a Transformer block that can be skipped (an entry of a ModuleList or "
            f"Sequential that gives hidden states back in their shape), found none around {', '.join(bare)}."
        )


def _choose(
    found: Sequence[FoundSite], layers: Sequence[int] | None, stacks: Sequence[Stack] | None
) -> list[FoundSite]:
    present = sorted({site.info.stack for site in found})
    if stacks is None:
        stacks = [stack for stack in get_args(Stack) if stack in present and stack != "cross"]
    if missing := [stack for stack in stacks if stack not in present]:
        raise InputError(f"Expected `stacks` among {present}, which the model has, got {missing}.")
    sites = [site for site in found if site.info.stack in stacks]
    if not sites:
        raise InputError(f"Expected self-attention in the model, got {present} alone: pass `stacks={present}`.")
    if layers is None:
        return sites
    where = "`attach(layers=...)`"
    wanted = layer_indices(layers, where)
    names = {info.name for info in on_layers([site.info for site in sites], wanted, where)}
    return [site for site in sites if site.info.name in names]
