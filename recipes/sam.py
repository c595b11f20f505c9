import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "sam",
    option("--rho", type=click.FloatRange(min=0), default=0.05,
           help="Size of the perturbation: its L2 norm over all parameters."),
)  # fmt: skip
def sam(run: "attnreg.experiments.Run", rho: float) -> None:
    """SAM: every step follows the gradient at the worst weights nearby.

    Example: attnreg recipe sam --task cola --rho 0.1
    """
    run.report(run.train(attnreg.training.SAM, rho=rho))
