"""Run a model and restore its modes and the random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Set a model to eval mode within the block; restore each module's mode and torch's random state after it.

    Args:
        model: the model.
        training: set it to training mode instead.

    Example:
        >>> model = nn.Dropout()
        >>> with undisturbed(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    model.train(training)
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
