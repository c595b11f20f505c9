"""Every comparison of docs/results: one table, with one correction for all of them, and one picture.

Usage: python docs/results/overview.py
       python docs/results/overview.py --smallest --path FILE.png    # one setting, to test the script
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
from finished_runs import print_differences

from attnreg.experiments.results.plots.style import picture, styles

FOLDER = Path(__file__).parent
SHOWN = {"finetune": "plain", "ad-drop": "AD-DROP", "attendout": "AttendOut"}
SHOWN |= {"longer": "plain for 15 epochs", "selection": "selection alone", "masks": "masks alone"}
SHOWN |= {"half-dev": "rewards from half of dev", "dev": "rewards from dev"}
SHOWN |= {"early-stopping": "early stopping", "scores-dropout": "scores dropout"}
DRAWN = {"AD-DROP": "AD-DROP", "high": "AD-DROP", "AttendOut": "AttendOut"}  # against plain fine-tuning
TWO = ("AD-DROP - plain", "AttendOut - plain")
OTHERS = ("AD-DROP", "SAM", "R-Drop", "large-dropout", "NEFTune", "HiddenKey")
MECHANISM = (
    "high - random",
    "high - plain for 15 epochs",
    *(f"{arm} - plain" for arm in ("high", "random", "low", "attention", "every-epoch")),
)
NOISE = tuple(f"{name} - plain" for name in ("AD-DROP", "AttendOut", "R-Drop", "scores dropout", "early stopping"))
PRIMARY = tuple(f"{name} - early stopping" for name in ("AD-DROP", "AttendOut", "R-Drop", "scores dropout"))
PARTS = tuple(
    f"{name} - plain" for name in ("selection alone", "masks alone", "rewards from half of dev", "rewards from dev")
)
# A table of runs, with a colon one level of noise in it: its title, and what is compared in it with what. The first 8
# seeds of SST-2 are among the 20.
SETTINGS = {
    "mechanism/results": ("SST-2, 500 rows, {} fresh seeds", MECHANISM),
    "sst2-500-20": ("SST-2, 500 rows, {} seeds", TWO),
    "fine-tuning/results": ("SST-2, 500 rows, 5 epochs, {} seeds", tuple(f"{name} - plain" for name in OTHERS)),
    "sst2-1000": ("SST-2, 1000 rows, {} seeds", TWO),
    "label-noise/runs:0.4": ("SST-2, 1000 rows, 40 % wrong labels, {} seeds", (*PRIMARY, *NOISE)),
    "decomposition/results": ("SST-2, 1000 rows, 40 % wrong labels, {} seeds", PARTS),
    "label-noise/runs:0.2": ("SST-2, 1000 rows, 20 % wrong labels, {} seeds", NOISE),
    "label-noise/runs:0.0": ("SST-2, 1000 rows, {} fresh seeds", NOISE),
    "cola-2500": ("CoLA, 2500 rows, {} seeds", (*TWO, "attention-dropout - plain")),
    "mrpc-500": ("MRPC, 500 rows, {} seeds", TWO),
    "rte-500": ("RTE, 500 rows, {} seeds", TWO),
}


def scores(setting: str) -> dict[str, dict[str, float]]:
    """Return the final score of each method by seed."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    table, _, noise = setting.partition(":")
    with (FOLDER / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row.get("noise", "") == noise and row.get("role", "final") == "final":
                score = row["accuracy"] if noise else row["score"]
                method = row["method"].split()[0].split("=")[0]
                found[SHOWN.get(method, method)][row["seed"]] = float(score)
    return found


def main() -> None:
    """Read the tables, print and draw the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=FOLDER / "overview.png")
    parser.add_argument("--smallest", action="store_true", help="only the last setting")
    options = parser.parse_args()
    chosen = list(SETTINGS)[-1 if options.smallest else 0 :]
    rows = []
    for setting in chosen:
        found = scores(setting)
        title, contrasts = SETTINGS[setting]
        for contrast in contrasts:
            pair = [found[name] for name in contrast.split(" - ")]
            seeds = sorted({*pair[0]} & {*pair[1]})
            rows.append(((title.format(len(seeds)), contrast), *([each[seed] for seed in seeds] for each in pair)))
    differences = print_differences(("setting", "comparison"), rows)
    labels = [names for names, *_ in rows]
    look = dict(zip(("AD-DROP", "AttendOut"), styles(), strict=False))
    drawings = [
        (title, DRAWN[contrast.split(" - ")[0]], difference)
        for (title, contrast), difference in zip(labels, differences, strict=True)
        if contrast.endswith(" - plain") and contrast.split(" - ")[0] in DRAWN
    ]
    with picture(options.path, width=5.2, height=1.0 + 0.25 * len(drawings)) as (axes,):  # to be read on a phone
        ticks, drawn = defaultdict(list), {}
        for place, (title, name, difference) in enumerate(drawings):
            at = place + len(ticks | {title: []})  # a gap before each setting
            mean, low, high = (100 * value for value in (difference.mean, difference.low, difference.high))
            ticks[title].append(at)
            bar = {"fmt": look[name].marker, "color": look[name].color, "capsize": 3, "ms": 5}
            drawn[name] = axes.errorbar(mean, at, xerr=[[mean - low], [high - mean]], **bar)
        axes.axvline(0, color="#888888", lw=0.8)
        names = [title.replace(" rows, ", " rows\n") for title in ticks]
        axes.set_yticks([float(np.mean(places)) for places in ticks.values()], names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("points above plain fine-tuning (dev)", fontsize=8)
        axes.legend(drawn.values(), drawn, loc="upper left", fontsize=8, frameon=False)


if __name__ == "__main__":
    main()
