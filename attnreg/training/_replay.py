"""Replay torch's random numbers, so that two forward passes draw the same dropout and masks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def replay(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return a function that puts torch's global generators back to where they are now.

    Args:
        tensors: the generators of their devices are included, besides that of the CPU.

    Example:
        >>> again = replay([])
        >>> first = torch.rand(3)
        >>> again()
        >>> torch.equal(torch.rand(3), first)
        True
    """
    restore: list[Callable[[], None]] = [functools.partial(torch.set_rng_state, torch.get_rng_state())]
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            restore.append(functools.partial(module.set_rng_state, module.get_rng_state(device), device))

    def again() -> None:
        for each in restore:
            each()

    return again
