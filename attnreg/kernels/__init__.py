"""Code that must be fast on a GPU: Triton kernels, and the operators of torch that launch them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnreg.kernels.launching import MOST_RANKED, is_interpreted

if TYPE_CHECKING:
    from attnreg.kernels.device.attention import attention as attention
    from attnreg.kernels.device.dropping import dropout as dropout
    from attnreg.kernels.device.dropping import head_factors as head_factors
    from attnreg.kernels.device.numbers import numbers as numbers
    from attnreg.kernels.device.region import region as region

_MODULES = {
    "attention": "attention",
    "dropout": "dropping",
    "head_factors": "dropping",
    "numbers": "numbers",
    "region": "region",
}
_DEVICES = ("cuda", "xpu", "cpu") if is_interpreted() else ("cuda", "xpu")
DROPPED = torch.float16, torch.bfloat16, torch.float32
ROOM = 2**17 + 2**10  # bytes of shared memory that a region of 4096 bytes of keys takes; an RTX 4090 has 100 KiB
_INSTALLED = importlib.util.find_spec("triton") is not None


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device: Triton is installed, and it is a GPU, or the interpreter stands in for one.

    Example:
        >>> runs_on(torch.device("meta"))
        False
    """
    return _INSTALLED and device.type in _DEVICES


def multiplies(device: torch.device) -> bool:
    """Whether kernels that multiply matrices suit a device on which kernels run.

    Before Ampere (a T4 or V100), Triton takes no tensor cores: such kernels spill, and take minutes to compile.
    """
    return device.type != "cuda" or bool(torch.version.hip) or torch.cuda.get_device_properties(device).major >= 8


def drops(states: Tensor) -> bool:
    """Whether :func:`dropout` supports a tensor in the present mode of torch."""
    is_plain = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None
    return runs_on(states.device) and is_plain and states.dtype in DROPPED


def ranks(output_gradient: Tensor, value: Tensor) -> bool:
    """Whether :func:`region` supports these tensors in the present mode of torch."""
    size, device = torch.promote_types(output_gradient.dtype, value.dtype).itemsize, output_gradient.device
    if not (drops(output_gradient) and multiplies(device) and value.dtype in DROPPED):
        return False
    is_nvidia = device.type == "cuda" and not torch.version.hip  # MOST_RANKED is less for AMD already
    is_small = is_nvidia and torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor < ROOM
    return value.shape[-2] * size <= (MOST_RANKED // 2 if is_small else MOST_RANKED)


def __getattr__(name: str) -> Any:
    """Import a function that needs Triton at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.device.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
