"""Write ``result.json``, ``predictions.jsonl`` and the model card at the end of training."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

import attnreg
from attnreg.experiments.folder.history import History, best_of, collapsed
from attnreg.experiments.results.evaluation import evaluate, evaluate_all, predict
from attnreg.experiments.setup.device import cpu_name, device_name
from attnreg.experiments.setup.setup import Setup
from attnreg.experiments.tasks.kinds.kind import REFERENCE
from attnreg.experiments.tasks.models.lora import is_adapted, summary
from attnreg.regularizer.base import Regularizer
from attnreg.regularizer.expressions import expression_of
from attnreg.training.method import TrainingMethod

_OF_HISTORY = (
    *("trivial", "drop_rates", "active_steps", "events"),
    *("seconds", "training_seconds", "training_cpu_seconds"),
)


def conclude(method: TrainingMethod, run: Setup, history: History) -> None:
    """Evaluate the returned network at the end of training and write the results, and its model card.

    ``result.json`` is written last: a run folder that has it has finished training.
    """
    kind = run.kind
    some = run.train_rows.select(range(kind.divided(run.train_rows, min(kind.scored_train_rows, len(run.train_rows)))))
    dev = predict(method.model, run.dev, kind, run.accelerator)
    further = evaluate_all(method.model, run.further, kind, run.accelerator)
    history.collapsed = collapsed(dev.records)
    history.trivial = _trivial_scores(run, some)
    settings, selection, records = run.settings, run.selection(), history.of(method.returned_name)
    returned = selection.returned(records)["epoch"]
    forward, backward = run.total(history.forward_rows, history.backward_rows)
    result: dict[str, Any] = {
        "metric": run.task.metric,
        "scored_on": run.scored_on,
        "dev": {
            "loss": dev.loss,
            **kind.score(dev.records),
            **further,
            "calibration_error": kind.calibration_error(dev.records),
        },
        "train": evaluate(method.model, run.labelled(some), kind, run.accelerator),
        "train_rows_scored": len(some),
        "classes": list(run.task.labels),
        **{name: getattr(history, name) for name in _OF_HISTORY},
        "acted": None if method.provider is None else history.active_steps > 0,
        "warnings": run.warnings,
        "best_epoch": best_of(records, run.task.metric),
        "rows": len(run.train_rows),
        "parameters": run.parameters,
        "steps": history.step,
        "peak_memory_bytes": history.peak_memory,
        "forward_rows": forward,
        "backward_rows": backward,
        "held_out": run.held_out,
        "returned": {"select": "best" if selection.returns_best else "last", "epoch": returned},
        "stopping": None
        if settings.stop_on is None
        else {
            "rows": None if run.stopping is None else len(run.stopping.references),  # `None` for dev
            "score": best_of(records, selection.key)[selection.key],
            "last_epoch": records[-1]["epoch"],
            "returned_epoch": returned,
        },
        "environment": {
            "device": device_name(run.accelerator.device),
            "cpu": cpu_name(),
            "kernels": torch.backends.cpu.get_cpu_capability(),
            "processes": run.accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "attnreg": attnreg.__version__,  # a checkout that is not installed has no metadata
            **{name: version(name) for name in ("torch", "transformers")},
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
    if (trivial := run.kind.trivial(run.train_rows[REFERENCE][:])) is None:
        return None
    name, answer = trivial
    scores = {
        split: run.kind.score([{"label": label, "prediction": answer} for label in rows[REFERENCE][:]])
        for split, rows in (("dev", run.dev_rows), ("train", scored_train))
    }
    return {"predictor": name, **scores}


def model_card(run: Setup, provider: Regularizer | None, result: Mapping[str, Any]) -> str:
    """Return the model card of a finished run, in the format of the Hugging Face Hub. It names no licence."""
    settings, task = run.settings, run.task
    base = settings.model or task.model
    on_hub = base if base is not None and not Path(base).exists() else None
    data = task.hub[0] if task.hub is not None and settings.data_dir is None else None
    scores = {name: value for name, value in result["dev"].items() if isinstance(value, (int, float))}
    metadata = ModelCardData(
        base_model=on_hub,
        datasets=data,
        library_name="peft" if is_adapted(run.model) else "transformers",
        metrics=list(task.metrics),
        tags=["attnreg", settings.recipe],
    )
    returned = result["returned"]
    held = "" if result["held_out"] is None else f" (with {result['held_out']['rows']} more as rewards)"
    facts = {
        "Base model": base or f"a tiny {run.model.config.model_type.upper()} with random weights",
        "Task": f"{task.name} ({task.kind}): {task.summary.rstrip('.')}",
        "Data": f"{settings.data_dir or data or 'built in'}, {result['rows']} training rows{held}",
        "Regularizer": "none" if provider is None else f"`{expression_of(provider)}`",
        **({"Adapter": f"of the base model, by peft. {summary(run.model)}"} if is_adapted(run.model) else {}),
        "Network": f"of epoch {returned['epoch']} of {settings.epochs} (`--select {returned['select']}`)",
        "Version": ", ".join(f"{name} {result['environment'][name]}" for name in ("attnreg", "torch", "transformers")),
    }
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    table = "\n".join(f"| {name} | {value:.4f} |" for name, value in scores.items())
    return f"""---
{metadata.to_yaml()}
---

# {settings.recipe} on {task.name}

{lines}

Scores on {run.scored_on} rows:

| score | value |
| --- | ---: |
{table}

To repeat the training:

```
{settings.command()}
```

Before you share this model, add its licence to the first lines of this file.
"""
