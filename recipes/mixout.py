import click

import attnreg
from attnreg.experiments import argument, recipe


@recipe("mixout", argument("attnreg.training:Mixout", "p"))
def mixout(run: "attnreg.experiments.Run", p: float) -> None:
    """Mixout: each forward pass replaces random weights by their pretrained values.

    Example: attnreg recipe mixout --task cola --p 0.8
    """
    if run.settings.lora_rank is not None:
        raise click.UsageError(
            "Mixout mixes weights with their pretrained values, which LoRA does not train: remove --lora-rank."
        )
    run.report(run.train(attnreg.training.Mixout, p=p))
