"""Draw the README's picture from the folders of ``attnreg recipe attendout`` runs that differ in their seed.

Usage: python docs/figures/attendout.py RUN_DIR... docs/figures/attendout.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by colour-blind people; line styles tell them apart in grey.
STYLES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-.")]
METRIC = "matthews_correlation"


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def lines(axes: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], style: tuple[str, str], label: str) -> None:
    """Every run as a thin line, their mean as a thick one."""
    color, line = style
    for y in runs:
        axes.plot(x, y, color=color, lw=0.7, alpha=0.4)
    axes.plot(x, np.mean(runs, axis=0), line, color=color, lw=2.2, label=label)


def main(folders: Sequence[Path], picture: Path) -> None:
    """Dev score of the game and of plain fine-tuning; what the Generator drops in each layer."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    games = [[r for r in read(run / "metrics.jsonl") if r["network"] == "attacker"] for run in folders]
    plain = [read(run / "baseline" / "metrics.jsonl") for run in folders]
    for runs, style, name in ((games, STYLES[0], "AttendOut"), (plain, STYLES[1], "plain fine-tuning")):
        lines(left, [r["epoch"] for r in runs[0]], [[r[METRIC] for r in run] for run in runs], style, name)
    task = json.loads((folders[0] / "config.json").read_text(encoding="utf-8"))["task"]
    left.set(xlabel="epoch", ylabel="Matthews' correlation on dev", title=f"task {task}, {len(folders)} seeds")
    telemetry = [[r for r in read(run / "telemetry.jsonl") if r["drop_rate"]] for run in folders]
    for layer, style in zip(telemetry[0][0]["drop_rate"], STYLES, strict=False):
        rates = [[record["drop_rate"][layer] for record in run] for run in telemetry]
        lines(right, [record["step"] for record in telemetry[0]], rates, style, layer)
    right.set(xlabel="step", ylabel="drop rate", title="what the Generator drops", ylim=(0, None))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:-1]], Path(sys.argv[-1]))
