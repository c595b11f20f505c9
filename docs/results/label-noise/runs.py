"""Accuracy, loss before and after one fitted temperature, and memorized labels, of comparisons with label noise.

Usage, in this folder: python runs.py COMPARISON... --output-dir .
                       python runs.py --table runs.csv --output-dir .

COMPARISON is the folder of one task in the output of `attnreg compare` with `--label-noise`, or without for no noise.
Accuracy on shifted rows is that of `attnreg evaluate RUN --data-dir SHIFTED/typos --name typos`; likewise for `joined`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.results.plots.style import picture, styles

sys.path.insert(0, str(Path(__file__).parents[1]))

from finished_runs import print_differences, table

PLAIN, BASELINE = "plain", "early-stopping"
PRIMARY = ("scores-dropout", "R-Drop", "AD-DROP", "AttendOut")  # each minus the baseline, at the highest noise
METHODS = (PLAIN, BASELINE, *PRIMARY)
SHOWN = {PLAIN: "plain", BASELINE: "early stopping", "scores-dropout": "scores dropout"}
SHIFTED = ("typos", "joined")  # evaluations, see shift.py
COLUMNS = (
    *("noise", "method", "seed", "accuracy", "loss", "loss_after_temperature", "temperature"),
    *("memorized", "recovered", "training_cpu_seconds", *SHIFTED),
)


def loss(logits: NDArray[np.float64], labels: NDArray[np.int64], temperature: float = 1.0) -> float:
    """Return the mean cross-entropy of logits divided by a temperature."""
    found = log_softmax(logits / temperature, axis=1)
    return float(-found[np.arange(len(labels)), labels].mean())


def fitted(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Return the temperature with the lowest loss (Guo et al. 2017, arXiv:1706.04599, section 4.2)."""
    found = minimize_scalar(lambda log: loss(logits, labels, float(np.exp(log))), bounds=(-5, 5), method="bounded")
    return float(np.exp(found.x))


