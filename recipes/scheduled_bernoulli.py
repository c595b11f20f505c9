import click

import attnreg
from attnreg.experiments import Numbers, option, recipe


@recipe(
    "scheduled-bernoulli",
    option("--start", type=click.FloatRange(0, 1), default=0.1,
           help="Drop probability at the start of training (AttendOut's QNLI: 0.6)."),
    option("--end", type=click.FloatRange(0, 1), default=None,
           help="Drop probability at the end of training (default: 0)."),
    option("--slopes", type=Numbers(click.FloatRange(-1, 1), "slopes such as 0,-0.2,-0.5"), default=None,
           help="Instead of --end: change of the drop probability over training, one per layer, separated by "
                "commas; it stops at 0 and 1."),
    excludes=[("slopes", "end", "both say how the rate changes")],
)  # fmt: skip
def scheduled_bernoulli(
    run: "attnreg.experiments.Run", start: float, end: float | None, slopes: list[float] | None
) -> None:
    """Scheduled Bernoulli: drop attention scores at a rate that changes over training.

    Example: attnreg recipe scheduled-bernoulli --task cola --start 0.0 --end 0.2
    """
    line = [(0, start), (1, end or 0.0)]
    provider = attnreg.BernoulliScheduleProvider(
        line if slopes is None else [_line(start, change) for change in slopes], total_steps=run.total_steps
    )
    run.report(run.train(provider=provider))


def _line(start: float, change: float) -> list[tuple[float, float]]:
    """Return the knots of a line that stays constant once it reaches 0 or 1."""
    end = min(max(start + change, 0.0), 1.0)
    reached = 1.0 if start + change == end else (end - start) / change
    return [(0.0, start), (reached, end)] if reached else [(0.0, end)]
