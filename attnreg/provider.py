"""The one base class of all attention regularizers, and how they compose."""

from __future__ import annotations

import functools
import inspect
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnreg.errors import InputError
from attnreg.masks import AttentionSite, Mask, SiteInfo, layer_indices, on_layers

Self = TypeVar("Self", bound="MaskProvider")


class MaskProvider(nn.Module, ABC):
    """An attention regularizer: answers, for each attention site, which positions to drop.

    Subclasses write :meth:`forward` and nothing else, unless they need the other methods. A provider acts while both
    it and the attention module are in training mode. Randomness comes from torch's global generator, which gradient
    checkpointing replays. Constructor arguments are kept as attributes of the same name (scikit-learn's convention);
    :meth:`save_pretrained` writes them down.

    Example:
        >>> import torch
        >>> class DropFirstKey(MaskProvider):
        ...     def forward(self, site):
        ...         return Mask(scores=torch.arange(site.shape[-1], device=site.device) > 0)
        >>> DropFirstKey()(AttentionSite(shape=(1, 1, 2, 3))).scores
        tensor([False,  True,  True])
    """

    @abstractmethod
    def forward(self, site: AttentionSite) -> Mask | None:
        """The mask for one site; ``None`` keeps everything."""

    def check(self, sites: Sequence[SiteInfo]) -> None:
        """Called by :func:`attnreg.attach` before it touches the model: raise if these sites cannot be served."""
        for provider in self._inner():
            provider.check(sites)

    def bind(self, model: nn.Module) -> None:
        """Called by :func:`attnreg.attach` after :meth:`check`, before it touches the model: note what to read of it.

        Args:
            model: the model to which the provider will be attached.

        Raises:
            ValueError: if the model does not have what the provider would read.
        """
        for provider in self._inner():
            provider.bind(model)

    @property
    def active(self) -> bool:
        """Whether it acts at present; an attached model runs as the plain one while its provider does not."""
        return True

    @property
    def looks_at_batches(self) -> bool:
        """Whether it needs :meth:`attribute` before each training step; by default, if it has one of its own.

        What it is made of is not counted; see :func:`attnreg.provider.that_look_at_batches`.
        """
        return type(self).attribute is not MaskProvider.attribute

    @property
    def looks_alone(self) -> bool:
        """Whether no other provider of a composition may look at batches beside it."""
        return False

    @property
    def draws_in_prepare(self) -> bool:
        """Whether masks are settled in :meth:`prepare`, once per forward pass; by default, if it has one of its own.

        Such masks are gone when a further forward pass begins, and gradient checkpointing could not meet them again.
        What it is made of is not counted.
        """
        return type(self).prepare is not MaskProvider.prepare

    def skips_block(self, site: SiteInfo) -> Tensor | None:
        """Whether the whole Transformer block that holds a self-attention is skipped in this forward pass.

        Args:
            site: the block's self-attention.

        Returns:
            0-d, bool, on the CPU, ``True`` = skipped; ``None`` where there is nothing to decide.
        """
        answers = (provider.skips_block(site) for provider in self._inner() if provider.training and provider.active)
        return functools.reduce(_either, answers, None)

    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Called before each training step of a two-pass method: look at the batch that is about to be trained on.

        Args:
            model: the model to which the provider is attached.
            batch: its keyword arguments, ``labels`` among them.
        """
        for provider in self._inner():
            if provider.training and provider.active:
                provider.attribute(model, batch)

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Called once at the start of each forward pass in training mode, with the model's inputs by name."""
        for provider in self._inner():
            if provider.training and provider.active:
                provider.prepare(inputs)

    def penalty(self) -> Tensor | None:
        """What is added to the training loss, after a forward pass in training mode: 0-d; ``None`` for nothing.

        With it, a provider learns its parameters together with the model's. They must be in the optimizer:
        ``optimizer.add_param_group({"params": provider.learned_parameters()})``.
        """
        terms = (provider.penalty() for provider in self._inner() if provider.training and provider.active)
        return functools.reduce(_sum, terms, None)

    def learned_parameters(self) -> list[nn.Parameter]:
        """What is learned by the model's loss, for the model's optimizer: by default, all that asks for a gradient."""
        inner = list(self._inner())
        theirs = {id(parameter) for provider in inner for parameter in provider.parameters()}
        own = [p for p in self.parameters() if p.requires_grad and id(p) not in theirs]
        return own + [parameter for provider in inner for parameter in provider.learned_parameters()]

    def step(self) -> None:
        """Called after each optimizer step; schedules advance here."""
        for provider in self._inner():
            provider.step()

    def on_epoch(self, epoch: int) -> None:
        """Called at the start of each epoch, counted from 0."""
        for provider in self._inner():
            provider.on_epoch(epoch)

    def _inner(self) -> Iterator[MaskProvider]:
        """The providers that this one is made of: by default, what happens to it happens to them."""
        for child in self.children():
            for module in child if isinstance(child, nn.ModuleList) else (child,):
                if isinstance(module, MaskProvider):
                    yield module

    def __and__(self, other: MaskProvider) -> Compose:
        """Both masks apply."""
        return Compose(self, other)

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, by name."""
        names = self._argument_names()
        if missing := [name for name in names if not hasattr(self, name)]:
            raise TypeError(
                f"Expected {type(self).__name__} to keep the arguments of its constructor as attributes of the same "
                f"name, missing {', '.join(missing)}."
            )
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:  # noqa: D102
        values = ((name, getattr(self, name)) for name in self._argument_names() if hasattr(self, name))
        return ", ".join(f"{name}={value!r}" for name, value in values if not isinstance(value, nn.Module))

    def _argument_names(self) -> list[str]:
        return list(inspect.signature(type(self).__init__).parameters)[1:]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder of their own, whole or not at all.

        Args:
            folder: new, empty, or one that holds a provider, which is replaced.

        Raises:
            ValueError: if the folder holds something else, or an argument of the constructor cannot be written down.
        """
        from attnreg.pretrained import save_provider

        save_provider(self, folder)

    @classmethod
    def from_pretrained(
        cls: type[Self], folder: str | os.PathLike[str], providers: Sequence[type[MaskProvider]] = ()
    ) -> Self:
        """Read what :meth:`save_pretrained` wrote.

        Args:
            folder: the folder it wrote.
            providers: classes of your own that the provider is made of, besides this one.

        Raises:
            ValueError: if the folder does not hold a provider of this class, or one of a class that is not known.
        """
        from attnreg.pretrained import load_provider

        provider = load_provider(folder, providers if inspect.isabstract(cls) else {cls, *providers})
        if not isinstance(provider, cls):
            raise ValueError(f"Expected a {cls.__name__} in {folder}, got a {type(provider).__name__}.")
        return provider


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def a_provider(value: Any, where: str) -> MaskProvider:
    """Return ``value`` if it is a provider.

    Raises:
        InputError: if it is not.
    """
    if not isinstance(value, MaskProvider):
        raise InputError(f"Expected a provider in {where}, got {value!r}.")
    return value


