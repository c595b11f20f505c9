"""Plot the best score of a search over its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnreg.experiments.results.plots.style import COLORS, count_axis, picture


def plot_progress(
    complete: Sequence[tuple[int, float]], stopped: Sequence[tuple[int, float]], metric: str, seeds: int, path: Path
) -> None:
    """Plot the mean score of each trial, and the best one so far as a line.

    Args:
        complete: number of runs when the trial ended, and its mean score, in this order.
        stopped: the same for trials that were stopped early; their means are over fewer seeds.
        metric: name of the metric.
        seeds: number of seeds of a complete trial.
        path: the PNG file to save.
    """
    with picture(path, width=6.0, height=3.4, published=True) as (axes,):
        if stopped:
            axes.plot(*zip(*stopped, strict=True), "x", color=COLORS[2], ms=6, label="stopped early (fewer seeds)")
        axes.plot(*zip(*complete, strict=True), "o", color=COLORS[1], ms=5, label=f"complete ({_count(seeds)})")
        best: list[tuple[int, float]] = []
        for runs, score in complete:
            best.append((runs, max(score, best[-1][1]) if best else score))
        last = max(runs for runs, _ in [*complete, *stopped])
        best.append((last, best[-1][1]))
        axes.step(*zip(*best, strict=True), where="post", color=COLORS[0], lw=1.6, label="best so far")
        axes.set(xlabel="runs", ylabel=f"{metric.replace('_', ' ')} on held-out rows")
        count_axis(axes)
        axes.grid(axis="y", color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize="small")


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"mean of {seeds} seeds"
