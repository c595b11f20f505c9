"""AD-DROP: drop attention positions that the prediction relies on, every other epoch."""

from typing import Any

import click

import attnreg
from attnreg.experiments import Numbers, argument, option, preset, recipe

# As the scripts of the official code, which stop by the dev score and report the best one.
PAPER = {
    "batch_size": 16,
    "epochs": 50,
    "learning_rate": 1e-5,
    "schedule": "constant",
    "patience": 5,
    "stop_on": "dev",
    "method": lambda task: "integrated_gradients" if task == "mrpc" else "gradient",
    "first_pass": "train",
}


@recipe(
    "ad-drop",
    preset("--regime", {"paper": PAPER}, help='Other defaults: "paper" trains as the official code does, for up to 50 '
           "epochs, and stops on dev."),
    *(argument("attnreg:AttributionProvider", name) for name in ("p", "q", "method", "region")),
    option("--layers", type=Numbers(click.INT, "layer indices such as 0,1,-1", word="all"),
           help="Layers to mask: 'all' or indices such as 0,1,-1 (default: the task's)."),
    argument("attnreg:AttributionProvider", "target"),
    argument("attnreg:AttributionProvider", "steps"),
    argument("attnreg:AttributionProvider", "first_pass"),
    argument("attnreg:AttributionProvider", "first_pass_dtype"),
    argument("attnreg:CrossTuning", "every"),
    argument("attnreg:CrossTuning", "offset"),
)  # fmt: skip
def ad_drop(
    run: "attnreg.experiments.Run", layers: str | list[int] | None, every: int, offset: int, **options: Any
) -> None:
    """AD-DROP: drop attention positions that the prediction relies on, every other epoch.

    Example: attnreg recipe ad-drop --task cola --p 0.3 --q 0.1
    """
    chosen = run.task.ad_drop_layers if layers is None else layers
    attribution = attnreg.AttributionProvider(layers=None if isinstance(chosen, str) else chosen, **options)
    run.report(run.train(provider=attnreg.CrossTuning(attribution, every, offset)))
