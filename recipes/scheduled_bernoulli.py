"""Scheduled Bernoulli: attention scores dropped independently, at a rate that changes linearly over training."""

import click

import attnreg
from attnreg.training import recipe


@recipe(
    "scheduled-bernoulli",
    click.option("--start", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Rate at the start."),
    click.option("--end", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Rate at the end."),
)
def scheduled_bernoulli(run: "attnreg.training.Run", start: float, end: float) -> None:
    """Scheduled Bernoulli: attention scores dropped independently, at a rate that changes linearly over training.

    Example: attnreg recipe scheduled-bernoulli --task cola --start 0.0 --end 0.2
    """
    provider = attnreg.BernoulliScheduleProvider([(0, start), (1, end)], total_steps=run.total_steps)
    optimizer = run.optimizer(run.model)
    method = attnreg.training.FineTuning(
        run.model, optimizer, provider, scheduler=run.schedule(optimizer), accelerator=run.accelerator
    )
    history = attnreg.training.fit(method, run)
    attnreg.training.report(run, history)
