"""Plot how far the confidence of networks can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnreg.experiments.results.plots.style import folded, picture, styles


class Reliability(NamedTuple):
    """Mean confidence, accuracy and number of rows in each bin of confidence that holds rows."""

    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    rows: NDArray[np.int64]


def plot_reliability(methods: Mapping[str, Reliability], path: Path) -> None:
    """Plot accuracy over confidence; a larger point stands for more rows.

    Args:
        methods: the bins of each method.
        path: the PNG file to save.
    """
    names = [folded(name, 48, 2) for name in methods]
    height = 4.6 + sum(0.2 + 0.16 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, published=True) as (axes,):
        axes.plot([0, 1], [0, 1], ":", color="#666666", lw=1.0)
        axes.annotate("calibrated", (0.98, 0.98), ha="right", va="bottom", rotation=45, rotation_mode="anchor",
                      transform_rotates_text=True, fontsize="small", color="#666666")  # fmt: skip
        for name, bins, style in zip(names, methods.values(), styles(), strict=False):
            sizes = 4 + 160 * bins.rows / bins.rows.sum()
            axes.plot(bins.confidence, bins.accuracy, linestyle=style.line, color=style.color, lw=1.2)
            axes.scatter(bins.confidence, bins.accuracy, s=sizes, marker=style.marker, color=style.color, alpha=0.8,
                         lw=0, label=name)  # fmt: skip
        lowest = min(float(bins.confidence.min()) for bins in methods.values())
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(lowest - 0.03, 1.02), ylim=(-0.02, 1.02))
        axes.grid(color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
        legend = axes.figure.legend(loc="outside lower left", frameon=False, fontsize="small")
        for handle in legend.legend_handles:
            handle.set_sizes([24])  # type: ignore[union-attr]
