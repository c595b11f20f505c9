"""Attach providers to models, and detach them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn

from attnreg.arguments import one_of
from attnreg.errors import InputError
from attnreg.injection.discovery import Discovery, ModelSite, discover
from attnreg.injection.discovery.hidden import HiddenModelSite, hidden_sites
from attnreg.injection.discovery.selection import (
    check_blocks,
    choose,
    choose_hidden,
    is_chosen,
    warn_of_heads,
    warn_of_left_out,
    warn_of_sequences,
)
from attnreg.injection.handle import AttachHandle
from attnreg.injection.running.replaced_forward import MARK
from attnreg.regularizer.abilities import that_look_at_batches
from attnreg.regularizer.base import Compose, Regularizer, a_regularizer
from attnreg.regularizer.providers import HiddenProvider, MaskProvider
from attnreg.sharding import is_sharded
from attnreg.sites import Stack

_ATTACHED: WeakKeyDictionary[nn.Module, ReferenceType[AttachHandle]] = WeakKeyDictionary()  # by provider


def attach(
    model: nn.Module,
    provider: Regularizer,
    *,
    layers: Sequence[int] | None = None,
    stacks: Sequence[Stack] | None = None,
    modules: str | Sequence[str] | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    own_dropout: Literal["torch", "seeded"] = "torch",
) -> AttachHandle:
    """Mask the attention of a model with a provider in every training pass.

    A dry run on a tiny batch finds the attention; it restores all state, and if a check fails, the model is unchanged.
    While attached, the model keeps its class, parameters and ``state_dict`` keys. In eval mode and in passes without
    gradients, its outputs are bitwise those of the plain model.

    Args:
        model: any model whose attention runs through softmax, torch's fused attention, ``nn.MultiheadAttention`` or
            ``flex_attention``. Attach before you compile, wrap or shard it.
        provider: a provider, or a composition of several (``a & b``).
        layers: layer indices within each stack, numbered as the model numbers its blocks; negative ones count from the
            end. Default: all layers.
        stacks: any of ``"encoder"``, ``"decoder"``, ``"cross"``. Default: all self-attention, no cross-attention.
        modules: module names, or patterns such as ``"*.self_attn"``. Mask attention only in these
            modules, of any stack.
        example_inputs: keyword arguments (a mapping) or positional ones (a sequence) of one forward pass with two
            samples, for models that attnreg cannot make inputs for.
        own_dropout: ``"seeded"`` draws the model's own randomness from the seed of the pass, too; see :func:`seeded`.

    Returns:
        a handle, which is also a context manager.

    Raises:
        NoAttentionError: if no attention is found, or none of what runs in a whole list of blocks can be masked.
        InputError: if a layer, stack or module does not exist, if the provider does not support a site, or if the model
            is already compiled, wrapped or sharded.
        RuntimeError: if the model already has a provider, or the provider is already attached to a model.
        TypeError: if ``model`` is no module.

    Warns:
        CoverageWarning: if some attention cannot be masked, or did not run, and ``modules`` is ``None``.
        AttnRegWarning: if a part of the model runs on several sequences in a pass, or heads are modules of their own,
            and ``modules`` is ``None``.

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
    if not isinstance(model, nn.Module) or isinstance(model, Regularizer):
        load = ": load the model first, as with `from_pretrained`" if isinstance(model, str) else ""
        load = ": `attach(model, provider)` takes the model first" if isinstance(model, Regularizer) else load
        raise TypeError(f"Expected `model` to be a torch module, got {model!r}{load}.")
    a_regularizer(provider, "attach")
    one_of("own_dropout", own_dropout, ("torch", "seeded"))
    _check(model, provider)
    masks_attention = any(isinstance(part, MaskProvider) for part in provider.parts())
    discovery = discover(model, example_inputs, needs_attention=masks_attention)
    chosen = choose(discovery, layers, stacks, modules) if discovery.sites else []
    if modules is None:
        warn_of_sequences(model, discovery)
        warn_of_heads(model, discovery)
        if masks_attention:
            warn_of_left_out(model, discovery, everything=layers is None and stacks is None)
    that_look_at_batches(provider)  # raises if two of them do not fit together
    hidden: list[HiddenModelSite] = []
    if any(isinstance(part, HiddenProvider) for part in provider.parts()):
        is_there = functools.partial(is_chosen, layers=layers, stacks=stacks, modules=modules)
        hidden = hidden_sites(model, discovery, chosen, is_there)
    states = choose_hidden(provider, hidden, chosen, model)
    if not masks_attention:
        chosen = []
    _check_parts(provider, chosen)
    infos: list[Any] = [site.info for site in (chosen if masks_attention else hidden)]
    provider.check(infos, model)
    if provider.may_skip_blocks:
        check_blocks("A provider that skips blocks", chosen)
    handle = AttachHandle(model, provider, discovery, chosen, states, seeded=own_dropout == "seeded")
    for part in provider.parts():
        _ATTACHED[part] = ref(handle)
    return handle


