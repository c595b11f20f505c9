"""Providers that change hidden states instead of attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import get_args

from torch import Tensor
from typing_extensions import override

from attnreg.arguments import one_of
from attnreg.errors import InputError
from attnreg.regularizer.base import MaskProvider
from attnreg.sites import HiddenInfo, HiddenSite, Where


class HiddenProvider(MaskProvider):
    """A regularizer of hidden states: of embeddings, of the states between blocks, or of the pooled state.

    Write only :meth:`forward`. Everything else is as for :class:`attnreg.MaskProvider`: ``a & b`` composes providers of
    both kinds, and :class:`attnreg.OnLayers`, :class:`attnreg.CrossTuning` and :class:`attnreg.Scheduled` take them.

    Example:
        >>> import torch
        >>> class HalveOutputs(HiddenProvider):
        ...     def forward(self, site, states):
        ...         return states / 2
        >>> HalveOutputs()(HiddenSite(shape=(1, 1, 2)), torch.ones(1, 1, 2))
        tensor([[[0.5000, 0.5000]]])
    """

    #: The sites at which the provider is asked, ``"embeddings"``, ``"input"``, ``"output"`` or ``"pooled"``, or a list.
    where: Where | Sequence[Where] = "output"

    @abstractmethod
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:  # type: ignore[override]
        """Return the changed states; ``None`` leaves them as they are.

        Args:
            site: where the states are.
            states: ``(B, T, C)``, or ``(B, C)`` for the pooled state; not to be changed in place.
        """

    @property
    @override
    def masks_attention(self) -> bool:
        return False

    @property
    def places(self) -> tuple[Where, ...]:
        """The attribute ``where`` as a tuple."""
        return (self.where,) if isinstance(self.where, str) else tuple(self.where)


def checked_where(where: Where | Sequence[Where]) -> Where | Sequence[Where]:
    """Return ``where`` if it is a place of hidden states, or a list of different ones.

    Raises:
        InputError: if it is not.

    Example:
        >>> checked_where("outputs")
        Traceback (most recent call last):
            ...
        attnreg.errors.InputError: Expected `where` to be one of embeddings, input, output, pooled, got 'outputs'...
    """
    places = (where,) if isinstance(where, str) else where
    if not isinstance(places, (list, tuple)) or not places or len({*map(str, places)}) < len(places):
        raise InputError(f"Expected `where` to be a place or a list of different ones, got {where!r}.")
    for each in places:
        one_of("where", each, get_args(Where))
    return where if isinstance(where, str) else list(where)


def changed(provider: MaskProvider, site: HiddenSite, states: Tensor) -> Tensor:
    """Return hidden states as a provider, and those inside it, change them, one after the other.

    Raises:
        ValueError: if a provider returns states of another shape.
    """
    if not (provider.training and provider.active):
        return states
    for each in provider.inner(site):
        states = changed(each, site, states)
    if not isinstance(provider, HiddenProvider) or site.where not in provider.places:
        return states
    answer = provider(site, states)
    if answer is None:
        return states
    if answer.shape != states.shape:
        raise InputError(
            f"Expected {type(provider).__name__} to return states of shape {tuple(states.shape)}, got "
            f"{tuple(answer.shape)}, at {site.name}."
        )
    return answer.to(states.dtype)


def asked_at(provider: MaskProvider, site: HiddenInfo) -> list[HiddenProvider]:
    """Return the providers, among this one and those inside it, that are asked at a hidden-state site."""
    found = [leaf for each in provider.inner(site) for leaf in asked_at(each, site)]
    if isinstance(provider, HiddenProvider) and site.where in provider.places:
        found.append(provider)
    return found


def hidden_providers(provider: MaskProvider) -> list[HiddenProvider]:
    """Return the providers of hidden states, among this one and those inside it."""
    return [each for each in provider.modules() if isinstance(each, HiddenProvider)]
