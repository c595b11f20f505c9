"""Attention LayerDrop: whole layers lose their attention scores at random and attend uniformly."""

import click

import attnreg
from attnreg.training import recipe


@recipe(
    "attention-layerdrop",
    click.option("--drop-rate", "p", type=click.FloatRange(0, 1), default=0.05, show_default=True),
)
def attention_layerdrop(run: "attnreg.training.Run", p: float) -> None:
    """Attention LayerDrop: whole layers lose their attention scores at random and attend uniformly.

    Example: attnreg recipe attention-layerdrop --task cola --drop-rate 0.1
    """
    optimizer = run.optimizer(run.model)
    method = attnreg.training.FineTuning(
        run.model,
        optimizer,
        attnreg.AttentionLayerDrop(p),
        scheduler=run.schedule(optimizer),
        accelerator=run.accelerator,
    )
    history = attnreg.training.fit(method, run)
    attnreg.training.report(run, history)
