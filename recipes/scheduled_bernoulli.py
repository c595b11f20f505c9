"""Scheduled Bernoulli: drop attention scores at a rate that changes over training."""

import click

import attnreg
from attnreg.experiments import option, recipe


@recipe(
    "scheduled-bernoulli",
    option("--start", type=click.FloatRange(0, 1), default=0.1, help="Drop probability at the start of training."),
    option("--end", type=click.FloatRange(0, 1), default=0.0, help="Drop probability at the end of training."),
)
def scheduled_bernoulli(run: "attnreg.experiments.Run", start: float, end: float) -> None:
    """Scheduled Bernoulli: drop attention scores at a rate that changes over training.

    Example: attnreg recipe scheduled-bernoulli --task cola --start 0.0 --end 0.2
    """
    provider = attnreg.BernoulliScheduleProvider([(0, start), (1, end)], total_steps=run.total_steps)
    run.report(run.train(provider=provider))
