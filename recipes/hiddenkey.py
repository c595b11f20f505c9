import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "hiddenkey",
    option("--p", type=click.FloatRange(0, 1), default=0.1, help="Probability of dropping a key or a value."),
    option("--alpha", type=click.FloatRange(min=0), default=1.0,
           help="Weight of the difference between the two predictions."),
)  # fmt: skip
def hiddenkey(run: "attnreg.experiments.Run", p: float, alpha: float) -> None:
    """HiddenKey: dropout of keys and hidden states, and two passes that must agree.

    Example: attnreg recipe hiddenkey --task cola --p 0.1
    """
    run.report(run.train(provider=attnreg.HiddenKey(p), objective=attnreg.training.RDropLoss(alpha)))
