"""Mixout: a random part of the weights is the pretrained one again in each step."""

import click

import attnreg
from attnreg.training import recipe


@recipe("mixout", click.option("--p", type=click.FloatRange(0, 1, max_open=True), default=0.7, show_default=True))
def mixout(run: "attnreg.training.Run", p: float) -> None:
    """Mixout: a random part of the weights is the pretrained one again in each step.

    Example: attnreg recipe mixout --task cola --p 0.8
    """
    optimizer = run.optimizer(run.model)
    method = attnreg.training.Mixout(
        run.model, optimizer, p=p, scheduler=run.schedule(optimizer), accelerator=run.accelerator
    )
    history = attnreg.training.fit(method, run)
    attnreg.training.report(run, history)
