"""Where AttendOut's gain comes from: masks, selection of the winner, and rewards from rows that are scored.

Usage, in this folder: python runs.py COMPARISON --output-dir .
                       python runs.py --table results.csv --output-dir FOLDER

COMPARISON is the folder of one task in the output of `attnreg compare` with `--label-noise` and the methods of SHOWN.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnreg.experiments.compare.statistics import paired_difference
from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.results.plots.style import picture, styles

sys.path.insert(0, str(Path(__file__).parents[1]))

from finished_runs import print_differences, table

COLUMNS = ("method", "seed", "score", "seen", "unseen", "memorized", "training_cpu_seconds")
SHOWN = {
    "plain": "plain",
    "selection": "selection\nalone",
    "masks": "masks\nalone",
    "both": "both\n(AttendOut)",
    "half-dev": "rewards from\nhalf of dev",
    "dev": "rewards from\nall of dev",
}
# What is compared with what, in which score. "leak" is the score of the half of dev that `half-dev` takes its rewards
# from, minus the score of the other half. To plain fine-tuning, both halves are alike.
CONTRASTS = (
    ("selection", "plain", "score"),
    ("masks", "plain", "score"),
    ("both", "plain", "score"),
    ("both", "selection", "score"),
    ("both", "masks", "score"),
    ("half-dev", "plain", "seen"),
    ("half-dev", "plain", "unseen"),
    ("half-dev", "plain", "leak"),
    ("half-dev", "both", "score"),
    ("dev", "plain", "score"),
    ("dev", "both", "score"),
)


def rewarded(count: int) -> NDArray[np.bool_]:
    """Return which of the dev rows `--reward-data half-dev` takes its rewards from."""
    seen = np.zeros(count, dtype=bool)
    seen[np.random.default_rng(0).permutation(count)[: count // 2]] = True  # as datasets.Dataset.shuffle(seed=0)
    return seen


def read(folder: Path) -> list[dict[str, object]]:
    """Return a row for each finished final run of a comparison."""
    rows: list[dict[str, object]] = []
    for path in sorted(folder.glob("*/seed*/result.json")):
        run = RunReader(path.parent)
        right = np.array([row["prediction"] == row["label"] for row in run.predictions])
        seen = rewarded(len(right))
        rows.append({
            "method": run.folder.parent.name,
            "seed": run.config["seed"],
            "score": float(right.mean()),
            "seen": float(right[seen].mean()),
            "unseen": float(right[~seen].mean()),
            "memorized": (run.result["mislabelled"] or {}).get("memorized", ""),
            "training_cpu_seconds": run.result["training_cpu_seconds"],
        })  # fmt: skip
    return rows


def values(rows: Sequence[dict[str, str]], method: str, column: str) -> NDArray[np.float64]:
    """Return the values of a method, in the order of the seeds."""
    if column == "leak":
        return values(rows, method, "seen") - values(rows, method, "unseen")
    chosen = sorted((int(row["seed"]), float(row[column])) for row in rows if row["method"] == method)
    return np.array([value for _, value in chosen])


def print_tables(rows: Sequence[dict[str, str]]) -> None:
    """Print the means of the methods, and the differences."""
    print("| method | accuracy | half that gives rewards | other half | memorized | time |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    plain = values(rows, "plain", "training_cpu_seconds").mean()
    for method, name in SHOWN.items():
        cells = [f"{values(rows, method, column).mean():.4f}" for column in ("score", "seen", "unseen")]
        cells.append(f"{values(rows, method, 'memorized').mean():.3f}")
        cells.append(f"{values(rows, method, 'training_cpu_seconds').mean() / plain:.2f}")
        print(f"| {name.replace(chr(10), ' ')} | {' | '.join(cells)} |")
    print()
    compared = [
        ((f"{method} - {other}", column), values(rows, method, column), values(rows, other, column))
        for method, other, column in CONTRASTS
    ]
    print_differences(("comparison", "of"), compared)


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Draw the accuracy of each seed, less that of plain fine-tuning with the same seed."""
    plain = values(rows, "plain", "score")
    with picture(path, width=7.5, height=3.6) as (axes,):
        methods = [method for method in SHOWN if method != "plain"]
        for place, (method, look) in enumerate(zip(methods, styles(), strict=False)):
            gains = 100 * (values(rows, method, "score") - plain)
            d = paired_difference(gains, 0 * gains)
            shift = np.linspace(-0.15, 0.15, len(gains))
            axes.plot(place + shift, gains, look.marker, color=look.color, ms=3.5, alpha=0.5, mew=0)
            axes.errorbar(place + 0.28, d.mean, yerr=d.high - d.mean, fmt="o", color=look.color, capsize=3, ms=5)
        axes.axhline(0, color="#888888", lw=0.8)
        axes.set_xticks(range(len(methods)), [SHOWN[method] for method in methods], fontsize=8)
        axes.set_ylabel("accuracy minus plain fine-tuning's,\ntimes 100, with mean and 95 % interval")


def main() -> None:
    """Read the runs, write the table and the picture, print the results."""
    rows, folder = table(__doc__, COLUMNS, "results.csv", read)
    if missing := [method for method in SHOWN if not any(row["method"] == method for row in rows)]:
        raise SystemExit(f"The runs lack {', '.join(missing)}.")
    print_tables(rows)
    draw(rows, folder / "gains.png")


if __name__ == "__main__":
    main()
