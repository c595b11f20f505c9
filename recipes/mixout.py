import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "mixout",
    option("--p", type=click.FloatRange(0, 1, max_open=True), default=0.7,
           help="Probability that an input neuron of a linear layer uses its pretrained weights."),
    excludes=[("lora_rank", "mixes weights with their pretrained values, which LoRA does not train")],
)  # fmt: skip
def mixout(run: "attnreg.experiments.Run", p: float) -> None:
    """Mixout: every forward pass replaces random weights by their pretrained values.

    Example: attnreg recipe mixout --task cola --p 0.8
    """
    run.report(run.train(attnreg.training.Mixout, p=p))
