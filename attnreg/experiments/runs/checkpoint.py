"""A checkpoint: everything that the rest of a run depends on."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnreg._files import check_checksums, recover_folder, replaced_folder, write_checksums
from attnreg.errors import InputError
from attnreg.experiments.folder.history import History
from attnreg.experiments.runs.telemetry import Telemetry
from attnreg.experiments.setup.stopping import Selection
from attnreg.training.method import TrainingMethod


def checkpoint(
    method: TrainingMethod, history: History, selection: Selection, telemetry: Telemetry, accelerator: Accelerator
) -> Mapping[str, Any]:
    """Collect the state of a run between two steps; for each process, its rows, telemetry and random state.

    All processes must call this at the same time.
    """
    return {
        "method": method.state_dict(),
        "history": vars(history),
        "best": selection.weights,  # with `--select best`
        "rows": gather_object([[history.forward_rows, history.backward_rows]]),
        "telemetry": gather_object([telemetry.state_dict()]),
        "rng": gather_object([rng_state()]),
        "scaler": {} if accelerator.scaler is None else accelerator.scaler.state_dict(),
    }


def restore(
    folder: Path, method: TrainingMethod, selection: Selection, telemetry: Telemetry, accelerator: Accelerator
) -> History:
    """Load the newest checkpoint of a folder into the method, the selection and the telemetry; return the history."""
    state = read_state(folder)
    try:
        if len(state["rng"]) != accelerator.num_processes:
            raise InputError(
                f"The checkpoint in {folder} was written by {len(state['rng'])} processes and cannot be resumed by "
                f"{accelerator.num_processes}. Start the same number of processes."
            )
        method.load_state_dict(state["method"])
        history = History(**state["history"])
        selection.weights = state.get("best", {})  # older checkpoints have none
        rank = accelerator.process_index
        history.forward_rows, history.backward_rows = state["rows"][rank]
        telemetry.load_state_dict(state["telemetry"][rank])
        set_rng_state(state["rng"][rank])
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(state["scaler"])
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise InputError(f"The checkpoint in {folder} does not fit this run: {' '.join(str(error).split())}") from error
    return history


def rng_state() -> dict[str, Any]:
    """Return the states of the random number generators of Python, NumPy and torch."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states returned by :func:`rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


STATE, TENSORS = "state.json", "tensors.safetensors"


def write_state(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write ``folder/step-N`` atomically, then remove older checkpoints.

    The state is of nested dicts and lists of tensors, numbers, strings and ``None``.
    """
    tensors: dict[str, Tensor] = {}
    plain = _split(state, tensors)
    path = folder / f"step-{step:07d}"
    with replaced_folder(path) as new:
        save_file(tensors, new / TENSORS)
        (new / STATE).write_text(json.dumps(plain), encoding="utf-8")
        write_checksums(new)
    for other in folder.iterdir():  # including what a killed process left unfinished
        if other != path:
            shutil.rmtree(other)


def recover_states(folder: Path) -> None:
    """Restore a checkpoint whose writer died while replacing it with one of the same step."""
    for old in folder.glob(".step-*.old"):
        recover_folder(folder / old.name[1 : -len(".old")])


def read_state(folder: Path) -> dict[str, Any]:
    """Read the newest checkpoint onto the CPU."""
    paths = sorted(folder.glob("step-*"))
    if not paths:
        raise InputError(
            f"No checkpoint in {folder}, although the run has evaluations. Start it again in a new folder."
        )
    try:
        check_checksums(paths[-1])
        tensors = load_file(paths[-1] / TENSORS)
        return _join(json.loads((paths[-1] / STATE).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise InputError(f"The checkpoint {paths[-1]} is damaged: {' '.join(str(error).split())}") from error


def _split(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Replace each tensor by its number in ``tensors``, and each dict by its items, so that keys may be integers."""
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value.detach().cpu().contiguous().clone()
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, Mapping):
        return {"items": [[key, _split(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_split(item, tensors) for item in value]
    return value


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict) and "tensor" in value:
        return tensors[value["tensor"]]
    if isinstance(value, dict):
        return {key: _join(item, tensors) for key, item in value["items"]}
    return [_join(item, tensors) for item in value] if isinstance(value, list) else value
