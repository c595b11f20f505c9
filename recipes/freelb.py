from typing import Any

import attnreg
from attnreg.experiments import argument, recipe


@recipe(
    "freelb", *(argument("attnreg.training:FreeLBLoss", name) for name in ("steps", "step_size", "radius", "start"))
)
def freelb(run: "attnreg.experiments.Run", **options: Any) -> None:
    """FreeLB: adversarial training on token embeddings; with two steps from 0, FGM.

    Example: attnreg recipe freelb --task cola --steps 2 --start 0 --step-size 0.2 --radius 0.2
    """
    run.report(run.train(objective=attnreg.training.FreeLBLoss(**options)))
