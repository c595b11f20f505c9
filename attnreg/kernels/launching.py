"""Launches of kernels: on the device of a tensor, or in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

MOST_KNOWN = 4096
_known: dict[tuple[Any, ...], Any] = {}
_ALREADY_THERE = contextlib.nullcontext()


def is_interpreted() -> bool:
    """Whether Triton's interpreter stands in for a device, as `TRITON_INTERPRET=1` asks."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes", "y", "TRUE", "True")


def guard(device: torch.device) -> Any:
    """Make a device the current one, on which Triton launches."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _ALREADY_THERE
    return torch.accelerator.device_index(device.index)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    device: torch.device,
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    alike: tuple[Any, ...] | None,
    *,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Launch a kernel, whose constants follow its arguments.

    What Triton has compiled for arguments that are alike, see :func:`likeness`, is launched directly: finding it again
    takes Triton three times as long as the launch.
    """
    with guard(device):
        key = (kernel.__name__, device, warps, stages, constants, alike)
        known = None if alike is None else _known.get(key)
        if known is not None:
            known[grid](*arguments, *constants)
            return
        compiled = kernel[grid](*arguments, *constants, num_warps=warps, num_stages=stages)
        if compiled is not None and alike is not None:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[key] = compiled


def likeness(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return all that tells code for some arguments from code for others; ``None`` if a tensor is not aligned.

    Triton compiles for the types of tensors and for properties of integers, of which all values are kept here.
    """
    alike: list[Any] = []
    for each in arguments:
        kind = type(each)
        if kind is float:
            alike.append(float)
        elif kind is tuple:
            inner = likeness(each)
            if inner is None:
                return None
            alike.append(inner)
        elif isinstance(each, Tensor):
            if each.data_ptr() & 15:
                return None
            alike.append(each.dtype)
        else:
            alike.append(each)
    return tuple(alike)
