import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "r-drop",
    option("--alpha", type=click.FloatRange(min=0), default=1.0,
           help="Weight of the difference between the two predictions (alpha in the paper)."),
)  # fmt: skip
def r_drop(run: "attnreg.experiments.Run", alpha: float) -> None:
    """R-Drop: two forward passes under different dropout must agree.

    Example: attnreg recipe r-drop --task cola --alpha 0.5
    """
    run.report(run.train(objective=attnreg.training.RDropLoss(alpha)))
