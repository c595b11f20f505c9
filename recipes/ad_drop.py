from typing import Any

import click

import attnreg
from attnreg.errors import UsageError
from attnreg.experiments import Numbers, option, preset, recipe

# Options of the official code's scripts, per task. Scripts of GLUE stop by the dev score and report the best one;
# scripts of other tasks use the Trainer of transformers, with another schedule and clipping.
_GLUE = {"epochs": 50, "batch_size": 16, "learning_rate": 1e-5, "schedule": "constant", "max_grad_norm": 0.0,
         "patience": 5, "stop_on": "dev"}  # fmt: skip
_LARGE = {**_GLUE, "epochs": 10, "patience": 3}
_TRANSLATION = {"epochs": 5, "batch_size": 16, "learning_rate": 2e-5, "lr_warmup": 0.0, "max_length": 128}
SCRIPTS: dict[str, dict[str, Any]] = {
    "cola": {**_GLUE, "max_length": 47},
    "rte": {**_GLUE, "max_length": 128},
    "mrpc": {**_GLUE, "max_length": 100, "method": "integrated_gradients"},
    "stsb": {**_GLUE, "max_length": 100},
    "sst2": {**_GLUE, "max_length": 120, "epochs": 20},
    "qqp": {**_LARGE, "max_length": 120},
    "mnli": {**_LARGE, "max_length": 128},
    "qnli": {**_LARGE, "max_length": 128},
    "conll2003": {"epochs": 9, "batch_size": 32, "learning_rate": 2e-5, "lr_warmup": 0.0, "p": 0.8, "q": 0.1},
    "wmt16-en-ro": {**_TRANSLATION, "p": 0.2, "q": 0.2},
    "wmt16-tr-en": {**_TRANSLATION, "p": 0.6, "q": 0.1},
}


def of_script(task: str) -> dict[str, Any]:
    """Return the options that the official script of a task sets; for other tasks, the options of small GLUE tasks."""
    return {"first_pass": "train", **SCRIPTS.get(task, _GLUE)}


def check_acts(settings: Any) -> None:
    """Refuse a run that ends before AD-DROP's first epoch."""
    epochs, first = settings.epochs, settings.own["offset"] + 1
    if first > epochs and settings.own["offset"] < settings.own["every"]:
        raise UsageError(
            f"With --epochs {epochs}, AD-DROP would never act: it first acts in epoch {first}. Use --epochs {first} or "
            "more, or let it act in every epoch with --every 1 --offset 0."
        )


@recipe(
    "ad-drop",
    preset("--regime", {"paper": of_script}, help='Other defaults: "paper" trains as the official script of the task '
           "does; on GLUE for up to 50 epochs, and stops on dev."),
    option("--p", type=click.FloatRange(0, 1), default=0.3, help="Share of a query's valid keys that are candidates."),
    option("--q", type=click.FloatRange(0, 1), default=0.1, help="Probability of dropping a candidate."),
    option("--method", type=click.Choice(["gradient", "integrated_gradients", "attention", "random"]),
           default="gradient", help="Attribution method: gradient (GA), integrated_gradients (IGA), attention (AA, the "
           "weights) or random (RD, no first pass)."),
    option("--region", type=click.Choice(["high", "low"]), default="high",
           help="Candidate keys: those of the highest or the lowest attribution."),
    option("--layers", type=Numbers(click.INT, "layer indices such as 0,1,-1", word="all"),
           help="Layers to mask: 'all' or indices such as 0,1,-1 (default: the task's)."),
    option("--target", type=click.Choice(["predicted", "label"]), default="predicted",
           help="Score to explain: of the predicted class, or of the gold class."),
    option("--steps", type=click.IntRange(min=1), default=20,
           help="Steps of integrated gradients; only for that method."),
    option("--first-pass", type=click.Choice(["eval", "train"]), default="eval",
           help="Mode of the first pass: eval (no dropout) or train (dropout, as in the official code)."),
    option("--first-pass-dtype", type=click.Choice(["bfloat16", "float16"]), default=None,
           help="Autocast of the first pass (default: as the training step)."),
    option("--every", type=click.IntRange(min=1), default=2,
           help="Use AD-DROP every N epochs; the other epochs are plain fine-tuning."),
    option("--offset", type=click.IntRange(min=0), default=1, help="Which of these N epochs, counted from 0."),
    check=check_acts,
)  # fmt: skip
def ad_drop(run: "attnreg.experiments.Run", layers: str | list[int] | None, **options: Any) -> None:
    """AD-DROP: drop attention positions that the prediction relies on, every other epoch.

    Example: attnreg recipe ad-drop --task cola --p 0.3 --q 0.1
    """
    chosen = run.task.ad_drop_layers if layers is None else layers
    run.report(run.train(provider=attnreg.ADDrop(layers=None if isinstance(chosen, str) else chosen, **options)))
