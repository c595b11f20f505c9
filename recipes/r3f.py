from typing import Any

import attnreg
from attnreg.experiments import argument, recipe


@recipe("r3f", *(argument("attnreg.training:R3FLoss", name) for name in ("weight", "eps", "noise")))
def r3f(run: "attnreg.experiments.Run", **options: Any) -> None:
    """R3F: predictions must agree with those on embeddings with noise.

    Example: attnreg recipe r3f --task cola --weight 0.5 --eps 0.01
    """
    run.report(run.train(objective=attnreg.training.R3FLoss(**options)))
