"""A schedule that follows the drop rates of a finished run."""

from __future__ import annotations

import itertools
import re

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import make_lsq_spline

from attnreg.errors import InputError
from attnreg.experiments.folder.reader import RunReader
from attnreg.regularizer.expressions import checked_expression


def fit_schedule(run: RunReader, pieces: int) -> str:
    """Fit a piecewise linear schedule to the drop rate of each layer over training, by least squares.

    The pieces of a line are equally long, from the first to the last step with masks. The result is an expression of a
    :class:`attnreg.BernoulliScheduleProvider` (AttendOut, arXiv 2104.04692, Section 7.2).
    """
    if not run.finished:
        raise InputError(f"The run in {run.folder} is not finished: continue it with --resume first.")
    last = run.metrics[-1]
    total = round(last["step"] * run.config["epochs"] / last["epoch"])  # steps that were planned: a run may stop early
    points: dict[tuple[str, int], list[tuple[int, int, float]]] = {}  # of a layer: first and last step, mean rate
    for before, line in itertools.pairwise([{"step": 0}, *run.telemetry]):
        for site, rate in line["drop_rate"].items():
            if attention := re.fullmatch(r"(\w+)\.(\d+)", site):
                place = attention[1], int(attention[2])
                points.setdefault(place, []).append((before["step"] + 1, line["step"], rate))
    stacks = sorted({stack for stack, _ in points})
    if len(stacks) != 1:
        found = " and ".join(stacks) or "no attention"
        raise InputError(f"A schedule is for the layers of one stack, but this run dropped {found}.")
    depth = 1 + max(layer for _, layer in points)
    rates = [np.array(points.get((stacks[0], layer), [(1, total, 0.0)])) for layer in range(depth)]
    lines = [_fitted(each, total, pieces) for each in rates]
    return checked_expression(f"BernoulliScheduleProvider([{', '.join(lines)}])")


def _fitted(points: NDArray[np.float64], total: int, pieces: int) -> str:
    """Return the knots of one layer."""
    begin, end, rates = points.T
    if not rates.any():
        return "[(0, 0)]"
    first, last = (begin[0] - 1) / total, end[-1] / total  # a step's rate is that of the progress before it
    middle = (begin + end - 2) / (2 * total)
    knots = np.linspace(first, last, pieces + 1)
    try:
        line = make_lsq_spline(middle, rates, np.array([first, *knots, last]), k=1, w=np.sqrt(end - begin + 1))
    except ValueError:
        raise InputError(
            f"Cannot fit a line of {pieces} pieces: telemetry.jsonl has too few drop rates ({len(points)}), or masks "
            "pause for longer than a piece. Use fewer pieces, or a longer run."
        ) from None
    values = np.clip(line.c, 0, 1)
    return f"[{', '.join(f'({x:.4g}, {p:.3f})' for x, p in zip(knots, values, strict=True))}]"
