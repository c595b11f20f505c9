"""What all pictures have in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Style(NamedTuple):
    """How one of several things is drawn."""

    color: str
    line: Any
    marker: str


# Okabe and Ito's colours, from dark to light so that they differ in greyscale too.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = "osD^vPX"


def styles() -> Iterator[Style]:
    """Styles, as many as are needed; colour, line and marker all differ for the first seven."""
    return (
        Style(color, line, marker)
        for color, line, marker in zip(
            itertools.cycle(COLORS), itertools.cycle(LINES), itertools.cycle(MARKERS), strict=False
        )
    )


def sequence(count: int) -> list[Any]:
    """Colours from dark to light for things that have an order, such as layers."""
    return [colormaps["viridis"](0.9 * number / max(1, count - 1)) for number in range(count)]


@contextmanager
def picture(
    path: Path, width: float = 7.0, height: float = 4.0, columns: int = 1, rows: int = 1
) -> Iterator[list[Axes]]:
    """Yield the axes of a new figure, in reading order; it is saved when the block ends.

    Args:
        path: a PNG file; its folder is made.
        width: in inches.
        height: in inches.
        columns: number of axes side by side.
        rows: number of rows of them.
    """
    figure = Figure(figsize=(width, height), layout="constrained")  # without pyplot: nothing global, no window
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    yield axes
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
