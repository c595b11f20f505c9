"""Does LP-FT score more with a head that is fitted again at its end? One line per data set, appended to a table.

Usage: python docs/results/fit/heads.py TABLE.csv --data DATA --model FOLDER [--sets cr mr ...] [--rows 500]

Two networks are trained on the same rows. The table has their mean accuracy and that of the mean of their weights, on
at most 1,500 test rows, with the head of fine-tuning, and with heads that are fitted again with several penalties.
"""

from __future__ import annotations

import argparse
import copy
import runpy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import nn
from torch.optim.swa_utils import AveragedModel

from attnreg.experiments.fit.rows import texts_in
from attnreg.experiments.fit.tries import Bench

SEED, NETWORKS, TEST_ROWS, PENALTIES = 820, 2, 1500, (0.01, 0.1, 1.0, 10.0)
averages = runpy.run_path(str(Path(__file__).with_name("averages.py")))
beside = averages["beside"]


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sets", nargs="+", default=["cr", "mr", "trec", "banking77", "clinc150", "mrpc"])
    parser.add_argument("--rows", type=int, default=500)
    options = parser.parse_args()
    averages["prepared"].__globals__["SEED"] = SEED
    for name in options.sets:
        texts, labels = beside["split"](options.data / name, "train")
        if name not in beside["SHOTS"]:
            texts, labels = beside["drawn"](texts, labels, SEED, options.rows)
        test, gold = beside["split"](options.data / name, "test")
        some = np.random.default_rng(0).permutation(len(test))[:TEST_ROWS]
        classifier, prepared_race = averages["prepared"](options.model, texts, labels)
        torch.set_num_threads(1)
        bench, classes = prepared_race.bench, [*classifier.answers_.classes]
        right = np.array([classes.index(gold[i]) for i in some])
        tested = classifier._kind.encode(classifier._dataset(texts_in([test[i] for i in some]), right.tolist()))
        way, rows, seeds = averages["ways"](len(texts), len(classes))["LP-FT"], np.arange(len(texts)), range(NETWORKS)
        with patch.object(bench, "_fit_at_end"):
            networks = [bench.trained(way, rows, SEED + 1000 * number, lambda: None) for number in seeds]
        mean = AveragedModel(networks[0])
        for network in networks:
            mean.update_parameters(network)
        one = np.mean([accuracies(bench, network, tested, right) for network in networks], axis=0)
        found = {"one": one, "mean": accuracies(bench, mean.module.eval(), tested, right)}
        names = ["", *(f", C {penalty:g}" for penalty in PENALTIES)]
        line = {
            f"{of}{name}": round(float(score), 4) for of in found for name, score in zip(names, found[of], strict=True)
        }
        print(line := {"data": name, "rows": len(texts), "model": Path(options.model).name, **line}, flush=True)
        new = not options.table.is_file()
        pd.DataFrame([line]).to_csv(options.table, mode="a", header=new, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
