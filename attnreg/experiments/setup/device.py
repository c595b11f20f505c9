"""The device of a run: which one is used, what it is called, and how much memory was needed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from attnreg.errors import InputError
from attnreg.experiments.options.settings import DEVICES


def choose_device(name: str | None = None) -> torch.device:
    """Return the device of this name; without one, the accelerator if there is one, else the CPU."""
    if name is not None and name not in DEVICES:
        *others, last = DEVICES
        hint = " To choose a GPU, set CUDA_VISIBLE_DEVICES." if name.startswith("cuda:") else ""
        raise InputError(f"Expected --device to be {', '.join(others)} or {last}, got {name!r}.{hint}")
    # `current_accelerator` names what torch was built for: CUDA also where no GPU or driver is.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    best = torch.device("cpu") if found is None else found
    if name in (None, best.type):
        return best
    if name != "cpu":
        raise InputError(f"No {name} device found. Use --device cpu, or leave --device out.")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, and the type of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory() -> int | None:
    """Return the peak memory in bytes, of tensors on a GPU or of the whole process; ``None`` on Windows."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    if Path("/proc").is_dir() or sys.platform == "darwin":
        import resource  # missing on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return None
