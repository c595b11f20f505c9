"""Noticing that a regularizer cannot act: protocols for providers that depend on being told something."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

PATIENCE = 100  # training passes without a step: gradient accumulation over more of them is rare


@runtime_checkable
class MaySleep(Protocol):
    """A provider that acts as it should only if it is told something, such as the epoch."""

    def why_asleep(self, passes: int) -> str | None:
        """What it was not told and what to do, in a sentence; ``None`` if it was told, or may still be.

        Args:
            passes: training passes so far, this one included.
        """


@runtime_checkable
class WaitsForEpoch(Protocol):
    """A provider that first acts in a later epoch."""

    @property
    def first_epoch(self) -> int:
        """The first epoch in which it acts, counted from 0."""


def asleep_for(provider: nn.Module, epochs: int) -> str | None:
    """Say so if a provider, or one that it is made of, does not act within a number of epochs.

    Args:
        provider: the provider.
        epochs: of training.

    Returns:
        a sentence; ``None`` if all act.

    Example:
        >>> from attnreg import AttentionLayerDrop, CrossTuning
        >>> asleep_for(CrossTuning(AttentionLayerDrop(0.1)), epochs=1)
        'CrossTuning first acts in epoch 2, and there is 1: train for at least 2 epochs, or lower `offset`.'
    """
    for each in provider.modules():
        if isinstance(each, WaitsForEpoch) and each.first_epoch >= epochs:
            first = each.first_epoch + 1
            number = "is 1" if epochs == 1 else f"are {epochs}"
            return (
                f"{type(each).__name__} first acts in epoch {first}, and there {number}: train for at least {first} "
                "epochs, or lower `offset`."
            )
    return None


def never_stepped(name: str, steps: Tensor, passes: int) -> str | None:
    """What :meth:`MaySleep.why_asleep` says of a schedule that nobody advances.

    Args:
        name: of the provider.
        steps: how often it was advanced.
        passes: training passes so far.
    """
    if passes < PATIENCE or int(steps):
        return None
    return (
        f"The schedule of {name} has not moved in {passes} training passes: call `handle.step()` after each optimizer "
        "step (training methods and AttnRegCallback do)."
    )
