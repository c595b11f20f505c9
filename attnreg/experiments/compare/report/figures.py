"""The figures of a comparison's report, each with its caption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.contrast import Contrast
from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.results.document import Block, Paragraph, Picture
from attnreg.experiments.results.plots import comparison as plots
from attnreg.experiments.results.plots.run import plot_drop_rates
from attnreg.experiments.tasks.metrics import BINS


def differences(found: Sequence[Contrast], baseline: Group, folder: Path) -> Picture:
    """Plot the paired differences to the baseline."""
    low, high = baseline.bounds
    estimates, path = {each.mine.name: each.difference[:3] for each in found}, folder / "differences.png"
    plots.plot_forest(estimates, baseline.name, baseline.metric, path, largest=high - low)
    return Picture(
        path,
        f"Mean difference to {baseline.name}, paired by seed, with its 95 % interval over seeds (Student's t). Filled: "
        "the interval does not include 0.",
    )


def seeds(groups: Sequence[Group], baseline: Group, folder: Path) -> Picture:
    """Plot the score of every seed."""
    trivial = None if baseline.trivial is None else (baseline.trivial[0], fmean(baseline.trivial[1]))
    scores, path = {group.name: group.scores for group in groups}, folder / "seeds.png"
    plots.plot_seeds(scores, baseline.metric, path, trivial=trivial, bounds=baseline.bounds)
    caption = "Points: seeds, in the same order for each method. Bars: mean and 95 % interval (Student's t)."
    return Picture(path, caption)


def drop_rates(groups: Sequence[Group], folder: Path) -> list[Block]:
    """Plot the drop rates by layer over steps of each method's first seed, where it has some."""
    found: list[Block] = []
    for number, group in enumerate(groups, 1):
        run, path = group.runs[0], folder / f"drop-rates-{number}.png"
        if any(line["drop_rate"] for line in run.reader.telemetry):
            plot_drop_rates(run.reader, path, published=True)
            found.append(Picture(path, f"Drop rate by layer over steps: {group.name}, seed {run.seed}."))
    return found


def learning(groups: Sequence[Group], folder: Path) -> Block:
    """Plot dev score, training loss and dev loss by epoch, if they were measured in more than one epoch."""
    curves = {group.name: [_returned(run) for run in group.runs] for group in groups}
    known = {name: runs for name, runs in curves.items() if all(runs)}
    if not any(len(records) > 1 for runs in known.values() for records in runs):
        return Paragraph("There are no learning curves: dev was scored in a single epoch (see --evaluate-every).")
    path = folder / "learning.png"
    plots.plot_learning(known, groups[0].metric, path)
    return Picture(
        path,
        "Dev score, training loss (the mean since the last evaluation, with dropout, masks and penalties) and dev loss "
        "by epoch, of the network that the method returns. Means over seeds; the bands reach from the lowest to the "
        "highest seed.",
    )


def confusion(groups: Sequence[Group], names: Sequence[str], folder: Path) -> Picture:
    """Plot which classes the networks confuse."""
    path = folder / "confusion.png"
    plots.plot_confusion({group.name: group.confusion(len(names)) for group in groups}, names, path)
    return Picture(path, "Dev rows by true and predicted class, over all seeds, as shares of the true class.")


def calibration(groups: Sequence[Group], folder: Path) -> list[Block]:
    """Plot accuracy over confidence, for networks that have probabilities."""
    found = {group.name: bins for group in groups if (bins := _reliability(group)) is not None}
    if not found:
        return []
    path = folder / "reliability.png"
    plots.plot_reliability(found, path)
    text = (
        f"Accuracy of the dev rows whose prediction has this confidence, in {BINS} bins, over all seeds. "
        "A larger point stands for more rows. Below the dotted line, networks are too sure of themselves."
    )
    return [Picture(path, text)]


def _reliability(group: Group) -> plots.Reliability | None:
    """Return accuracy by confidence, over the rows of all seeds; ``None`` if the networks have no probabilities."""
    if not group.has_classes or not group.calibrated or "logits" not in group.records[0][0]:
        return None
    logits = np.array([row["logits"] for records in group.records for row in records])
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    confidence = (shifted / shifted.sum(1, keepdims=True)).max(1)
    right = np.concatenate(group.predictions) == np.tile(group.labels, len(group.predictions))
    number = np.clip(np.ceil(confidence * BINS), 1, BINS).astype(int) - 1
    rows = np.bincount(number, minlength=BINS)
    held = rows > 0
    sure, accurate = (np.bincount(number, weights=each, minlength=BINS)[held] for each in (confidence, right))
    return plots.Reliability(sure / rows[held], accurate / rows[held], rows[held])


def searches(comparison: Comparison, metric: str, folder: Path) -> list[Picture]:
    """Plot a heat map for each method of which exactly two options were searched."""
    pictures = []
    for method in comparison.methods:
        trials, chosen = comparison.trials(method), comparison.chosen(method)
        if len(method.searched) == 2 and chosen is not None:
            path, means = folder / f"search-{method.slug}.png", [trial.mean for trial in trials]
            best = method.variants.index(chosen)
            plots.plot_search(method.searched, means, best, metric, comparison.search_seeds, path)
            caption = f"Search of {method.name}: the mean score of each try. The framed one was chosen."
            pictures.append(Picture(path, caption))
    return pictures


def _returned(run: PlannedRun) -> list[dict[str, Any]]:
    """Return the evaluations of the network that a run returned (a game evaluates two), with its training loss."""
    network, lines = run.result["best_epoch"].get("network"), run.reader.telemetry
    steps, losses = (np.array([line[name] for line in lines]) for name in ("step", "loss"))
    weights, begin = np.diff(steps, prepend=0), 0
    records = [dict(record) for record in run.reader.metrics if record["network"] == network]
    for record in records:
        inside = (steps > begin) & (steps <= record["step"])
        if inside.any():
            record["training_loss"] = float(np.average(losses[inside], weights=weights[inside]))
        begin = record["step"]
    return records
