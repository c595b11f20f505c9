"""Optional abilities of providers: skip blocks, look at batches, draw masks once per forward pass.

A provider has an ability if it has the method or attribute; the base class declares none of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from attnreg.draws import Draws
from attnreg.errors import InputError
from attnreg.regularizer.base import MaskProvider
from attnreg.sites import SiteInfo


@runtime_checkable
class SkipsBlocks(Protocol):
    """A provider that skips whole Transformer blocks."""

    def skips_block(self, site: SiteInfo, draws: Draws) -> Tensor | None:
        """Decide whether this forward pass skips the block around a self-attention: 0-d, bool, on the CPU.

        ``True`` = skipped; ``None`` if the provider does not decide. ``draws`` is the source of randomness.
        """


@runtime_checkable
class MayLookAtBatches(Protocol):
    """A provider that overrides ``attribute`` but needs it only with some constructor arguments."""

    @property
    def looks_at_batches(self) -> bool:
        """Whether ``attribute`` must be called before each training step."""


@runtime_checkable
class LooksAlone(Protocol):
    """A provider that must be the only one in a composition to look at batches."""

    looks_alone: bool


@runtime_checkable
class ComputesLoss(Protocol):
    """A provider that computes the training loss in passes of its own."""

    #: maps the model's output and the batch to the loss; ``None`` takes the model's own loss
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None


@runtime_checkable
class DecidesForBatch(Protocol):
    """A provider that may decide once for all rows of a batch."""

    @property
    def decides_for_batch(self) -> bool:
        """Whether it does, so that parts of a batch would not be masked as in the whole batch."""


@runtime_checkable
class MayDrawInPrepare(Protocol):
    """A provider that overrides ``prepare`` but does not always draw its masks there."""

    @property
    def draws_in_prepare(self) -> bool:
        """Whether the masks of a forward pass are drawn in ``prepare``."""


def may_skip_blocks(provider: MaskProvider) -> bool:
    """Whether a provider, or one inside it, skips blocks."""
    return any(isinstance(each, SkipsBlocks) for each in provider.modules())


def skipped(provider: MaskProvider, site: SiteInfo, draws: Draws) -> Tensor | None:
    """Whether to skip the block around a self-attention: 0-d, bool; ``None`` if no acting provider decides."""
    if not (provider.training and provider.active):
        return None
    answers = [skipped(each, site, draws) for each in provider.inner(site)]
    if isinstance(provider, SkipsBlocks):
        skip = provider.skips_block(site, draws)
        if skip is not None and (skip.dim() or skip.dtype != torch.bool):
            raise InputError(
                f"Expected `skips_block` of {type(provider).__name__} to return a 0-d bool tensor, got {skip.dtype} of "
                f"shape {tuple(skip.shape)} at {site.name}."
            )
        answers.append(skip)
    decided = [answer for answer in answers if answer is not None]
    return functools.reduce(operator.or_, decided) if decided else None


def looks_at_batches(provider: MaskProvider) -> bool:
    """Whether a provider itself, not one inside it, needs ``attribute`` before each training step."""
    if isinstance(provider, MayLookAtBatches):
        return provider.looks_at_batches
    return type(provider).attribute is not MaskProvider.attribute


def draws_in_prepare(provider: MaskProvider) -> bool:
    """Whether a provider itself draws the masks of a whole forward pass in ``prepare``.

    The next forward pass replaces these masks. Unless a provider says otherwise, overriding ``prepare`` means that.
    """
    if isinstance(provider, MayDrawInPrepare):
        return provider.draws_in_prepare
    return type(provider).prepare is not MaskProvider.prepare


def that_look_at_batches(provider: MaskProvider) -> list[MaskProvider]:
    """Return the providers in a composition that look at each batch before the training step on it.

    Raises:
        InputError: if one of them must be the only one but is not.

    Example:
        >>> from attnreg import AttributionProvider, HeadMask
        >>> [type(each).__name__ for each in that_look_at_batches(HeadMask(1) & AttributionProvider())]
        ['AttributionProvider']
    """
    looking = [each for each in provider.modules() if isinstance(each, MaskProvider) and looks_at_batches(each)]
    alone = next((each for each in looking if isinstance(each, LooksAlone)), None)
    others = [type(each).__name__ for each in looking if each is not alone]
    if alone is not None and others:
        raise InputError(
            f"{type(alone).__name__} must be the only provider that looks at batches: remove {', '.join(others)} from "
            "the composition."
        )
    return looking
