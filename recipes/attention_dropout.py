from typing import Literal

import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "attention-dropout",
    option("--drop-rate", "p", type=click.FloatRange(0, 1), default=0.1, help="Drop probability."),
    # Most models already drop attention weights, so this recipe drops scores by default.
    option("--placement", type=click.Choice(["weights", "scores"]), default="scores",
           help="What to drop: weights (after the softmax, as most models do) or scores (before it)."),
)  # fmt: skip
def attention_dropout(run: "attnreg.experiments.Run", p: float, placement: Literal["weights", "scores"]) -> None:
    """Attention dropout: drop single attention weights or scores at a constant rate.

    Example: attnreg recipe attention-dropout --task cola --drop-rate 0.1
    """
    run.report(run.train(provider=attnreg.AttentionDropout(p, placement)))
