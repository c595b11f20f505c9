"""The model card of a finished run: what the network is, how it was trained, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from attnreg import __version__
from attnreg.experiments.setup.setup import Setup
from attnreg.experiments.tasks.models.lora import is_adapted, summary
from attnreg.regularizer.base import Regularizer
from attnreg.regularizer.expressions import expression_of

# The hub's names of tasks, by the head of the model.
_PIPELINES = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}


def model_card(run: Setup, provider: Regularizer | None, result: Mapping[str, Any]) -> str:
    """Return the model card of a finished run, in the format of the Hugging Face Hub. It names no licence."""
    settings, task = run.settings, run.task
    base = settings.model or task.model
    on_hub = base if base is not None and not Path(base).exists() else None
    data = task.hub[0] if task.hub is not None and settings.data_dir is None else None
    scores = {name: value for name, value in result["dev"].items() if isinstance(value, (int, float))}
    pipeline = _PIPELINES[run.kind.head]
    split = "validation" if run.scored_on == "dev" else f"{run.scored_on} rows of train"
    metadata = ModelCardData(
        base_model=on_hub,
        datasets=data,
        library_name="peft" if is_adapted(run.model) else "transformers",
        metrics=list(task.metrics),
        model_name=f"{settings.recipe}-{task.name}",
        pipeline_tag=pipeline,
        tags=["attnreg", settings.recipe],
        eval_results=[
            EvalResult(pipeline, data or task.name, task.name, name, value, dataset_split=split)
            for name, value in scores.items()
            if math.isfinite(value)
        ],
    )
    returned = result["returned"]
    held = "" if result["held_out"] is None else f" (with {result['held_out']['rows']} more as rewards)"
    facts = {
        "Base model": base or f"a tiny {run.model.config.model_type.upper()} with random weights",
        "Task": f"{task.name} ({task.kind}): {task.summary.rstrip('.')}",
        "Data": f"{settings.data_dir or data or 'built in'}, {result['rows']} training rows{held}",
        "Recipe": settings.recipe,
        "Options of the recipe": ", ".join(f"{run.settings.flag(k)} {v}" for k, v in settings.own.items()) or "none",
        "Regularizer": "none" if provider is None else f"`{expression_of(provider)}`",
        **({"Adapter": f"of the base model, by peft. {summary(run.model)}"} if is_adapted(run.model) else {}),
        "Seed": settings.seed,
        "Network": f"of epoch {returned['epoch']} of {settings.epochs} (`--select {returned['select']}`)",
        "Version": f"attnreg {__version__}, torch {result['environment']['torch']}, "
        f"transformers {result['environment']['transformers']}",
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
