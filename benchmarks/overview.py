"""Draw docs/results/overview.png: the difference of each method to plain fine-tuning, in every setting of docs/results.

Usage: python benchmarks/overview.py
       python benchmarks/overview.py --smallest --path FILE.png    # one setting, to test the script
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

from attnreg.experiments.compare.statistics import Difference, paired_difference
from attnreg.experiments.plots.style import picture, styles

FOLDER = Path(__file__).parents[1] / "docs" / "results"
SETTINGS = {
    "sst2-500-20": "SST-2, 500 rows, 20 seeds",
    "sst2-500": "the first 8 of them",
    "sst2-1000": "SST-2, 1000 rows, 5 seeds",
    "mrpc-500": "MRPC, 500 rows, 8 seeds",
    "rte-500": "RTE, 500 rows, 5 seeds",
    "cola-2500": "CoLA, 2500 rows, 5 seeds",
}


def differences(setting: str) -> dict[str, Difference]:
    """Return the mean paired difference of each recipe to plain fine-tuning over its seeds, in points."""
    points: dict[str, dict[str, float]] = defaultdict(dict)
    with (FOLDER / f"{setting}.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["role"] == "final":
                points[row["method"].split()[0]][row["seed"]] = 100 * float(row["score"])
    plain = points.pop("finetune")
    return {
        recipe: paired_difference(list(by_seed.values()), [plain[seed] for seed in by_seed])
        for recipe, by_seed in points.items()
    }


def main() -> None:
    """Read the tables, print and draw the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=FOLDER / "overview.png")
    parser.add_argument("--smallest", action="store_true", help="only the last setting")
    options = parser.parse_args()
    by_setting = {setting: differences(setting) for setting in list(SETTINGS)[-1 if options.smallest else 0 :]}
    recipes = sorted({recipe for found in by_setting.values() for recipe in found})
    look = dict(zip(recipes, styles(), strict=False))
    with picture(options.path, width=8.0, height=1.0 + 0.2 * sum(map(len, by_setting.values()))) as (axes,):
        row, ticks, drawn = 0, {}, {}
        for setting, found in by_setting.items():
            ticks[SETTINGS[setting]] = row + (len(found) - 1) / 2
            for recipe, points in sorted(found.items()):
                print(f"{setting:10} {recipe:20} {points.mean:+.2f} [{points.low:+.2f}, {points.high:+.2f}]")
                drawn[recipe] = axes.errorbar(
                    points.mean,
                    row,
                    xerr=[[points.mean - points.low], [points.high - points.mean]],
                    fmt=look[recipe].marker,
                    color=look[recipe].color,
                    capsize=3,
                    ms=5,
                )
                row += 1
            row += 1
        axes.axvline(0, color="#888888", lw=0.8)
        axes.set_yticks(list(ticks.values()), list(ticks))
        axes.invert_yaxis()
        axes.set_xlabel("dev score minus plain fine-tuning's, times 100: mean and 95 % interval")
        axes.legend(drawn.values(), drawn, loc="upper left", fontsize=8, frameon=False)


if __name__ == "__main__":
    main()
