from typing import Any

import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "r3f",
    option("--weight", type=click.FloatRange(min=0), default=1.0,
           help="Weight of the difference between the two predictions (lambda in the paper)."),
    option("--eps", type=click.FloatRange(min=0), default=1e-5,
           help="Size of the noise: bound of uniform, standard deviation of normal noise."),
    option("--noise", type=click.Choice(["uniform", "normal"]), default="uniform", help="Distribution of the noise."),
)  # fmt: skip
def r3f(run: "attnreg.experiments.Run", **options: Any) -> None:
    """R3F: predictions must agree with those on embeddings with noise.

    Example: attnreg recipe r3f --task cola --weight 0.5 --eps 0.01
    """
    run.report(run.train(objective=attnreg.training.R3FLoss(**options)))
