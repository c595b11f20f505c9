"""The style that all plots share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


class Style(NamedTuple):
    """Colour, line style and marker of one line in a plot."""

    color: str
    linestyle: Any
    marker: str


# Okabe and Ito's colours, in an order in which they also differ in greyscale.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = "osD^vPX"
DPI = 140
VECTOR_FORMATS: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # without a date


def styles() -> Iterator[Style]:
    """Iterate over styles, without end; the first seven differ in colour, line and marker."""
    return itertools.cycle(map(Style, COLORS, LINES, MARKERS))


def count_axis(*axes: Axes) -> None:
    """Give the x axes of steps, epochs or rounds whole numbers only."""
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def point_alone(values: Sized) -> str | None:
    """Return the marker of a line without markers: a dot if the line is a single point, which would be invisible."""
    return "." if len(values) == 1 else None


@contextmanager
def picture(
    path: Path,
    width: float = 7.0,
    height: float = 4.0,
    columns: int = 1,
    rows: int = 1,
    *,
    grid: Literal["x", "y", "both"] | None = None,
    published: bool = False,
) -> Iterator[list[Axes]]:
    """Yield the axes of a new figure, sized in inches, row by row; save it as a PNG file at the end.

    The lines of a grid are behind all others. A published figure is also saved as PDF and SVG.
    """
    with rc_context(
        {
            "legend.frameon": False,
            "lines.linewidth": 1.6,
            "svg.hashsalt": path.stem,
            "text.parse_math": False,  # tokens and names may have dollar signs
        }
    ):
        figure = Figure(figsize=(width, height), layout="constrained")  # pyplot would keep global state
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        for panel in axes if grid is not None else ():
            panel.grid(axis=grid, color="#dddddd", lw=0.6)
            panel.set_axisbelow(True)
        yield axes
        for panel in axes:
            panel.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        if any(panel.images for panel in figure.axes):
            figure.draw_without_rendering()  # images have a fixed aspect, and the first layout does not know their size
        figure.savefig(path, dpi=DPI)
        for suffix, metadata in VECTOR_FORMATS.items() if published else ():  # the same figure gives the same file
            figure.savefig(path.with_suffix(f".{suffix}"), metadata=metadata)


def legend_beside(*axes: Axes) -> None:
    """Put a legend at the right of the axes, with every label once."""
    for panel in axes:
        handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
        panel.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))


def moving_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of the last ``window`` values at every position; the first positions average fewer values.

    Example:
        >>> moving_mean([1.0, 3.0, 5.0, 7.0], 2)
        [1.0, 2.0, 4.0, 6.0]
    """
    windows = (values[max(0, end + 1 - window) : end + 1] for end in range(len(values)))
    return [sum(part) / len(part) for part in windows]
