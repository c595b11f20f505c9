"""Plot the score of every seed, with means and intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from attnreg.experiments.results.plots.style import folded, picture, styles

ANYTHING = (-math.inf, math.inf)


def plot_seeds(
    scores: Mapping[str, Sequence[float]],
    metric: str,
    path: Path,
    *,
    trivial: tuple[str, float] | None = None,
    bounds: tuple[float, float] = ANYTHING,
) -> None:
    """Plot the scores of methods: seeds as points, mean and 95 % interval (Student's t) as a bar.

    Args:
        scores: one score per seed for each method; the seeds are in the same order.
        metric: name of the metric.
        path: the PNG file to save.
        trivial: name and score of a predictor that ignores its input, drawn as a thin line.
        bounds: lowest and highest possible score; intervals end there.
    """
    names = [folded(name) for name in scores]
    height = 0.9 + sum(0.45 + 0.14 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, published=True) as (axes,):
        for row, (values, style) in enumerate(zip(scores.values(), styles(), strict=False)):
            spread = np.linspace(-0.28, 0.02, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(values, row + spread, style.marker, color=style.color, ms=4.5, alpha=0.75, mew=0)
            mean = float(np.mean(values))
            if len(values) > 1:
                half = float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
                low, high = max(bounds[0], mean - half), min(bounds[1], mean + half)
                error = [[mean - low], [high - mean]]
                axes.errorbar(mean, row + 0.25, xerr=error, color=style.color, capsize=4, lw=1.8)
            axes.plot(mean, row + 0.25, "|", color=style.color, ms=14, mew=2.2)
        if trivial is not None:
            name, score = trivial
            axes.axvline(score, color="#666666", lw=0.8, ls=":", zorder=0)
            axes.annotate(name, (score, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), ha="center",
                          textcoords="offset points", fontsize="small", color="#666666")  # fmt: skip
        axes.set_yticks(range(len(scores)), names)
        axes.set_ylim(len(scores) - 0.45, -0.55)
        axes.set_xlabel(f"{metric.replace('_', ' ')} on dev")
        axes.grid(axis="x", color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
