"""The piecewise linear schedule that follows the drop rates of a finished run (AttendOut, Section 7.2).

Usage: python schedule.py RUN [PIECES]
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import make_lsq_spline

from attnreg.errors import InputError
from attnreg.experiments.folder.run_folder import RunReader


def fit_schedule(run: RunReader, pieces: int) -> str:
    """Fit the drop rate of each layer by least squares; return a `BernoulliScheduleProvider` for `--provider`.

    The pieces of a line are equally long, from the first to the last step with masks.
    """
    last = run.metrics[-1]
    total = round(last["step"] * run.config["epochs"] / last["epoch"])  # steps that were planned: a run may stop early
    points: dict[int, list[tuple[int, int, float]]] = {}  # of a layer: first and last step, mean rate
    for before, line in itertools.pairwise([{"step": 0}, *run.telemetry]):
        for site, rate in line["drop_rate"].items():
            if attention := re.fullmatch(r"\w+\.(\d+)", site):
                points.setdefault(int(attention[1]), []).append((before["step"] + 1, line["step"], rate))
    rates = [np.array(points.get(layer, [(1, total, 0.0)])) for layer in range(1 + max(points))]
    return f"BernoulliScheduleProvider([{', '.join(fitted(each, total, pieces) for each in rates)}])"


def fitted(points: NDArray[np.float64], total: int, pieces: int) -> str:
    """Return the knots of one layer."""
    begin, end, rates = points.T
    if not rates.any():
        return "[(0, 0)]"
    first, last = (begin[0] - 1) / total, end[-1] / total  # a step's rate is that of the progress before it
    middle = (begin + end - 2) / (2 * total)
    knots = np.linspace(first, last, pieces + 1)
    if len(rates) <= pieces:
        raise InputError(
            f"{pieces} pieces take more than {len(rates)} logged drop rates of a layer: give fewer pieces."
        )
    line = make_lsq_spline(middle, rates, np.array([first, *knots, last]), k=1, w=np.sqrt(end - begin + 1))
    return f"[{', '.join(f'({x:.4g}, {p:.3f})' for x, p in zip(knots, np.clip(line.c, 0, 1), strict=True))}]"


if __name__ == "__main__":
    print(fit_schedule(RunReader(Path(sys.argv[1])), int((*sys.argv[2:], 2)[0])))
