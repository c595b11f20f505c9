"""Does LP-FT score more with a head that is fitted again at its end? One line per data set, appended to a table.

Usage: python docs/results/fit-trials/heads.py TABLE.csv --data DATA --model FOLDER [--sets cr mr ...] [--rows 500]

Two networks are trained on the same rows. The table has their mean accuracy and that of the mean of their weights, on
at most 1,500 test rows, with the head of fine-tuning, and with heads that are fitted again with several penalties.
"""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from datasets import Dataset
from torch import nn
from torch.optim.swa_utils import AveragedModel

from attnreg.experiments.fit.tries import Bench

SEED, NETWORKS, TEST_ROWS, PENALTIES = 820, 2, 1500, (0.01, 0.1, 1.0, 10.0)
averages = runpy.run_path(str(Path(__file__).with_name("averages.py")))


def accuracies(bench: Bench, network: nn.Module, tested: Dataset, right: Any) -> list[float]:
    """Return the accuracy of a network with its own head, and with heads that are fitted again, by penalty."""
    head, states, labels = bench._head_inputs(network, bench.encoded[0].rows)
    test_states, found = bench._head_inputs(network, tested)[1], []
    for penalty in (None, *PENALTIES):
        fitted = copy.deepcopy(head)
        if penalty is not None:
            bench._fit_head(fitted, states, labels, penalty)
        found.append(float((fitted(test_states).argmax(1).cpu().numpy() == right).mean()))
    return found


def main() -> None:
    """Append a line for each data set."""
    options = averages["arguments"](__doc__, ["cr", "mr", "trec", "banking77", "clinc150", "mrpc"]).parse_args()
    names = ["", *(f", C {penalty:g}" for penalty in PENALTIES)]
    for name, bench, classes, tested, right in averages["prepared"](options, SEED, TEST_ROWS):
        rows = np.arange(len(bench.labels))
        way = averages["ways"](len(rows), classes)["LP-FT"]
        with patch.object(bench, "fit_at_end"):
            networks = [bench.trained(way, rows, SEED + 1000 * number, lambda: None) for number in range(NETWORKS)]
        mean = AveragedModel(networks[0])
        for network in networks:
            mean.update_parameters(network)
        one = np.mean([accuracies(bench, network, tested, right) for network in networks], axis=0)
        found = {"one": one, "mean": accuracies(bench, mean.module.eval(), tested, right)}
        line = {f"{of}{end}": round(float(s), 4) for of in found for end, s in zip(names, found[of], strict=True)}
        averages["append"](options.table, {"data": name, "rows": len(rows), "model": Path(options.model).name, **line})


if __name__ == "__main__":
    main()
