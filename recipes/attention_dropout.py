from typing import Literal

import attnreg
from attnreg.experiments import argument, recipe


@recipe(
    "attention-dropout",
    argument("attnreg:AttentionDropout", "p", "--drop-rate"),
    # Most models already drop attention weights, so this recipe drops scores by default.
    argument("attnreg:AttentionDropout", "placement", default="scores"),
)
def attention_dropout(run: "attnreg.experiments.Run", p: float, placement: Literal["weights", "scores"]) -> None:
    """Attention dropout: drop single attention weights or scores at a constant rate.

    Example: attnreg recipe attention-dropout --task cola --drop-rate 0.1
    """
    run.report(run.train(provider=attnreg.AttentionDropout(p, placement)))
