"""The base class of all providers, and ``a & b``, which composes them."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import override

from attnreg.errors import InputError
from attnreg.masks import Mask
from attnreg.regularizer.saving import PretrainedMixin
from attnreg.sites import AttentionSite, Site, SiteInfo


class MaskProvider(PretrainedMixin, nn.Module, ABC):
    """An attention regularizer: decides, at each attention site, which positions to drop.

    Write only :meth:`forward`. By default, the other hooks (:meth:`check`, :meth:`attribute`, :meth:`prepare`,
    :meth:`step`, :meth:`on_epoch`) pass the call on to providers held as submodules. A provider acts while both it and
    the attention module are in training mode. Draw with ``site.keep(p)`` and ``site.uniform()``: their numbers follow
    from the seed of the pass, so that gradient checkpointing and ``handle.replay()`` get the same ones. Store each
    constructor argument as an attribute of the same name (scikit-learn's convention), so that :meth:`save_pretrained`
    can write it. Every built-in provider raises :class:`ValueError` if an argument is out of range.

    Example:
        >>> import torch
        >>> class DropFirstKey(MaskProvider):
        ...     def forward(self, site):
        ...         return Mask(scores=torch.arange(site.shape[-1], device=site.device) > 0)
        >>> DropFirstKey()(AttentionSite(shape=(1, 1, 2, 3))).scores
        tensor([False,  True,  True])
    """

    #: Float arguments that may change after construction, because :meth:`forward` reads the attribute each time.
    #: :class:`attnreg.Scheduled` can change these arguments only.
    schedulable: ClassVar[Collection[str]] = ()

    @abstractmethod
    def forward(self, site: AttentionSite) -> Mask | None:
        """Return the mask for one site; ``None`` keeps everything."""

    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        """Raise if the provider cannot regularize a model; :func:`attnreg.attach` calls it before it changes anything.

        Args:
            sites: the attention sites to attach to.
            model: the model, still unchanged.

        Raises:
            ValueError: if the provider cannot act at these sites.
        """
        for provider in self.inner():
            provider.check(sites, model)

    @property
    def active(self) -> bool:
        """Whether the provider acts now; otherwise the attached model runs as the plain model."""
        return True

    @property
    def masks_attention(self) -> bool:
        """Whether :meth:`forward` is asked at attention sites; a :class:`attnreg.HiddenProvider` is not."""
        return True

    def attribute(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Look at a batch before the training step on it, as the first of two passes.

        Args:
            model: the model that the provider is attached to.
            batch: the model's keyword arguments, including ``labels``.
        """
        for provider in self._acting():
            provider.attribute(model, batch)

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Prepare for a forward pass in training mode; called once before the pass.

        Args:
            inputs: the model's inputs by name.
        """
        for provider in self._acting():
            provider.prepare(inputs)

    def penalty(self) -> Tensor | None:
        """Return a 0-d term to add to the training loss after a forward pass; ``None`` adds nothing.

        A provider learns its own parameters through this term and the loss. Add them to the optimizer:
        ``optimizer.add_param_group({"params": provider.learned_parameters()})``.
        """
        terms = [term for provider in self._acting() if (term := provider.penalty()) is not None]
        return functools.reduce(operator.add, terms) if terms else None

    def learned_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the model's loss trains: by default, all that require a gradient."""
        inner = self.inner()
        of_inner = {id(parameter) for provider in inner for parameter in provider.parameters()}
        own = [p for p in self.parameters() if p.requires_grad and id(p) not in of_inner]
        return own + [parameter for provider in inner for parameter in provider.learned_parameters()]

    def step(self) -> None:
        """Advance schedules; called after each optimizer step."""
        for provider in self.inner():
            provider.step()

    def on_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0; called at the start of each."""
        for provider in self.inner():
            provider.on_epoch(epoch)

    def inner(self, site: Site | None = None) -> list[MaskProvider]:
        """Return the providers inside this one: its direct submodules, and items of a ``ModuleList`` among them.

        Args:
            site: return only the providers that may act at this site.
        """
        lists = (child if isinstance(child, nn.ModuleList) else (child,) for child in self.children())
        return [module for modules in lists for module in modules if isinstance(module, MaskProvider)]

    def _acting(self) -> list[MaskProvider]:
        return [provider for provider in self.inner() if provider.training and provider.active]

    def __and__(self, other: MaskProvider) -> Compose:
        """Apply the masks of both providers."""
        return Compose(self, other)


class Compose(MaskProvider):
    """Several providers at once, written ``a & b``. What any of them drops is dropped; factors multiply.

    Args:
        providers: the providers, which are asked in this order.

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
    @override
    def active(self) -> bool:
        return any(provider.active for provider in self.inner())

    @property
    @override
    def masks_attention(self) -> bool:
        return any(provider.masks_attention for provider in self.inner())

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        answers = [ask(provider, site) for provider in self.inner()]
        masks = [mask for mask in answers if mask is not None]
        return functools.reduce(operator.and_, masks) if masks else None


def ask(provider: MaskProvider, site: AttentionSite) -> Mask | None:
    """Return the provider's mask for a site; ``None`` while it is in eval mode or inactive, or if it masks nothing."""
    return provider(site) if provider.training and provider.active and provider.masks_attention else None


def a_provider(value: Any, where: str) -> MaskProvider:
    """Return ``value`` if it is a provider; otherwise raise."""
    if not isinstance(value, MaskProvider):
        raise InputError(f"Expected a provider in {where}, got {value!r}.")
    return value
