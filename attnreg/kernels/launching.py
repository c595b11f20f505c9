"""Where kernels run: on the device of a tensor, or in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

_ALREADY_THERE = contextlib.nullcontext()


def is_interpreted() -> bool:
    """Whether Triton's interpreter stands in for a device, as `TRITON_INTERPRET=1` asks."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes", "y", "TRUE", "True")


def guard(device: torch.device) -> Any:
    """Make a device the current one, on which Triton launches."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _ALREADY_THERE
    return torch.accelerator.device_index(device.index)
