"""Checkpoints: one JSON file and one safetensors file, nothing that can run code."""

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

from attnreg._checksums import check_checksums, write_checksums
from attnreg._files import recover_folder, replaced_folder
from attnreg.errors import InputError

STATE, TENSORS = "state.json", "tensors.safetensors"


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write ``folder/step-N`` whole or not at all, then remove older ones.

    Args:
        folder: of all checkpoints of a run.
        step: N, the number of optimizer steps done.
        state: nested dicts and lists of tensors, numbers, strings and ``None``.
    """
    tensors: dict[str, Tensor] = {}
    plain = _split(state, tensors)
    path = folder / f"step-{step:07d}"
    with replaced_folder(path) as new:
        save_file(tensors, new / TENSORS)
        (new / STATE).write_text(json.dumps(plain), encoding="utf-8")
        write_checksums(new)
    for other in folder.iterdir():  # what a killed process had begun, too
        if other != path:
            shutil.rmtree(other)


def recover_checkpoints(folder: Path) -> None:
    """Put back a checkpoint whose writer died while it was being replaced by one of the same step."""
    for old in folder.glob(".step-*.old"):
        recover_folder(folder / old.name[1 : -len(".old")])


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The newest checkpoint's state, on the CPU.

    Raises:
        InputError: if there is none, or it is damaged.
    """
    paths = sorted(folder.glob("step-*"))
    if not paths:
        raise InputError(
            f"Expected a checkpoint in {folder}, found none, though the run has evaluations: start it in a new folder."
        )
    try:
        check_checksums(paths[-1])
        tensors = load_file(paths[-1] / TENSORS)
        return _join(json.loads((paths[-1] / STATE).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise InputError(
            f"Expected a whole checkpoint in {paths[-1]}, got a damaged one: {' '.join(str(error).split())}"
        ) from error


def rng_state() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's random number generators."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`rng_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _split(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain data in which each tensor is replaced by its number, each dict by its items (keys may be integers)."""
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
