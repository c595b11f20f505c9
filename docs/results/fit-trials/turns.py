"""Is the mean of two ways of fine-tuning better than that of one? One line per data set, appended to a table.

Usage: python docs/results/fit-trials/turns.py TABLE.csv --data DATA --model FOLDER [--sets cr mr ...] [--rows 500]

Rows are drawn by one seed; contrastive fine-tuning and LP-FT are each trained twice. The table has their mean accuracy
on some test rows, that of the mean network of each way, and that of mean networks of both ways, with one or two
trainings of each, whose heads are fitted as the one or the other ends.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from attnreg.experiments.fit.soup import mean_of
from attnreg.experiments.fit.tries import Bench

SEED, TEST_ROWS = 840, 1500
averages = runpy.run_path(str(Path(__file__).with_name("averages.py")))


def accuracies(bench: Bench, ways: dict[str, Any], tested: Any, right: Any) -> dict[str, float]:
    """Return the accuracies of networks of two ways and of their means."""
    rows, seeds = np.arange(len(bench.labels)), (SEED, SEED + 1000)
    made = {(way, seed): bench.trained(way, rows, seed, lambda: None) for way in ways.values() for seed in seeds}

    def accuracy(trainings: Sequence[tuple[Any, int]]) -> float:
        with patch.object(bench, "trained", lambda way, rows, seed, tick: made[way, seed]):
            network = mean_of(bench, trainings, rows, lambda: None)[0]
        return float((bench.logits(network, tested).argmax(1) == right).mean())

    found = {}
    for name, way in ways.items():
        found[name] = np.mean([accuracy([(way, seed)]) for seed in seeds])
        found[f"{name}, twice"] = accuracy([(way, seed) for seed in seeds])
    orders = [*ways.values()], [*ways.values()][::-1]
    found["one of each"] = np.mean([accuracy([(way, seed) for way in order]) for order in orders for seed in seeds])
    found["two of each"] = np.mean([accuracy([(way, seed) for seed in seeds for way in order]) for order in orders])
    return {name: round(float(score), 4) for name, score in found.items()}


def main() -> None:
    """Append a line for each data set."""
    options = averages["arguments"](__doc__, ["cr", "mr", "sst2_sentences"]).parse_args()
    for name, bench, classes, tested, right in averages["prepared"](options, SEED, TEST_ROWS):
        count = len(bench.labels)
        ways = {way: averages["ways"](count, classes)[way] for way in ("contrastive", "LP-FT")}
        line = {"data": name, "rows": count, "model": Path(options.model).name}
        averages["append"](options.table, line | accuracies(bench, ways, tested, right))


if __name__ == "__main__":
    main()
