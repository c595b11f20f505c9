"""Plot which classes a method's networks confuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnreg.experiments.results.plots.style import folded, picture

WITH_NUMBERS = 6


def plot_confusion(counts: Mapping[str, NDArray[np.int64]], classes: Sequence[str], path: Path) -> None:
    """Plot one confusion matrix per method, as the share of each true class.

    Args:
        counts: for each method the number of rows by class (first) and predicted class (second), ``(C, C)``.
        classes: names of the classes.
        path: the PNG file to save.
    """
    names = [folded(name) for name in counts]
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    ticks = [folded(name, 14, 2) for name in classes]
    longest = 0.08 * max(len(line) for tick in ticks for line in tick.split("\n"))
    height = rows * (2.3 + longest + 0.15 * max(name.count("\n") for name in names))
    with picture(path, width=5.4, height=height, columns=columns, rows=rows, published=True) as grid:
        for number, axes in enumerate(grid):
            if number >= len(names):
                axes.remove()
                continue
            matrix = list(counts.values())[number]
            shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
            image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
            if len(classes) <= WITH_NUMBERS:
                for (row, column), share in np.ndenumerate(shares):
                    color = "white" if share > 0.55 else "black"
                    axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=color)
            axes.set_title(names[number], fontsize="medium")
            axes.set_xticks(range(len(ticks)), ticks, rotation=90 if longest > 0.3 else 0)
            axes.set_yticks(range(len(ticks)), ticks if number % columns == 0 else [])
            axes.tick_params(length=0)
            if number % columns == 0:
                axes.set_ylabel("true class")
            if number + columns >= len(names):
                axes.set_xlabel("predicted class")
        if len(classes) > WITH_NUMBERS:
            label = "share of the true class"
            grid[0].figure.colorbar(image, ax=grid[: len(names)], location="bottom", shrink=0.6, label=label)
