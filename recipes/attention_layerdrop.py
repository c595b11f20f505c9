import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "attention-layerdrop",
    option("--drop-rate", "p", type=click.FloatRange(0, 1), default=0.05,
           help="Probability of dropping a layer's attention scores."),
)  # fmt: skip
def attention_layerdrop(run: "attnreg.experiments.Run", p: float) -> None:
    """Attention LayerDrop: random layers attend to all positions equally.

    Example: attnreg recipe attention-layerdrop --task cola --drop-rate 0.1
    """
    run.report(run.train(provider=attnreg.AttentionLayerDrop(p)))
