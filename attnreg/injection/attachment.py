"""Attaching providers to models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn

from attnreg.errors import InputError
from attnreg.injection.discovery import FoundSite, discover
from attnreg.injection.handle import AttachHandle
from attnreg.injection.selection import choose, warn_of_the_rest
from attnreg.injection.shadow import MARK
from attnreg.masks import Stack
from attnreg.provider.base import MaskProvider
from attnreg.provider.protocols import looks_at_batches, may_skip_blocks, that_look_at_batches

_ATTACHED: WeakKeyDictionary[nn.Module, ReferenceType[AttachHandle]] = WeakKeyDictionary()  # by provider


def attach(
    model: nn.Module,
    provider: MaskProvider,
    *,
    layers: Sequence[int] | None = None,
    stacks: Sequence[Stack] | None = None,
    modules: str | Sequence[str] | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
) -> AttachHandle:
    """Let a provider mask the attention of a model in its training passes.

    Everything is checked before the model is touched. While attached, the model keeps its class, parameters and
    ``state_dict`` keys. In eval mode, and in passes without gradients, it is bitwise the plain model.

    Args:
        model: any model whose attention runs through softmax, torch's fused attention, ``nn.MultiheadAttention`` or
            ``flex_attention``; not yet compiled, wrapped or sharded.
        provider: the provider, or a composition (``a & b``).
        layers: layer indices within each stack, negative ones from its end; all by default. They are those of the
            model's own blocks, where it has any.
        stacks: of ``"encoder"``, ``"decoder"``, ``"cross"``; by default every self-attention, no cross-attention.
        modules: names of modules, or patterns such as ``"*.self_attn"``: only attention in them, of any stack.
        example_inputs: arguments for one forward pass with two samples; needed if none can be made up for the model.

    Returns:
        a handle; also a context manager.

    Raises:
        NoAttentionError: if no attention is seen in the model, or a whole list of its blocks would be left out.
        ValueError: if a layer, stack or module is not there, the provider cannot serve the sites, or the model is
            compiled, wrapped or sharded: attach first.
        RuntimeError: if the model has a provider already, or the provider has a model.

    Warns:
        CoverageWarning: if some attention of the model is not covered, though nothing was chosen.

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
    _check_free(model, provider)
    _check_bare(model)
    found = discover(model, example_inputs)
    chosen = choose(found, layers, stacks, modules)
    if modules is None:
        warn_of_the_rest(model, found, everything=layers is None and stacks is None)
    that_look_at_batches(provider)  # which must fit together
    _check_parts(provider, chosen)
    provider.check([site.info for site in chosen], model)
    if may_skip_blocks(provider):
        _check_blocks(chosen)
    handle = AttachHandle(model, provider, found, {site.info.name for site in chosen})
    for each in _providers(provider):
        _ATTACHED[each] = ref(handle)
    return handle


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
        f"This {type(provider).__name__} is not attached to the model: call `attnreg.attach(model, provider)` first."
    )


def _handles(model: nn.Module) -> list[AttachHandle]:
    marks = (module.__dict__.get(MARK) for module in model.modules())
    return list({id(mark.handle): mark.handle for mark in marks if mark is not None}.values())


def _providers(provider: MaskProvider) -> list[MaskProvider]:
    return [module for module in provider.modules() if isinstance(module, MaskProvider)]


def _check_free(model: nn.Module, provider: MaskProvider) -> None:
    if is_attached(model):
        raise RuntimeError(
            "The model has a provider already: compose providers with `a & b`, or call `attnreg.detach(model)` first."
        )
    for each in _providers(provider):
        known = _ATTACHED.get(each)
        handle = None if known is None else known()
        if handle is not None and handle.attached:
            raise RuntimeError(
                f"This {type(each).__name__} is attached to another model: make a provider for each model, or detach "
                "it there first."
            )


def _check_bare(model: nn.Module) -> None:
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
        raise InputError(f"{type(model).__name__} is compiled already: attach first, then compile.")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise InputError(f"The model is wrapped in {type(model).__name__} already: attach first, then wrap.")
    if any(
        type(parameter).__name__ == "DTensor" or hasattr(parameter, "_is_flat_param")
        for parameter in model.parameters()
    ):
        raise InputError(f"{type(model).__name__} is sharded already: attach first, then shard (`fully_shard`).")


def _check_parts(provider: MaskProvider, chosen: Sequence[FoundSite]) -> None:
    parts = next((site.info.name for site in chosen if site.info.in_parts), None)
    for each in _providers(provider):
        if parts is not None and (looks_at_batches(each) or type(each).prepare is not MaskProvider.prepare):
            raise InputError(
                f"{type(each).__name__} needs all of an attention at once, and {parts} computes it in parts (one for "
                "each image or window, or for each half of the values): leave it out with `modules=...` or "
                "`layers=...`, or load the model with another `attn_implementation`."
            )


def _check_blocks(chosen: Sequence[FoundSite]) -> None:
    bare = [site.info.name for site in chosen if site.block is None and site.info.stack != "cross"]
    if bare:
        raise InputError(
            "Skipping blocks needs every self-attention to be within a Transformer block that can be skipped (an entry "
            "of a ModuleList or Sequential that returns hidden states in the shape in which it got them); there is "
            f"none around {', '.join(bare)}."
        )
