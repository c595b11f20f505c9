"""Every comparison of docs/results: one table, with one correction for all of them, and one picture.

Usage: python benchmarks/overview.py
       python benchmarks/overview.py --smallest --path FILE.png    # one setting, to test the script
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from attnreg.experiments.compare.power import detectable
from attnreg.experiments.compare.statistics import holm, paired_difference
from attnreg.experiments.plots.style import picture, styles

FOLDER = Path(__file__).parents[1] / "docs" / "results"
TWO = ("ad-drop - finetune", "attendout - finetune")
OTHERS = ("AD-DROP", "SAM", "R-Drop", "large-dropout", "NEFTune", "HiddenKey")
MECHANISM = ("high - random", *(f"{arm} - plain" for arm in ("high", "random", "low", "attention", "every-epoch")))
NOISE = (
    *(f"{name} - early-stopping" for name in ("AD-DROP", "AttendOut", "R-Drop", "scores-dropout")),
    *(f"{name} - plain" for name in ("AD-DROP", "AttendOut", "R-Drop", "scores-dropout", "early-stopping")),
)
# A table of runs: its title, and what is compared in it with what. The first 8 seeds of SST-2 are among the 20.
SETTINGS = {
    "mechanism/results": ("SST-2, 500 rows, 24 fresh seeds", MECHANISM),
    "sst2-500-20": ("SST-2, 500 rows, 20 seeds", TWO),
    "fine-tuning/results": ("SST-2, 500 rows, 5 epochs, 8 seeds", tuple(f"{name} - plain" for name in OTHERS)),
    "sst2-1000": ("SST-2, 1000 rows, 5 seeds", TWO),
    "label-noise/results": ("SST-2, 1000 rows, 40 % wrong labels, 12 seeds", NOISE),
    "cola-2500": ("CoLA, 2500 rows, 5 seeds", (*TWO, "attention-dropout - finetune")),
    "mrpc-500": ("MRPC, 500 rows, 8 seeds", TWO),
    "rte-500": ("RTE, 500 rows, 5 seeds", TWO),
}


def scores(setting: str) -> dict[str, dict[str, float]]:
    """Return the final score of each method by seed."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    with (FOLDER / f"{setting}.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["role"] == "final":
                found[row["method"].split()[0].split("=")[0]][row["seed"]] = float(row["score"])
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
        for contrast in SETTINGS[setting][1]:
            method, baseline = contrast.split(" - ")
            seeds = sorted(found[method])
            pair = [[found[name][seed] for seed in seeds] for name in (method, baseline)]
            spread = float(np.subtract(*pair).std(ddof=1))
            rows.append((setting, contrast, paired_difference(*pair), detectable(spread, len(seeds))))
    adjusted = holm([difference.p for _, _, difference, _ in rows])
    print("| setting | comparison | difference | 95 % over seeds | p | p (Holm) | detectable |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for (setting, contrast, d, least), p in zip(rows, adjusted, strict=True):
        for name, shown in (("finetune", "plain"), ("ad-drop", "AD-DROP"), ("attendout", "AttendOut")):
            contrast = contrast.replace(name, shown)
        numbers = f"{d.mean:+.4f} | [{d.low:+.4f}, {d.high:+.4f}] | {d.p:.4f} | {p:.4f} | {least:.4f}"
        print(f"| {SETTINGS[setting][0]} | {contrast} | {numbers} |")

    recipes = ("ad-drop", "attendout")
    look = dict(zip(recipes, styles(), strict=False))
    drawings = [row for row in rows if row[1].split(" - ")[0] in recipes]
    with picture(options.path, width=8.0, height=1.0 + 0.25 * len(drawings)) as (axes,):
        ticks, drawn = defaultdict(list), {}
        for place, (setting, contrast, difference, _) in enumerate(drawings):
            recipe, title = contrast.split(" - ")[0], SETTINGS[setting][0]
            at = place + len(ticks | {title: []})  # a gap before each setting
            mean, low, high = (100 * value for value in (difference.mean, difference.low, difference.high))
            ticks[title].append(at)
            bar = {"fmt": look[recipe].marker, "color": look[recipe].color, "capsize": 3, "ms": 5}
            drawn[recipe] = axes.errorbar(mean, at, xerr=[[mean - low], [high - mean]], **bar)
        axes.axvline(0, color="#888888", lw=0.8)
        axes.set_yticks([float(np.mean(places)) for places in ticks.values()], list(ticks))
        axes.invert_yaxis()
        axes.set_xlabel("dev score minus plain fine-tuning's, times 100: mean and 95 % interval")
        axes.legend(drawn.values(), drawn, loc="upper left", fontsize=8, frameon=False)


if __name__ == "__main__":
    main()
