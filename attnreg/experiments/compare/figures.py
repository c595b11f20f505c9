"""The figures of a comparison's report, each with its caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attnreg.experiments.compare import classes
from attnreg.experiments.compare.document import Block, Paragraph, Picture
from attnreg.experiments.compare.group import Group, paired
from attnreg.experiments.compare.statistics import paired_difference
from attnreg.experiments.compare.study import Study
from attnreg.experiments.results.plots.comparison import (
    ANYTHING,
    plot_confusion,
    plot_forest,
    plot_learning,
    plot_reliability,
    plot_search,
    plot_seeds,
)
from attnreg.experiments.results.plots.style import dark_path
from attnreg.experiments.tasks.metrics import METRICS


def differences(others: Sequence[Group], baseline: Group, folder: Path) -> Picture:
    """Plot the paired differences to the baseline."""
    pairs = paired(others, [baseline] * len(others))
    found = {mine.name: paired_difference(mine.scores, plain.scores) for mine, plain in pairs}
    estimates = {name: (each.mean, each.low, each.high) for name, each in found.items()}
    low, high = _bounds(baseline)
    path = folder / "differences.png"
    plot_forest(estimates, baseline.name, baseline.metric, path, largest=high - low)
    return _shown(
        path,
        f"Mean difference to {baseline.name}, paired by seed, with its 95 % interval over seeds (Student's t). Filled: "
        "the interval does not include 0.",
    )


def seeds(groups: Sequence[Group], baseline: Group, folder: Path) -> Picture:
    """Plot the score of every seed."""
    trivial = None if baseline.trivial is None else (baseline.trivial[0], fmean(baseline.trivial[1]))
    scores, path = {group.name: group.scores for group in groups}, folder / "seeds.png"
    plot_seeds(scores, baseline.metric, path, trivial=trivial, bounds=_bounds(baseline))
    return _shown(path, "Points: seeds, in the same order for each method. Bars: mean and 95 % interval (Student's t).")


def learning(groups: Sequence[Group], folder: Path) -> list[Block]:
    """Plot dev score and loss by epoch, if they were measured in more than one epoch."""
    curves = {group.name: [_returned(run.reader.metrics, run.result) for run in group.runs] for group in groups}
    known = {name: runs for name, runs in curves.items() if all(runs)}
    if not any(len(records) > 1 for runs in known.values() for records in runs):
        return [Paragraph("There are no learning curves: dev was scored in a single epoch (see --evaluate-every).")]
    path = folder / "learning.png"
    plot_learning(known, groups[0].metric, path)
    text = "Means over seeds; the bands reach from the lowest to the highest seed."
    return [_shown(path, f"Dev score and loss by epoch, of the network that the method returns. {text}")]


def confusion(groups: Sequence[Group], names: Sequence[str], folder: Path) -> Picture:
    """Plot which classes the networks confuse."""
    path = folder / "confusion.png"
    plot_confusion({group.name: classes.confusion(group, len(names)) for group in groups}, names, path)
    return _shown(path, "Dev rows by true and predicted class, over all seeds, as shares of the true class.")


def calibration(groups: Sequence[Group], folder: Path) -> list[Block]:
    """Plot accuracy over confidence, for networks that have probabilities."""
    found = {group.name: bins for group in groups if (bins := classes.reliability(group)) is not None}
    if not found:
        return []
    path = folder / "reliability.png"
    plot_reliability(found, path)
    return [
        _shown(
            path,
            f"Accuracy of the dev rows whose prediction has this confidence, in {classes.BINS} bins, over all seeds. "
            "A larger point stands for more rows. Below the dotted line, networks are too sure of themselves.",
        )
    ]


def searches(study: Study, metric: str, folder: Path) -> list[Picture]:
    """Plot a heat map for each method of which exactly two options were searched."""
    pictures = []
    for method in study.methods:
        chosen = study.chosen(method)
        if len(method.searched) == 2 and chosen is not None:
            path = folder / f"search-{method.slug}.png"
            means = study.search_means(method)
            plot_search(method.searched, means, method.variants.index(chosen), metric, study.search_seeds, path)
            caption = f"Search of {method.name}: the mean score of each try. The framed one was chosen."
            pictures.append(_shown(path, caption))
    return pictures


def _shown(path: Path, caption: str) -> Picture:
    return Picture(path, caption, dark_path(path))


def _bounds(group: Group) -> tuple[float, float]:
    metric = METRICS.get(group.metric)
    return ANYTHING if metric is None else metric.bounds


def _returned(records: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the evaluations of the network that a run returned; a game evaluates two."""
    network = result["best_epoch"].get("network")
    return [dict(record) for record in records if record["network"] == network]
