"""The plots of a comparison or search: scores, differences, curves, classes and options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from scipy import stats

from attnreg.experiments.results.plots.style import COLORS, count_axis, folded, picture, point_alone, styles

ANYTHING = (-math.inf, math.inf)


def plot_seeds(
    scores: Mapping[str, Sequence[float]],
    metric: str,
    path: Path,
    *,
    trivial: tuple[str, float] | None = None,
    bounds: tuple[float, float] = ANYTHING,
) -> None:
    """Plot scores: seeds as points, mean and 95 % interval (Student's t) as a bar, a trivial predictor as a line."""
    names = [folded(name) for name in scores]
    height = 0.9 + sum(0.45 + 0.14 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, grid="x", published=True) as (axes,):
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


Estimate = tuple[float, float, float]


def plot_forest(
    differences: Mapping[str, Estimate], baseline: str, metric: str, path: Path, *, largest: float = math.inf
) -> None:
    """Plot mean paired differences with their intervals; the points of intervals without 0 are filled.

    A difference is mean, lower and upper end; the ends are NaN if there is no interval, and at most ``largest``.
    """
    names = [folded(name) for name in differences]
    label = folded(f"difference in {metric.replace('_', ' ')} to {baseline}", 34)
    height = 1.0 + 0.18 * label.count("\n") + sum(0.36 + 0.14 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, grid="x", published=True) as (axes,):
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


def plot_learning(curves: Mapping[str, Sequence[Sequence[dict[str, Any]]]], metric: str, path: Path) -> None:
    """Plot the mean over seeds, with a band from the lowest to the highest seed, in epochs that all seeds evaluated.

    The curves are the evaluations of the returned network, as in ``metrics.jsonl``, for each method and seed.
    """
    records = [record for runs in curves.values() for records in runs for record in records]
    keys = [metric, *(key for key in ("training_loss", "loss") if all(key in record for record in records))]
    names = [folded(name, 48, 2) for name in curves]
    height = 2.3 * len(keys) + 0.4 + sum(0.2 + 0.16 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, rows=len(keys), grid="y", published=True) as panels:
        for key, axes in zip(keys, panels, strict=True):
            for name, runs, style in zip(names, curves.values(), styles(), strict=False):
                scores = [{record["epoch"]: float(record[key]) for record in records} for records in runs]
                epochs = [epoch for epoch in scores[0] if all(epoch in each for each in scores)]
                values = [[each[epoch] for each in scores] for epoch in epochs]
                means = [sum(each) / len(each) for each in values]
                look = {**style._asdict(), "marker": point_alone(means)}
                axes.plot(epochs, means, **look, label=name)
                if len(runs) > 1:
                    ends = [min(each) for each in values], [max(each) for each in values]
                    axes.fill_between(epochs, *ends, color=style.color, alpha=0.15, lw=0)
            axes.set_ylabel("training loss" if key == "training_loss" else f"dev {key.replace('_', ' ')}")
        count_axis(*panels)
        panels[-1].set_xlabel("epoch")
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside lower left", fontsize="small")


WITH_NUMBERS = 6


def plot_confusion(counts: Mapping[str, NDArray[np.int64]], classes: Sequence[str], path: Path) -> None:
    """Plot one confusion matrix per method, as the share of each true class; counts are by class, then prediction."""
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


class Reliability(NamedTuple):
    """Mean confidence, accuracy and number of rows in each bin of confidence that holds rows."""

    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    rows: NDArray[np.int64]


def plot_reliability(methods: Mapping[str, Reliability], path: Path) -> None:
    """Plot accuracy over confidence; a larger point stands for more rows."""
    names = [folded(name, 48, 2) for name in methods]
    height = 4.6 + sum(0.2 + 0.16 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, grid="both", published=True) as (axes,):
        axes.plot([0, 1], [0, 1], ":", color="#666666", lw=1.0)
        axes.annotate("calibrated", (0.98, 0.98), ha="right", va="bottom", rotation=45, rotation_mode="anchor",
                      transform_rotates_text=True, fontsize="small", color="#666666")  # fmt: skip
        for name, bins, style in zip(names, methods.values(), styles(), strict=False):
            sizes = 4 + 160 * bins.rows / bins.rows.sum()
            axes.plot(bins.confidence, bins.accuracy, linestyle=style.linestyle, color=style.color, lw=1.2)
            axes.scatter(bins.confidence, bins.accuracy, s=sizes, marker=style.marker, color=style.color, alpha=0.8,
                         lw=0, label=name)  # fmt: skip
        lowest = min(float(bins.confidence.min()) for bins in methods.values())
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(lowest - 0.03, 1.02), ylim=(-0.02, 1.02))
        legend = axes.figure.legend(loc="outside lower left", fontsize="small")
        for handle in legend.legend_handles:
            handle.set_sizes([24])  # type: ignore[union-attr]


def plot_search(
    searched: Mapping[str, Sequence[str]], means: Sequence[float], chosen: int, metric: str, seeds: int, path: Path
) -> None:
    """Plot the mean score of each pair of values of two options; the chosen pair is framed.

    In ``means``, the values of the second option change fastest; ``chosen`` is an index into it.
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


def plot_progress(
    complete: Sequence[tuple[int, float]], stopped: Sequence[tuple[int, float]], metric: str, seeds: int, path: Path
) -> None:
    """Plot the mean score of each trial over the number of runs when it ended, and the best one so far as a line."""
    with picture(path, width=6.0, height=3.4, grid="y", published=True) as (axes,):
        if stopped:
            axes.plot(*zip(*stopped, strict=True), "x", color=COLORS[2], ms=6, label="stopped early (fewer seeds)")
        count = "1 seed" if seeds == 1 else f"mean of {seeds} seeds"
        axes.plot(*zip(*complete, strict=True), "o", color=COLORS[1], ms=5, label=f"complete ({count})")
        ends, scores = zip(*complete, strict=True)
        best, last = list(itertools.accumulate(scores, max)), max(runs for runs, _ in [*complete, *stopped])
        axes.step([*ends, last], [*best, best[-1]], where="post", color=COLORS[0], label="best so far")
        axes.set(xlabel="runs", ylabel=f"{metric.replace('_', ' ')} on held-out rows")
        count_axis(axes)
        axes.legend(fontsize="small")
