"""Write ``result.json`` and ``predictions.jsonl`` at the end of training."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import attnreg
from attnreg.experiments.folder.history import History
from attnreg.experiments.results.card import model_card
from attnreg.experiments.results.evaluation import evaluate, evaluate_all, predict
from attnreg.experiments.results.report import collapsed
from attnreg.experiments.setup.device import cpu_name, device_name
from attnreg.experiments.setup.setup import Setup
from attnreg.experiments.tasks.kinds.kind import REFERENCE
from attnreg.training.method import TrainingMethod

_OF_HISTORY = (
    *("trivial", "mislabelled", "other_text", "drop_rates", "active_steps", "events"),
    *("seconds", "training_seconds", "training_cpu_seconds"),
)


def conclude(method: TrainingMethod, run: Setup, history: History) -> None:
    """Evaluate the returned network at the end of training and write the results, and its model card.

    ``predictions.jsonl`` has the label and the prediction (and the logits, for classes) of each dev row, in order.
    ``result.json`` has the scores on dev and on some training rows (as many as the kind's ``scored_train_rows``), the
    calibration error, the scores of a predictor that ignores its input, what became of rows with a wrong label, time,
    memory and passes. It is written last: a run folder that has it has finished training.
    """
    kind = run.kind
    some = run.train_rows.select(range(kind.divided(run.train_rows, min(kind.scored_train_rows, len(run.train_rows)))))
    dev = predict(method.model, run.dev, kind, run.accelerator)
    scores = {
        "loss": dev.loss,
        **kind.score(dev.records),
        **evaluate_all(method.model, run.further, kind, run.accelerator),
    }
    history.mislabelled = _mislabelled(method.model, run)
    if history.other_text is not None and run.other_text is not None:
        after = evaluate(method.model, *run.other_text, run.accelerator)
        history.other_text |= {"after": after, "forgetting": after["loss"] - history.other_text["before"]["loss"]}
    history.collapsed = collapsed(dev.records)
    history.trivial = _trivial_scores(run, some)
    records, selection = history.of(method.returned_name), run.selection()
    forward, backward = run.total(history.forward_rows, history.backward_rows)
    result: dict[str, Any] = {
        "metric": run.task.metric,
        "scored_on": run.scored_on,
        "dev": {**scores, "calibration_error": kind.calibration_error(dev.records)},
        "train": evaluate(method.model, run.labelled(some), kind, run.accelerator),
        "train_rows_scored": len(some),
        "classes": list(run.task.labels),
        **{name: getattr(history, name) for name in _OF_HISTORY},
        "best_epoch": history.best(run.task.metric, method.returned_name),
        "rows": len(run.train_rows),
        "parameters": run.parameters,
        "steps": history.step,
        "peak_memory_bytes": history.peak_memory,
        "forward_rows": forward,
        "backward_rows": backward,
        "held_out": run.held_out,
        "returned": {
            "select": "best" if run.settings.returns_best else "last",
            "epoch": selection.returned(records)["epoch"],
        },
        "stopping": _stopping(run, records),
        "environment": {
            "device": device_name(run.accelerator.device),
            "cpu": cpu_name(),
            "kernels": torch.backends.cpu.get_cpu_capability(),
            "processes": run.accelerator.num_processes,
            "threads": torch.get_num_threads(),
            **{name: version(name) for name in ("attnreg", "torch", "transformers")},
            **_commit(),
        },
    }
    run.folder.write_text("model/README.md", model_card(run, method.provider, result))
    run.folder.write_outcome(result, dev.records)


def _commit() -> dict[str, str]:
    """Return the commit of the package, and whether files differ from it, if it runs from a checkout."""
    root = Path(attnreg.__file__).parent.parent
    if not (root / ".git").exists():
        return {}
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):  # without git, say
        return {"commit": subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()}
    return {}


def _trivial_scores(run: Setup, scored_train: Any) -> dict[str, Any] | None:
    """Score the prediction that suits most training rows, made for every row; ``None`` if the kind has none."""
    trivial = run.kind.trivial(run.train_rows[REFERENCE][:])
    if trivial is None:
        return None
    name, answer = trivial
    scores = {
        split: run.kind.score([{"label": label, "prediction": answer} for label in rows[REFERENCE][:]])
        for split, rows in (("dev", run.dev_rows), ("train", scored_train))
    }
    return {"predictor": name, **scores}


def _mislabelled(network: nn.Module, run: Setup) -> dict[str, Any] | None:
    """Return how many of the training rows with a wrong label get this label, or the true one; ``None`` without any."""
    truth = {row: label for row, label in run.true_labels.items() if row < len(run.train_rows)}
    if not truth:
        return None
    records = predict(network, run.labelled(run.train_rows.select(list(truth))), run.kind, run.accelerator).records
    right = [record["prediction"] == label for record, label in zip(records, truth.values(), strict=True)]
    memorized = [record["prediction"] == record["label"] for record in records]
    return {"rows": len(truth), "memorized": fmean(memorized), "recovered": fmean(right)}


def _stopping(run: Setup, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return which rows decided, when the run stopped and which epoch is its best; ``None`` if no rows decided."""
    if run.settings.patience is None and not run.settings.returns_best:
        return None
    selection = run.selection()
    return {
        "rows": None if run.stopping is None else len(run.stopping.references),  # `None` for dev
        "score": selection.best(records)[selection.key],
        "last_epoch": records[-1]["epoch"],
        "returned_epoch": selection.returned(records)["epoch"],
    }
