"""The figures of a comparison's report and their captions, for the screen and for print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any

import numpy as np
from scipy import stats

from attnreg.experiments.compare.contrast import Contrast
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.folder.history import training_losses
from attnreg.experiments.results.document import Block, Paragraph, Picture
from attnreg.experiments.results.plots.run import plot_drop_rates
from attnreg.experiments.results.plots.style import COLORS, count_axis, picture, point_alone, styles


def forest(differences: Mapping[str, Contrast], path: Path, caption: str) -> Picture:
    """Plot mean paired differences with their intervals; the points of intervals without 0 are filled."""
    names, contrasts = [folded(name) for name in differences], list(differences.values())
    metrics = " or ".join(dict.fromkeys(contrast.mine.metric.replace("_", " ") for contrast in contrasts))
    label = folded(f"difference in {metrics} to {contrasts[0].other.name}", 34)
    height = 1.0 + 0.18 * label.count("\n") + sum(0.36 + 0.14 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, grid="x", published=True) as (axes,):
        axes.axvline(0, color=COLORS[0], lw=1.0)
        for row, contrast in enumerate(contrasts):
            mean, low, high, _ = contrast.difference
            is_clear = low > 0 or high < 0  # false for NaN
            if not math.isnan(low):
                axes.plot([low, high], [row, row], "-", color=COLORS[1], lw=2.2, solid_capstyle="butt")
            axes.plot([mean], [row], "o", color=COLORS[1], ms=7, mfc=COLORS[1] if is_clear else "white", mew=1.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        limit = 1.08 * max(map(abs, axes.get_xlim()))
        axes.set_xlim(-limit, limit)  # so that better and worse are equally wide
        axes.set_xlabel(f"{label}\n(right: better)")
    return Picture(path, caption)


def seeds(groups: Sequence[Group], baseline: Group, folder: Path) -> Picture:
    """Plot scores: seeds as points, mean and 95 % interval (Student's t) as a bar."""
    path = folder / "seeds.png"
    names = [folded(group.name) for group in groups]
    height = 0.9 + sum(0.45 + 0.14 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, grid="x", published=True) as (axes,):
        for row, (group, style) in enumerate(zip(groups, styles(), strict=False)):
            values = group.scores
            spread = np.linspace(-0.28, 0.02, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(values, row + spread, style.marker, color=style.color, ms=4.5, alpha=0.75, mew=0)
            mean = fmean(values)
            if len(values) > 1:
                half = float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
                axes.errorbar(mean, row + 0.25, xerr=half, color=style.color, capsize=4, lw=1.8)
            axes.plot(mean, row + 0.25, "|", color=style.color, ms=14, mew=2.2)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.45, -0.55)
        axes.set_xlabel(f"{baseline.metric.replace('_', ' ')} on {baseline.where} rows")
    caption = "Points: seeds, in the same order for all methods. Bars: mean and 95 % interval (Student's t)."
    return Picture(path, caption)


def drop_rates(groups: Sequence[Group], folder: Path) -> list[Block]:
    """Plot the drop rates by layer over steps, for the first seed of every method that drops something."""
    pictures: list[Block] = []
    for number, group in enumerate(groups, 1):
        run, path = group.runs[0], folder / f"drop-rates-{number}.png"
        if any(line["drop_rate"] for line in run.reader.telemetry):
            plot_drop_rates(run.reader, path, published=True)
            pictures.append(Picture(path, f"Drop rate by layer over steps: {group.name}, seed {run.seed}."))
    return pictures


def learning(groups: Sequence[Group], folder: Path) -> Block:
    """Plot dev score, training loss and dev loss by epoch, if they were measured in more than one epoch."""
    curves = {group.name: [_returned(run) for run in group.runs] for group in groups}
    curves = {name: runs for name, runs in curves.items() if all(runs)}
    records, where = [record for runs in curves.values() for run in runs for record in run], groups[0].where
    if not any(len(run) > 1 for runs in curves.values() for run in runs):
        reason = f"There are no learning curves: {where} rows were scored in a single epoch (see --evaluate-every)."
        return Paragraph(reason)
    path, metric = folder / "learning.png", groups[0].metric
    keys = [metric, *(key for key in ("training_loss", "loss") if all(key in record for record in records))]
    names = [folded(name, 48, 2) for name in curves]
    height = 2.3 * len(keys) + 0.4 + sum(0.2 + 0.16 * name.count("\n") for name in names)
    with picture(path, width=5.4, height=height, rows=len(keys), grid="y", published=True) as panels:
        for key, axes in zip(keys, panels, strict=True):
            for name, runs, style in zip(names, curves.values(), styles(), strict=False):
                scores = [{record["epoch"]: float(record[key]) for record in run} for run in runs]
                epochs = [epoch for epoch in scores[0] if all(epoch in score for score in scores)]
                values = [[score[epoch] for score in scores] for epoch in epochs]
                line_style = {**style._asdict(), "marker": point_alone(epochs)}
                axes.plot(epochs, [fmean(value) for value in values], **line_style, label=name)
                if len(runs) > 1:
                    bounds = [min(value) for value in values], [max(value) for value in values]
                    axes.fill_between(epochs, *bounds, color=style.color, alpha=0.15, lw=0)
            axes.set_ylabel("training loss" if key == "training_loss" else f"{where} {key.replace('_', ' ')}")
        count_axis(*panels)
        panels[-1].set_xlabel("epoch")
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside lower left", fontsize="small")
    return Picture(
        path,
        f"{where.capitalize()} score, training loss (the mean since the last evaluation, with dropout, masks and "
        f"penalties) and {where} loss by epoch, of the network that the method returns. Means over seeds; the bands "
        "reach from the lowest to the highest seed.",
    )


def _returned(run: PlannedRun) -> list[dict[str, Any]]:
    """Return the evaluations of the network that a run returned (a game has two networks), with training losses."""
    network = run.result["best_epoch"].get("network")
    records = [record for record in run.reader.metrics if record["network"] == network]
    losses = zip(records, training_losses(run.reader.telemetry, records), strict=True)
    return [record if loss is None else record | {"training_loss": loss} for record, loss in losses]


def folded(name: str, width: int = 24, lines: int = 4) -> str:
    """Fold a long name into lines; a name that is too long for them loses its middle."""
    folds = wrap(name, width, break_on_hyphens=False) or [""]
    if len(folds) > lines:
        folds = [*folds[: lines - 1], f"… {folds[-1]}"]
    return "\n".join(folds)
