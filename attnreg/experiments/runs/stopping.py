"""Stop a run and continue it later: signals, and checkpoints with everything that the remaining steps depend on."""

from __future__ import annotations

import io
import pickle
import random
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from attnreg._files import check_checksums, recover_folder, replaced_folder, write_checksums
from attnreg.errors import InputError, one_line

STATE = "state.pt"


def rng_state() -> dict[str, Any]:
    """Return the states of the random number generators of Python, NumPy and torch."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states returned by :func:`rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    for device, of_gpu in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):  # now maybe fewer
        torch.cuda.set_rng_state(of_gpu, device)


def write_state(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write nested dicts and lists of tensors and plain values to ``folder/step-N``, then remove older checkpoints."""
    path, content = folder / f"step-{step:07d}", io.BytesIO()  # torch's files do not say that a disk is full
    torch.save(state, content)
    content.seek(0)
    if refused := get_unsafe_globals_in_checkpoint(content):
        raise TypeError(f"A state of tensors and plain values cannot hold {', '.join(refused)}.")
    with replaced_folder(path) as new_folder:
        (new_folder / STATE).write_bytes(content.getbuffer())
        write_checksums(new_folder)
    for old in folder.iterdir():  # including unfinished folders of a killed process
        if old != path:
            shutil.rmtree(old)


def recover_states(folder: Path) -> None:
    """Restore a checkpoint whose writer died while replacing it with one of the same step."""
    for old in folder.glob(".step-*.old"):
        recover_folder(folder / old.name[1 : -len(".old")])


def read_state(folder: Path) -> dict[str, Any]:
    """Read the newest checkpoint onto the CPU."""
    if not (paths := sorted(folder.glob("step-*"))):
        raise InputError(f"No checkpoint in {folder}, although the run has evaluations: start it in a new folder.")
    try:
        check_checksums(paths[-1])
        return dict(torch.load(paths[-1] / STATE, map_location="cpu", weights_only=True))  # it cannot run code
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"The checkpoint {paths[-1]} is damaged (start in a new folder): {one_line(error)}") from error


@contextmanager
def interruptible() -> Iterator[list[signal.Signals]]:
    """Collect the first SIGINT and the first SIGTERM within the block; a second signal acts as usual.

    A signal that is ignored stays ignored. Outside the main thread, where Python handles no signals, nothing changes.
    """
    signals: list[signal.Signals] = []
    handlers: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(number))
        signal.signal(number, handlers[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # None means that the handler was not installed from Python, so it could not be restored.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                handlers[number] = signal.signal(number, note)
    try:
        yield signals
    finally:
        for handled, handler in handlers.items():
            signal.signal(handled, handler)