def that_look_at_batches(provider: MaskProvider) -> list[MaskProvider]:
    """Those of a provider, and of what it is made of, that look at batches before they are trained on.

    Raises:
        InputError: if one of them must be the only one, and is not.

    Example:
        >>> from attnreg import AttributionProvider, HeadMask
        >>> [type(each).__name__ for each in that_look_at_batches(HeadMask(1) & AttributionProvider())]
        ['AttributionProvider']
    """
    looking = [each for each in provider.modules() if isinstance(each, MaskProvider) and each.looks_at_batches]
    alone = next((each for each in looking if each.looks_alone), None)
    others = [type(each).__name__ for each in looking if each is not alone]
    if alone is not None and others:
        raise InputError(
            f"Expected {type(alone).__name__} to be the only provider that looks at batches before they are trained "
            f"on, got {', '.join(others)} as well."
        )
    return looking


def _either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a | b


def may_skip_blocks(provider: MaskProvider) -> bool:
    """Whether a provider, or one that it is made of, has a say about whole blocks."""
    if type(provider).skips_block not in (MaskProvider.skips_block, OnLayers.skips_block):
        return True
    return any(may_skip_blocks(each) for each in provider._inner())


def ask(provider: MaskProvider, site: AttentionSite) -> Mask | None:
    """The provider's mask for a site; ``None`` while the provider is in eval mode or not active."""
    return provider(site) if provider.training and provider.active else None


def ask_block(provider: MaskProvider, site: SiteInfo) -> Tensor | None:
    """Whether the provider skips the block of a self-attention; ``None`` while it is in eval mode or not active."""
    skip = provider.skips_block(site) if provider.training and provider.active else None
    if skip is not None and (skip.dim() or skip.dtype != torch.bool):
        raise ValueError(
            f"Expected `skips_block` of {type(provider).__name__} to give a 0-d bool tensor, got {skip.dtype} of shape "
            f"{tuple(skip.shape)}, at {site.name}."
        )
    return skip


class Compose(MaskProvider):
    """Several providers at once; written ``a & b``. What any of them drops is dropped, factors multiply.

    Args:
        providers: asked in this order.

    Example:
        >>> from attnreg import AttentionDropout, AttentionLayerDrop
        >>> len((AttentionDropout(0.1) & AttentionLayerDrop(0.2) & AttentionDropout(0.3)).providers)
        3
    """

    def __init__(self, *providers: MaskProvider) -> None:
        super().__init__()
        self.providers: nn.ModuleList = nn.ModuleList(
            q for p in providers for q in (p.providers if isinstance(p, Compose) else (a_provider(p, "Compose"),))
        )

    @property
    def active(self) -> bool:  # noqa: D102
        return any(provider.active for provider in self._inner())

    def forward(self, site: AttentionSite) -> Mask | None:  # noqa: D102
        answers = [ask(provider, site) for provider in self._inner()]
        masks = [mask for mask in answers if mask is not None]
        return functools.reduce(operator.and_, masks) if masks else None


class OnLayers(MaskProvider):
    """Let a provider act on some layers only (of every stack that it is attached to).

    Args:
        provider: the provider to restrict.
        layers: layer indices; negative ones count from the last layer.

    Raises:
        ValueError: when attached, if a layer is not there.

    Example:
        >>> from attnreg import AttentionLayerDrop
        >>> first = OnLayers(AttentionLayerDrop(p=1.0), [0])
        >>> [first(AttentionSite(shape=(1, 1, 2, 2), layer=i, num_layers=2)) for i in range(2)]
        [Mask(scores=tensor(False), weights=None), None]
    """

    def __init__(self, provider: MaskProvider, layers: Sequence[int]) -> None:
        super().__init__()
        self.provider = a_provider(provider, "OnLayers")
        self.layers = layer_indices(layers, "OnLayers")

    @property
    def active(self) -> bool:  # noqa: D102
        return self.provider.active

    def forward(self, site: AttentionSite) -> Mask | None:  # noqa: D102
        return ask(self.provider, site) if site.is_among(self.layers) else None

    def skips_block(self, site: SiteInfo) -> Tensor | None:  # noqa: D102
        return super().skips_block(site) if site.is_among(self.layers) else None

    def check(self, sites: Sequence[SiteInfo]) -> None:  # noqa: D102
        self.provider.check(on_layers(sites, self.layers, "OnLayers"))
