"""Draw the README's picture from the folder of an ``attnreg recipe attendout`` run.

Usage: python docs/figures/attendout.py RUN_DIR docs/figures/attendout.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

# Okabe and Ito's colours, told apart by colour-blind people; line styles tell them apart in grey.
STYLES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#56B4E9", "-"), ("#000000", "--")]


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(run: Path, picture: Path) -> None:
    """Dev score of the game and of plain fine-tuning; what the Generator drops in each layer."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    metric = "matthews_correlation"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    game = [record for record in read(run / "metrics.jsonl") if record["network"] == "attacker"]
    plain = read(run / "baseline" / "metrics.jsonl")
    for records, name, (color, line) in ((game, "AttendOut", STYLES[0]), (plain, "plain fine-tuning", STYLES[1])):
        left.plot([r["epoch"] for r in records], [r[metric] for r in records], line, color=color, label=name, lw=2)
    left.set(xlabel="epoch", ylabel="Matthews' correlation on dev", title=f"{config['task']}, seed {config['seed']}")
    telemetry = [record for record in read(run / "telemetry.jsonl") if record["drop_rate"]]
    for layer, (color, line) in zip(telemetry[0]["drop_rate"], STYLES, strict=False):
        rates = [record["drop_rate"][layer] for record in telemetry]
        right.plot([r["step"] for r in telemetry], rates, line, color=color, label=layer, lw=2)
    right.set(xlabel="step", ylabel="drop rate", title="what the Generator drops", ylim=(0, None))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
