"""Attention dropout, the vanilla baselines: attention scores or weights dropped independently, at one rate."""

from typing import Literal

import click

import attnreg
from attnreg.training import recipe


@recipe(
    "attention-dropout",
    click.option("--drop-rate", "p", type=click.FloatRange(0, 1), default=0.1, show_default=True),
    click.option("--placement", type=click.Choice(["scores", "weights"]), default="scores", show_default=True),
)
def attention_dropout(run: "attnreg.training.Run", p: float, placement: Literal["scores", "weights"]) -> None:
    """Attention dropout, the vanilla baselines: attention scores or weights dropped independently, at one rate.

    Example: attnreg recipe attention-dropout --task cola --drop-rate 0.1
    """
    optimizer = run.optimizer(run.model)
    method = attnreg.training.FineTuning(
        run.model,
        optimizer,
        attnreg.AttentionDropout(p, placement=placement),
        scheduler=run.schedule(optimizer),
        accelerator=run.accelerator,
    )
    history = attnreg.training.fit(method, run)
    attnreg.training.report(run, history)