def seeded(model: nn.Module) -> AttachHandle:
    """Draw a model's own randomness from one seed per forward pass, so that ``handle.replay(seed)`` repeats the pass.

    In training mode, this replaces the numbers, not the rates, of dropout (modules, functions, in attention and LoRA),
    stochastic depth, LayerDrop, noise and jitter. In eval mode, the model is bitwise the plain one. A pass takes one
    number, its seed, from torch's generator, and leaves the generators of torch, numpy and Python as they are. To mask
    attention as well, use ``attach(model, provider, own_dropout="seeded")``.

    Args:
        model: any model.

    Returns:
        a handle, which is also a context manager.

    Raises:
        InputError: if the model is already compiled, wrapped or sharded, or a module holds a foreign generator.
        RuntimeError: if the model has a handle already; in a pass, if the model draws numbers in a way that attnreg
            cannot replace, such as within a kernel.

    Example:
        >>> import torch, attnreg
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        >>> handle, x = attnreg.seeded(model), torch.randn(4, 8)
        >>> y = model(x)
        >>> with handle.replay():
        ...     torch.equal(model(x), y)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` to be a torch module, got {model!r}.")
    nothing = Compose()
    _check(model, nothing)
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    return AttachHandle(model, nothing, Discovery((), (), (), names, (), 0, (), None), (), seeded=True)


def detach(model: nn.Module) -> None:
    """Detach the provider that masks a model or any part of it. A second call does nothing."""
    for handle in handles(model):
        handle.detach()


def is_attached(model: nn.Module) -> bool:
    """Whether a provider is attached to a model or to any part of it."""
    return bool(handles(model))


def handle_of(model: nn.Module, provider: Regularizer) -> AttachHandle:
    """Return the handle that attaches a provider, or a composition that contains it, to a model.

    Raises:
        RuntimeError: if the provider is not attached to the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected the model, the first argument, to be a torch module, got a {type(model).__name__}.")
    for handle in handles(model):
        if any(part is provider for part in handle.provider.parts()):
            return handle
    raise RuntimeError(
        f"This {type(provider).__name__} is not attached to the model. Call `attnreg.attach(model, provider)` first."
    )


def handles(model: nn.Module) -> list[AttachHandle]:
    """Return the handles of a model and of its parts."""
    marks = (module.__dict__.get(MARK) for module in model.modules())
    handles = [mark.handle for mark in marks if mark is not None]
    return list({id(handle): handle for handle in handles if handle is not None}.values())


def _check(model: nn.Module, provider: Regularizer) -> None:
    """Raise if either is attached already, or if the model is compiled, wrapped or sharded."""
    if is_attached(model):
        raise RuntimeError(
            "The model already has a provider. Compose providers with `a & b`, or call `attnreg.detach(model)` first."
        )
    for part in provider.parts():
        reference = _ATTACHED.get(part)
        handle = None if reference is None else reference()
        if handle is not None and handle.attached:
            message = f"This {type(part).__name__} is already attached to another model"
            raise RuntimeError(f"{message}. Create one provider per model, or detach this one first.")
    if any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules()):
        raise InputError(f"{type(model).__name__} is already compiled. Attach first, then compile.")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise InputError(f"The model is already wrapped in {type(model).__name__}. Attach first, then wrap.")
    if is_sharded(model) or any(hasattr(weight, "_is_flat_param") for weight in model.parameters()):
        raise InputError(f"{type(model).__name__} is already sharded. Attach first, then shard (`fully_shard`).")


def _check_parts(provider: Regularizer, chosen: Sequence[ModelSite]) -> None:
    in_parts = next((site.info.name for site in chosen if site.info.in_parts), None)
    for part in provider.parts():
        if in_parts is not None and (part.looks_at_batches or type(part).prepare is not Regularizer.prepare):
            raise InputError(
                f"{type(part).__name__} needs the whole attention at once, but {in_parts} computes it in parts (per "
                "image, window or half of the values). Leave this site out with `modules=...` or `layers=...`, or load "
                "the model with another `attn_implementation`."
            )
