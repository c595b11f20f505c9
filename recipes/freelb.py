from typing import Any

import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "freelb",
    option("--steps", type=click.IntRange(min=2), default=3, help="Number of forward passes (K in the paper)."),
    option("--step-size", type=click.FloatRange(min=0), default=0.1, help="Norm of a step of the noise (alpha)."),
    option("--radius", type=click.FloatRange(min=0), default=0.4, help="Largest norm of the noise (epsilon)."),
    option(
        "--start",
        type=click.FloatRange(min=0),
        default=0.1,
        help="Size of the first noise, at most about its norm; 0 begins at the plain embeddings.",
    ),
)
def freelb(run: "attnreg.experiments.Run", **options: Any) -> None:
    """FreeLB: adversarial training on token embeddings; with two steps from 0, FGM.

    Example: attnreg recipe freelb --task cola --steps 2 --start 0 --step-size 0.2 --radius 0.2
    """
    run.report(run.train(objective=attnreg.training.FreeLBLoss(**options)))