def tempered(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> tuple[float, float]:
    """Return the loss of each half of the rows at the temperature fitted on the other, and the mean temperature."""
    halves = [slice(0, None, 2), slice(1, None, 2)]
    found = [fitted(logits[rows], labels[rows]) for rows in halves]
    losses = [loss(logits[a], labels[a], t) for a, t in zip(halves, reversed(found), strict=True)]
    sizes = [len(labels[rows]) for rows in halves]
    return float(np.average(losses, weights=sizes)), float(np.mean(found))


def read(folder: Path) -> list[dict[str, object]]:
    """Return a row for each finished final run of a comparison."""
    rows: list[dict[str, object]] = []
    for path in sorted(folder.glob("*/seed*/result.json")):
        run = RunReader(path.parent)
        method = run.folder.parent.name.split("=")[0]
        if method not in METHODS:
            continue
        predictions = run.predictions
        logits = np.array([row["logits"] for row in predictions], dtype=np.float64)
        labels = np.array([row["label"] for row in predictions])
        after, temperature = tempered(logits, labels)
        wrong = run.result["mislabelled"] or {}
        rows.append({
            "noise": run.config["label_noise"],
            "method": method,
            "seed": run.config["seed"],
            "accuracy": float((logits.argmax(1) == labels).mean()),
            "loss": loss(logits, labels),
            "loss_after_temperature": after,
            "temperature": temperature,
            "memorized": wrong.get("memorized", ""),
            "recovered": wrong.get("recovered", ""),
            "training_cpu_seconds": run.result["training_cpu_seconds"],
            **{name: shifted(run.folder, name) for name in SHIFTED},
        })  # fmt: skip
    return rows


def shifted(run: Path, name: str) -> object:
    """Return a run's accuracy on shifted rows; empty if it was not scored on them."""
    path = run / "evaluations" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["metrics"]["accuracy"] if path.is_file() else ""


class Runs:
    """The runs of a table, by noise and method."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        self._rows = rows
        self.noises = sorted({float(row["noise"]) for row in rows})
        found = {row["method"] for row in rows}
        if missing := [method for method in METHODS if method not in found]:
            raise SystemExit(f"The runs lack {', '.join(missing)}; they have {', '.join(sorted(found))}.")

    def values(self, noise: float, method: str, column: str) -> dict[str, float]:
        """Return the values of a column by seed; empty ones are left out."""
        chosen = (row for row in self._rows if float(row["noise"]) == noise and row["method"] == method)
        return {row["seed"]: float(row[column]) for row in chosen if row[column]}

    def pair(self, noise: float, method: str, base: str, column: str) -> tuple[list[float], list[float]]:
        """Return the values of two methods, for the seeds that both have."""
        ours, theirs = (self.values(noise, each, column) for each in (method, base))
        seeds = sorted({*ours} & {*theirs})
        return [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]

    def number(self, noise: float, method: str, column: str) -> float:
        """Return the mean over seeds."""
        return float(np.mean([*self.values(noise, method, column).values()]))

    def mean(self, noise: float, method: str, column: str, digits: int) -> str:
        """Return the mean over seeds as text; ``none`` without values."""
        found = self.values(noise, method, column)
        return f"{self.number(noise, method, column):.{digits}f}" if found else "none"


def print_tables(runs: Runs) -> None:
    """Print the means of each noise level, and the differences to the baseline."""
    for noise in runs.noises:
        seeds = len(runs.values(noise, BASELINE, "accuracy"))
        print(f"\n{noise:.0%} of the labels are wrong, {seeds} seeds\n")
        plain = runs.number(noise, PLAIN, "training_cpu_seconds")
        print("| method | accuracy | loss | after one temperature | temperature | memorized | time |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for method in METHODS:
            columns = (("accuracy", 4), ("loss", 3), ("loss_after_temperature", 3), ("temperature", 1))
            cells = [runs.mean(noise, method, *column) for column in (*columns, ("memorized", 3))]
            cells.append(f"{runs.number(noise, method, 'training_cpu_seconds') / plain:.2f}")
            print(f"| {SHOWN.get(method, method)} | {' | '.join(cells)} |")
        print_against(runs, noise, BASELINE, PRIMARY)
        print_against(runs, noise, PLAIN, (BASELINE, *PRIMARY))
        if any(runs.values(noise, PLAIN, name) for name in SHIFTED):
            print_shifted(runs, noise)


def print_against(runs: Runs, noise: float, base: str, methods: Sequence[str]) -> None:
    """Print the paired differences in accuracy to a method, with Holm's correction over them."""
    compared = [((SHOWN.get(method, method),), *runs.pair(noise, method, base, "accuracy")) for method in methods]
    print()
    print_differences((f"accuracy minus {SHOWN[base]}",), compared)


def print_shifted(runs: Runs, noise: float) -> None:
    """Print mean accuracy on shifted rows, and differences to plain, with Holm's correction over all of them."""
    print(f"\n| method | {' | '.join(SHIFTED)} |\n| --- |{' ---: |' * len(SHIFTED)}")
    for method in METHODS:
        means = (runs.mean(noise, method, name, 4) for name in SHIFTED)
        print(f"| {SHOWN.get(method, method)} | {' | '.join(means)} |")
    others = [method for method in METHODS if method != PLAIN]
    print()
    print_differences(
        ("accuracy minus plain", "rows"),
        [
            ((SHOWN.get(method, method), name), *runs.pair(noise, method, PLAIN, name))
            for name in SHIFTED
            for method in others
            if runs.pair(noise, method, PLAIN, name)[0]
        ],
    )


def draw(runs: Runs, path: Path) -> None:
    """Draw mean accuracy by noise, and the accuracy of each seed at the highest noise."""
    noise = runs.noises[-1]
    with picture(path, width=10.5, height=3.8, columns=2) as (lines, points):
        for place, (method, look) in enumerate(zip(METHODS, styles(), strict=False)):
            name = SHOWN.get(method, method)
            mean = [runs.number(each, method, "accuracy") for each in runs.noises]
            lines.plot(
                runs.noises, mean, linestyle=look.linestyle, color=look.color, marker=look.marker, ms=4, label=name
            )
            scores = [*runs.values(noise, method, "accuracy").values()]
            shift = np.linspace(-0.18, 0.18, len(scores))
            points.plot(place + shift, scores, look.marker, color=look.color, ms=3.5, alpha=0.6, mew=0)
            points.hlines(np.mean(scores), place - 0.3, place + 0.3, color=look.color, lw=2)
        lines.set_xticks(runs.noises, [f"{each:.0%}" for each in runs.noises])
        lines.set(xlabel="wrong training labels", ylabel="accuracy on dev, mean over seeds")
        lines.legend(fontsize=8, frameon=False)
        points.set_xticks(
            range(len(METHODS)), [SHOWN.get(each, each).replace(" ", "\n") for each in METHODS], fontsize=8
        )
        points.set(ylabel=f"accuracy on dev, {noise:.0%} wrong labels")


def main() -> None:
    """Read the runs, write the table and the picture, print the results."""
    rows, folder = table(__doc__, COLUMNS, "runs.csv", read)
    runs = Runs(rows)
    print_tables(runs)
    draw(runs, folder / "accuracy.png")


if __name__ == "__main__":
    main()
