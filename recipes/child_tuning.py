from typing import Any

import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "child-tuning",
    option("--mode", type=click.Choice(["F", "D"]), default="F",
           help="F (a random child in every step) or D (the child of the highest Fisher information)."),
    option("--p", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.3,
           help="Share of weights that are updated (p_F or p_D in the paper)."),
)  # fmt: skip
def child_tuning(run: "attnreg.experiments.Run", mode: Any, p: float) -> None:
    """Child-Tuning: update only a part of the weights, random or chosen by Fisher information.

    Example: attnreg recipe child-tuning --task cola --mode D --p 0.3
    """
    data = run.rows_in_order(run.train_rows) if mode == "D" else None
    run.report(run.train(attnreg.training.ChildTuning, mode=mode, p=p, data=data))
