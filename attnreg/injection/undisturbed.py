"""Running a model so that nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Within the block the model is in eval (or training) mode; its modules' modes and the random state come back.

    Args:
        model: the model.
        training: training mode instead of eval mode.

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
