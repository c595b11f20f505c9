"""The device of a run: its choice, threads, name and peak memory."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch

from attnreg.errors import InputError

SMALL = 5_000_000  # parameters


def choose_device(name: str | None = None) -> torch.device:
    """Return the device of this name; without one, the accelerator if there is one, else the CPU."""
    # Without the check, the answer is the device that torch was built for: CUDA even without a GPU or driver.
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in (None, "cpu", best.type):
        raise InputError(f"No {name} device found. Use --device cpu, or leave --device out.")
    return best if name is None else torch.device(name)


def set_threads(threads: int | None, parameters: int) -> int:
    """Set and return the number of CPU threads: by default, one for a small model.

    A second thread does not make a step of a small model faster, and threads that wait for others make it several
    times slower while the machine is busy. ``OMP_NUM_THREADS`` replaces this default.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    elif parameters <= SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.get_num_threads()


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, and the type of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_name() -> str:
    """Return the CPU's product name, or its architecture where the system does not tell the name."""
    file = Path("/proc/cpuinfo")  # Linux; `platform.processor` is empty there
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def peak_memory() -> int | None:
    """Return the peak memory in bytes, of tensors on a GPU or of the whole process; ``None`` on Windows."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    if Path("/proc").is_dir() or sys.platform == "darwin":
        import resource  # missing on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return None
