"""Plot dev score and dev loss of methods over epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnreg.experiments.results.plots.style import count_axis, folded, picture, point_alone, styles


def plot_learning(curves: Mapping[str, Sequence[Sequence[dict[str, Any]]]], metric: str, path: Path) -> None:
    """Plot the mean over seeds, with a band from the lowest to the highest seed.

    Args:
        curves: for each method and seed the evaluations of the returned network, as in ``metrics.jsonl``. Only epochs
            in which every seed of a method was evaluated are plotted.
        metric: name of the metric.
        path: the PNG file to save.
    """
    keys = [metric]
    if all("loss" in record for runs in curves.values() for records in runs for record in records):
        keys.append("loss")
    names = [folded(name, 48, 2) for name in curves]
    height = 2.3 * len(keys) + 0.4 + sum(0.2 + 0.16 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, rows=len(keys), published=True) as panels:
        for key, axes in zip(keys, panels, strict=True):
            for name, runs, style in zip(names, curves.values(), styles(), strict=False):
                scores = [{record["epoch"]: float(record[key]) for record in records} for records in runs]
                epochs = [epoch for epoch in scores[0] if all(epoch in each for each in scores)]
                values = [[each[epoch] for each in scores] for epoch in epochs]
                means = [sum(each) / len(each) for each in values]
                axes.plot(epochs, means, linestyle=style.line, marker=point_alone(means), color=style.color, lw=1.6,
                          label=name)  # fmt: skip
                if len(runs) > 1:
                    ends = [min(each) for each in values], [max(each) for each in values]
                    axes.fill_between(epochs, *ends, color=style.color, alpha=0.15, lw=0)
            axes.set_ylabel(f"dev {key.replace('_', ' ')}")
            axes.grid(axis="y", color="#dddddd", lw=0.6)
        count_axis(*panels)
        panels[-1].set_xlabel("epoch")
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize="small")
