"""Mixout: each forward pass replaces random weights by their pretrained values."""

import attnreg
from attnreg.experiments import argument, recipe


@recipe("mixout", argument("attnreg.training:Mixout", "p"))
def mixout(run: "attnreg.experiments.Run", p: float) -> None:
    """Mixout: each forward pass replaces random weights by their pretrained values.

    Example: attnreg recipe mixout --task cola --p 0.8
    """
    run.report(run.train(attnreg.training.Mixout, p=p))
