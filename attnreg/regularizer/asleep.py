"""Warnings about providers that do not act because nobody told them the epoch, the step or the like."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

PATIENCE = 100  # training passes without a step; gradient accumulation rarely spans more


@runtime_checkable
class MaySleep(Protocol):
    """A provider that acts as it should only if it is told, for example, the epoch."""

    def why_asleep(self, passes: int) -> str | None:
        """Return a sentence with what is missing and how to fix it; ``None`` if nothing is missing yet.

        Args:
            passes: number of training passes so far, including this one.
        """


@runtime_checkable
class WaitsForEpoch(Protocol):
    """A provider that may not act in the first epoch."""

    @property
    def first_epoch(self) -> int:
        """The first epoch in which it acts, counted from 0."""


def asleep_for(provider: nn.Module, epochs: int) -> str | None:
    """Return a sentence on a provider, or one inside it, that does not act within this number of epochs, if any.

    Example:
        >>> from attnreg import AttentionLayerDrop, CrossTuning
        >>> asleep_for(CrossTuning(AttentionLayerDrop(0.1)), epochs=1)
        'CrossTuning first acts in epoch 2, but training ends after epoch 1: train for longer, or lower `offset`.'
    """
    for each in provider.modules():
        if isinstance(each, WaitsForEpoch) and each.first_epoch >= epochs:
            return (
                f"{type(each).__name__} first acts in epoch {each.first_epoch + 1}, but training ends after epoch "
                f"{epochs}: train for longer, or lower `offset`."
            )
    return None


def never_stepped(name: str, steps: Tensor, passes: int) -> str | None:
    """Return a sentence on a schedule that nobody advances, if so; for :meth:`MaySleep.why_asleep`."""
    if passes < PATIENCE or int(steps):
        return None
    return (
        f"The schedule of {name} has not moved in {passes} training passes: call `handle.step()` after each optimizer "
        "step (training methods and AttnRegCallback do)."
    )
