"""Attention dropout: independent units, at a constant rate."""

from typing import Literal

import attnreg
from attnreg.experiments import argument, recipe


@recipe(
    "attention-dropout",
    argument("attnreg:AttentionDropout", "p", "--drop-rate"),
    # Models drop attention weights already, so the recipe's own default is the other place.
    argument("attnreg:AttentionDropout", "placement", default="scores"),
)
def attention_dropout(run: "attnreg.experiments.Run", p: float, placement: Literal["weights", "scores"]) -> None:
    """Attention dropout: independent units, at a constant rate.

    Example: attnreg recipe attention-dropout --task cola --drop-rate 0.1
    """
    run.report(run.train(provider=attnreg.AttentionDropout(p, placement)))
