"""How the drop rates of the paper's game move in training, by layer, one line for each seed.

Usage, in this folder: python rates.py COMPARISON... --output-dir .
                       python rates.py --table rates.csv --output-dir FOLDER

COMPARISON is the folder of one task in the output of `attnreg compare`, with games of METHODS.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.results.plots.style import picture, styles

sys.path.insert(0, str(Path(__file__).parents[1]))

from finished_runs import table

METHODS = {"paper": "the paper's game", "frozen": "a Generator that does not learn"}
LAYERS, POINTS = 6, 20  # MiniLM's; of each run
COLUMNS = ("method", "seed", "step", *(f"layer{layer}" for layer in range(LAYERS)))


def read(folder: Path) -> list[dict[str, object]]:
    """Return POINTS rows for each finished final run: the last step, and the mean rates of the steps up to it."""
    rows: list[dict[str, object]] = []
    for path in sorted(folder.glob("*/seed*/result.json")):
        run = RunReader(path.parent)
        method = path.parents[1].name.partition("=")[0]  # without the value that the search chose
        for part in np.array_split(np.arange(len(run.telemetry)), POINTS) if method in METHODS else ():
            lines = [run.telemetry[number] for number in part]
            rates = np.mean([[*line["drop_rate"].values()] for line in lines], 0)
            named = {f"layer{layer}": f"{rate:.4f}" for layer, rate in enumerate(rates)}
            rows.append({"method": method, "seed": run.config["seed"], "step": lines[-1]["step"], **named})
    return rows


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Draw one panel for each layer."""
    with picture(path, width=7.2, height=4.4, columns=3, rows=2, grid="y") as panels:
        for layer, axes in enumerate(panels):
            for (method, name), look in zip(METHODS.items(), styles(), strict=False):
                of_method = [row for row in rows if row["method"] == method]
                for number, seed in enumerate(dict.fromkeys(row["seed"] for row in of_method)):
                    of_seed = [row for row in of_method if row["seed"] == seed]
                    points = [(int(row["step"]), float(row[f"layer{layer}"])) for row in of_seed]
                    label = name if not number else None
                    axes.plot(*zip(*points, strict=True), look.linestyle, color=look.color, lw=0.9, label=label)
            axes.set(title=f"layer {layer}", ylim=(0, 1))
            axes.title.set_fontsize(9)
        panels[0].legend(fontsize=7, loc="upper left")
        panels[0].set_ylabel("drop rate")
        panels[3].set_ylabel("drop rate")
        panels[4].set_xlabel("step")


def main() -> None:
    """Read the runs, write the table and the picture."""
    rows, folder = table(__doc__, COLUMNS, "rates.csv", read)
    draw(rows, folder / "rates.png")
    for method in dict.fromkeys(row["method"] for row in rows):
        for layer in (0, LAYERS - 1):
            means = [
                np.mean([float(row[f"layer{layer}"]) for row in rows if (row["method"], row["seed"]) == (method, seed)])
                for seed in dict.fromkeys(row["seed"] for row in rows)
            ]
            ends = [float(row[f"layer{layer}"]) for row in rows if row["method"] == method][POINTS - 1 :: POINTS]
            found = f"{np.nanmin(means):.2f} to {np.nanmax(means):.2f}, mean {np.nanmean(means):.2f}"
            print(f"{method}, layer {layer}: {found}; at the end {min(ends):.2f} to {max(ends):.2f}")


if __name__ == "__main__":
    main()
