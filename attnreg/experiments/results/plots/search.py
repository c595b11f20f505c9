"""Plot the scores of a search over two options as a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.patches import Rectangle

from attnreg.experiments.results.plots.style import COLORS, picture


def plot_search(
    searched: Mapping[str, Sequence[str]], means: Sequence[float], chosen: int, metric: str, seeds: int, path: Path
) -> None:
    """Plot the mean score of each pair of values; the chosen pair is framed.

    Args:
        searched: the values of two options, as typed.
        means: mean score of each pair; the values of the second option change fastest.
        chosen: index of the chosen pair.
        metric: name of the metric.
        seeds: number of seeds behind each mean.
        path: the PNG file to save.
    """
    (first, rows), (second, columns) = searched.items()
    scores = np.array(means).reshape(len(rows), len(columns))
    with picture(path, width=2.8 + 0.85 * len(columns), height=1.4 + 0.6 * len(rows), published=True) as (axes,):
        image = axes.imshow(scores, cmap="viridis", origin="lower", aspect="auto")
        for (row, column), score in np.ndenumerate(scores):
            dark = score < scores.min() + 0.6 * np.ptp(scores)
            axes.text(column, row, f"{score:.3f}", ha="center", va="center", color="white" if dark else "black")
        row, column = divmod(chosen, len(columns))
        frame = Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, color=COLORS[2], lw=3.0)
        axes.add_patch(frame)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel=second, ylabel=first)
        axes.tick_params(length=0)
        count = "1 seed" if seeds == 1 else f"mean over {seeds} seeds"
        axes.figure.colorbar(image, ax=axes, label=f"{metric.replace('_', ' ')}\non held-out rows\n({count})")
