"""Launches of kernels: on the device of a tensor, or in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

MOST_COMPILED = 4096
MOST_RANKED = 2048 if torch.version.hip else 4096  # keys times the bytes of a number: 64, or up to 128, KiB are shared
HOST_READS = (torch.Tag.cudagraph_unsafe,)  # of operators: a CUDA graph would repeat the seed that it was recorded with
_compiled: dict[tuple[Any, ...], Any] = {}
_NO_CHANGE = contextlib.nullcontext()


def is_interpreted() -> bool:
    """Whether Triton's interpreter stands in for a device, as `TRITON_INTERPRET=1` asks."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes", "y", "TRUE", "True")


def guard(device: torch.device) -> Any:
    """Make a device the current one, on which Triton launches."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _NO_CHANGE
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

    Code that Triton has compiled for the same :func:`likeness` is launched directly: Triton would take three times as
    long as the launch to look it up.
    """
    with guard(device):
        key = (kernel.__name__, device, warps, stages, constants, alike)
        cached = None if alike is None else _compiled.get(key)
        if cached is not None:
            cached[grid](*arguments, *constants)
            return
        compiled = kernel[grid](*arguments, *constants, num_warps=warps, num_stages=stages)
        if compiled is not None and alike is not None:
            if len(_compiled) >= MOST_COMPILED:
                _compiled.clear()
            _compiled[key] = compiled


def likeness(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return all properties of arguments for which Triton compiles other code; ``None`` if a tensor is not aligned.

    Triton compiles for the types of tensors and for properties of integers; the likeness has the integers themselves.
    """
    alike: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind is float:
            alike.append(float)
        elif kind is tuple:
            inner = likeness(argument)
            if inner is None:
                return None
            alike.append(inner)
        elif isinstance(argument, Tensor):
            if argument.data_ptr() & 15:
                return None
            alike.append(argument.dtype)
        else:
            alike.append(argument)
    return tuple(alike)
