from typing import Any

import attnreg
from attnreg.experiments import argument, recipe


@recipe("child-tuning", *(argument("attnreg.training:ChildTuning", name) for name in ("mode", "p")))
def child_tuning(run: "attnreg.experiments.Run", mode: Any, p: float) -> None:
    """Child-Tuning: update only a part of the weights, random or chosen by Fisher information.

    Example: attnreg recipe child-tuning --task cola --mode D --p 0.3
    """
    data = run.rows_in_order(run.train_rows) if mode == "D" else None
    run.report(run.train(attnreg.training.ChildTuning, mode=mode, p=p, data=data))
