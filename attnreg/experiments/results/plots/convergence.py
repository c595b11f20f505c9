"""Plot training loss, dev loss and dev score over training (AttendOut, Figure 4)."""

from __future__ import annotations

from pathlib import Path

from attnreg.experiments.folder.reader import RunReader
from attnreg.experiments.results.plots.style import count_axis, moving_mean, picture, point_alone, styles


def plot_convergence(runs: dict[str, RunReader], path: Path) -> None:
    """Plot losses and scores of runs of one task in the same axes; ``runs`` are by their names in the legend."""
    first = next(iter(runs.values()))
    metric = next(
        iter(name for name in first.metrics[0] if name not in ("network", "epoch", "step", "loss")), "accuracy"
    )
    with picture(path, width=11.0, height=3.8, columns=3) as (train, loss, score):
        lines = [(name, run, network) for name, run in runs.items() for network in _networks(run)]
        for (name, run, network), style in zip(lines, styles(), strict=False):
            label = name if len(_networks(run)) == 1 else f"{name}: {network}"
            look = {"color": style.color, "linestyle": style.line, "label": label}
            key = f"{network}_loss" if network != "model" else "loss"
            losses = [(line["step"], line[key]) for line in run.telemetry if key in line]
            means = moving_mean([value for _, value in losses], max(1, len(losses) // 25))
            train.plot([step for step, _ in losses], means, lw=1.5, marker=point_alone(means), **look)
            records = [record for record in run.metrics if record["network"] == network]
            steps = [record["step"] for record in records]
            loss.plot(steps, [record["loss"] for record in records], marker=style.marker, ms=4, lw=1.5, **look)
            score.plot(steps, [record[metric] for record in records], marker=style.marker, ms=4, lw=1.5, **look)
        train.set(xlabel="step", title="training loss")
        loss.set(xlabel="step", title=f"loss on {first.scored_on} rows")
        score.set(xlabel="step", title=f"{metric.replace('_', ' ')} on {first.scored_on} rows")
        score.legend(frameon=False, fontsize="small")
        for axes in (train, loss, score):
            axes.grid(axis="y", color="#dddddd", lw=0.6)
        count_axis(train, loss, score)


def _networks(run: RunReader) -> list[str]:
    return list(dict.fromkeys(record["network"] for record in run.metrics))
