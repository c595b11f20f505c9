"""What a finished run leaves for comparisons: ``result.json`` and ``predictions.jsonl``."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from attnreg.experiments.runs.evaluation import evaluate, evaluate_all, predict
from attnreg.experiments.runs.history import History
from attnreg.experiments.runs.setup import Setup
from attnreg.training.method import TrainingMethod


def conclude(method: TrainingMethod, run: Setup, history: History) -> None:
    """Write down how the network that the method returns came out after the last epoch.

    ``predictions.jsonl`` has label and prediction (and, for classes, the logits) of each dev row, in order.
    ``result.json`` has the scores on dev and on (at most the first thousand of) the training rows, the calibration
    error, time, memory and passes. It is written when all else of the training is: a run that has it is trained.

    Args:
        method: the method, after its last step.
        run: the run.
        history: its history.
    """
    kind = run.kind
    some = run.train_rows.select(range(min(kind.scored_train_rows, len(run.train_rows))))
    dev = predict(method.model, run.dev, kind, run.accelerator)
    scores = {
        "loss": dev.loss,
        **kind.score(dev.records),
        **evaluate_all(method.model, run.further, kind, run.accelerator),
    }
    forward, backward = run.total(history.forward_rows, history.backward_rows)
    result: dict[str, Any] = {
        "metric": run.task.metric,
        "scored_on": run.scored_on,
        "dev": {**scores, "calibration_error": kind.calibration_error(dev.records)},
        "train": evaluate(method.model, run.labelled(some), kind, run.accelerator),
        "train_rows_scored": len(some),
        "best_epoch": history.best(run.task.metric, method.returned_name),
        "rows": len(run.train_rows),
        "steps": history.step,
        "seconds": history.seconds,
        "training_seconds": history.training_seconds,
        "peak_memory_bytes": history.peak_memory,
        "forward_rows": forward,
        "backward_rows": backward,
        "drop_rates": history.drop_rates,
        "active_steps": history.active_steps,
        "held_out": run.held_out,
        "environment": {
            "device": _device_name(run.accelerator.device),
            "processes": run.accelerator.num_processes,
            "threads": torch.get_num_threads(),
            **{name: version(name) for name in ("attnreg", "torch", "transformers")},
        },
    }
    run.folder.write_outcome(result, dev.records)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory() -> int | None:
    """Bytes: the most that the device has held for tensors, on a GPU; that the process has held at all, on a CPU.

    ``None`` where that is not known (Windows).
    """
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    if Path("/proc").is_dir() or sys.platform == "darwin":
        import resource  # not there on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return None
