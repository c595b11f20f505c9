"""Is the mean of several fine-tunings better than one? One line per data set and way, appended to a table.

Usage: python docs/results/fit-trials/averages.py TABLE.csv --data DATA --model FOLDER [--sets cr mr ...] [--rows 500]
       [--seed 810] [--networks 4] [--test-rows 1200] [--batch-size 16]

Rows are drawn by the seed; a way is trained on all of them with several seeds. The table has the mean accuracy of the
networks, and what means of the weights of two, three and four score, and means of their probabilities, on some test
rows. With ``--seed 830 --networks 2 --test-rows 1500``, the weights of two are those of order.csv.
"""

from __future__ import annotations

import argparse
import itertools
import runpy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from scipy.special import softmax

from attnreg import TextClassifier
from attnreg.experiments.fit import race
from attnreg.experiments.fit.rows import texts_in
from attnreg.experiments.fit.soup import mean_of
from attnreg.experiments.fit.tries import Bench, Try

SUBSETS = {2: 3, 3: 2, 4: 1}  # by size, how many subsets of the networks
beside = runpy.run_path(str(Path(__file__).parents[1] / "fit" / "beside.py"))


def arguments(usage: str | None, sets: list[str]) -> argparse.ArgumentParser:
    """Return the parser of what a trial is given, with its usual data sets."""
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sets", nargs="+", default=sets)
    parser.add_argument("--rows", type=int, default=500)
    return parser


def prepared(options: argparse.Namespace, seed: int, test_rows: int) -> Iterator[tuple[str, Bench, int, Dataset, Any]]:
    """Yield, by data set: name, bench of the drawn rows, number of classes, test rows and their class numbers."""
    for name in options.sets:
        texts, labels = beside["split"](options.data / name, "train")
        if name not in beside["SHOTS"]:
            texts, labels = beside["drawn"](texts, labels, seed, options.rows)
        test, gold = beside["split"](options.data / name, "test")
        some = np.random.default_rng(0).permutation(len(test))[:test_rows]
        classifier = TextClassifier(options.model, seed=seed, device="cpu")
        with patch.object(race.Race, "run", autospec=True, side_effect=KeyError) as run, suppress(KeyError):
            classifier.fit(texts, labels)
        bench, classes = run.call_args.args[0].bench, [*classifier.answers_.classes]
        bench.measure()
        torch.set_num_threads(1)
        bench.trained = whole(bench)
        right = np.array([classes.index(gold[i]) for i in some])
        tested = classifier._kind.encode(classifier._dataset(texts_in([test[i] for i in some]), right.tolist()))
        yield name, bench, len(classes), tested, right


def whole(bench: Bench) -> Callable[..., Any]:
    """Return `bench.trained` with the embeddings of all tokens, as test rows have others than those of training."""
    trained = bench.trained
    return lambda *args: bench.tokens.whole(trained(*args))


def append(table: Path, line: dict[str, Any]) -> None:
    """Append a line to a table."""
    print(line, flush=True)
    pd.DataFrame([line]).to_csv(table, mode="a", header=not table.is_file(), index=False, lineterminator="\n")


def ways(rows: int, classes: int) -> dict[str, Try]:
    """Return ways of fine-tuning, for as long as a race with enough time would."""
    plain = Try(min(race.MOST_EPOCHS, max(race.FEWEST_EPOCHS, round(max(5000, 100 * classes) / rows))), 1e-4)
    half = -(-plain.epochs // 2)
    contrasts = Try(half, 1e-4, contrasts=True)
    return {"contrastive": contrasts, "LP-FT": Try(half, 1e-4, penalty=0.1, fits_head=True), "plain": plain}


def main() -> None:
    """Append a line for each data set and way."""
    parser = arguments(__doc__, ["cr", "mr", "trec", "sst2_sentences", "subj", "mrpc"])
    parser.add_argument("--ways", nargs="+", default=["contrastive", "LP-FT"])
    for name, default in {"--seed": 810, "--networks": 4, "--test-rows": 1200}.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    for name, bench, classes, tested, right in prepared(options, options.seed, options.test_rows):
        count, bench.batch_size = len(bench.labels), options.batch_size
        for way in options.ways:
            candidate, made, probabilities = ways(count, classes)[way], {}, []

            def accuracy(outputs: Any, right: Any = right) -> float:
                return float((outputs.argmax(1) == right).mean())

            for number in range(options.networks):
                made[number] = bench.trained(candidate, np.arange(count), options.seed + 1000 * number, lambda: None)
                probabilities.append(softmax(bench.logits(made[number], tested), 1))
            line = {"data": name, "rows": count, "batch_size": options.batch_size, "way": way}
            line["one"] = np.mean([*map(accuracy, probabilities)])
            for size, subset_count in [of for of in SUBSETS.items() if of[0] <= options.networks]:
                subsets = [*itertools.islice(itertools.combinations(made, size), subset_count)]
                with patch.object(bench, "trained", lambda candidate, rows, number, tick, made=made: made[number]):
                    means = [
                        mean_of(bench, [(candidate, number) for number in subset], np.arange(count), lambda: None)[0]
                        for subset in subsets
                    ]
                outputs = {
                    "weights": [bench.logits(mean, tested) for mean in means],
                    "probabilities": [sum(probabilities[number] for number in subset) for subset in subsets],
                }
                line |= {f"{of} of {size}": np.mean([*map(accuracy, each)]) for of, each in outputs.items()}
            append(options.table, line)


if __name__ == "__main__":
    main()
