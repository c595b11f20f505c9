"""Plot the differences of methods to the baseline, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from attnreg.experiments.results.plots.style import COLORS, folded, picture

Estimate = tuple[float, float, float]


def plot_forest(
    differences: Mapping[str, Estimate], baseline: str, metric: str, path: Path, *, largest: float = math.inf
) -> None:
    """Plot mean paired differences with their intervals; the points of intervals without 0 are filled.

    Args:
        differences: mean, lower and upper end for each method; the ends are NaN if there is no interval.
        baseline: name of the baseline, for the axis.
        metric: name of the metric.
        path: the PNG file to save.
        largest: largest possible difference; intervals end there.
    """
    names = [folded(name) for name in differences]
    label = folded(f"difference in {metric.replace('_', ' ')} to {baseline}", 34)
    height = 1.0 + 0.18 * label.count("\n") + sum(0.36 + 0.14 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, published=True) as (axes,):
        axes.axvline(0, color=COLORS[0], lw=1.0)
        for row, (mean, low, high) in enumerate(differences.values()):
            is_clear = low > 0 or high < 0  # false for NaN
            if not math.isnan(low):
                low, high = max(low, -largest), min(high, largest)
                axes.plot([low, high], [row, row], "-", color=COLORS[1], lw=2.2, solid_capstyle="butt")
            axes.plot([mean], [row], "o", color=COLORS[1], ms=7, mfc=COLORS[1] if is_clear else "white", mew=1.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        limit = 1.08 * max(map(abs, axes.get_xlim()))
        axes.set_xlim(-limit, limit)  # so that better and worse are equally wide
        axes.set_xlabel(f"{label}\n(right: better)")
        axes.grid(axis="x", color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
