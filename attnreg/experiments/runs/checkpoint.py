"""The file format of a checkpoint, which holds everything that the rest of a run depends on."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnreg._files import check_checksums, recover_folder, replaced_folder, write_checksums
from attnreg.errors import InputError, one_line


def rng_state() -> dict[str, Any]:
    """Return the states of the random number generators of Python, NumPy and torch."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
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
    """Write nested dicts and lists of tensors and plain values to ``folder/step-N``, then remove older checkpoints."""
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
    if not (paths := sorted(folder.glob("step-*"))):
        raise InputError(
            f"No checkpoint in {folder}, although the run has evaluations. Start it again in a new folder."
        )
    try:
        check_checksums(paths[-1])
        tensors = load_file(paths[-1] / TENSORS)
        return _join(json.loads((paths[-1] / STATE).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise InputError(f"The checkpoint {paths[-1]} is damaged: {one_line(error)}") from error


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
