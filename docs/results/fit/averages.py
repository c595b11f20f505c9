"""Is the mean of several fine-tunings better than one? One line per data set and way, appended to a table.

Usage: python docs/results/fit/averages.py TABLE.csv --data DATA --model FOLDER [--sets cr mr ...] [--rows 500]

Rows are drawn by the seed; a way is trained on all of them with four seeds. The table has the mean accuracy of the four
networks, and what means of the weights of two, three and four score, and means of their probabilities, on at most 1,200
test rows.
"""

from __future__ import annotations

import argparse
import itertools
import runpy
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from scipy.special import softmax

from attnreg import TextClassifier
from attnreg.experiments.fit import race
from attnreg.experiments.fit.rows import texts_in
from attnreg.experiments.fit.tries import Try

SEED, NETWORKS, TEST_ROWS = 810, 4, 1200
SUBSETS = {2: 3, 3: 2, 4: 1}  # by size, how many subsets of the networks
beside = runpy.run_path(str(Path(__file__).with_name("beside.py")))


def prepared(model: str, texts: list[Any], labels: list[str]) -> tuple[TextClassifier, race.Race]:
    """Return a classifier and its race, before the first step."""
    classifier = TextClassifier(model, seed=SEED, device="cpu")
    with patch.object(race.Race, "run", autospec=True, side_effect=KeyError) as run, suppress(KeyError):
        classifier.fit(texts, labels)
    run.call_args.args[0].bench.measure()
    return classifier, run.call_args.args[0]


def ways(rows: int, classes: int) -> dict[str, Try]:
    """Return ways of fine-tuning, for as long as a race with enough time would."""
    plain = Try(min(race.MOST_EPOCHS, max(race.FEWEST_EPOCHS, round(max(5000, 100 * classes) / rows))), 1e-4)
    half = -(-plain.epochs // 2)
    contrasts = Try(half, 1e-4, contrasts=True)
    return {"contrastive": contrasts, "LP-FT": Try(half, 1e-4, penalty=0.1, fits_head=True), "plain": plain}


def main() -> None:
    """Append a line for each data set and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sets", nargs="+", default=["cr", "mr", "trec", "sst2_sentences", "subj", "mrpc"])
    parser.add_argument("--ways", nargs="+", default=["contrastive", "LP-FT"])
    parser.add_argument("--rows", type=int, default=500)
    options = parser.parse_args()
    for name in options.sets:
        texts, labels = beside["drawn"](*beside["split"](options.data / name, "train"), SEED, options.rows)
        test, gold = beside["split"](options.data / name, "test")
        some = np.random.default_rng(0).permutation(len(test))[:TEST_ROWS]
        classifier, prepared_race = prepared(options.model, texts, labels)
        torch.set_num_threads(1)
        bench, classes, all_rows = prepared_race.bench, np.array(classifier.answers_.classes), np.arange(len(texts))
        encoded = classifier._kind.encode(classifier._dataset(texts_in([test[i] for i in some]), [0] * len(some)))
        right = np.array(gold)[some]
        for way in options.ways:
            candidate, made, probabilities = ways(len(texts), len(classes))[way], {}, []

            def accuracy(outputs: Any, right: Any = right, classes: Any = classes) -> float:
                return float((classes[outputs.argmax(1)] == right).mean())

            for number in range(NETWORKS):
                made[number] = bench.trained(candidate, all_rows, SEED + 1000 * number, lambda: None)
                probabilities.append(softmax(bench.logits(made[number], encoded), 1))
            line = {"data": name, "rows": len(texts), "way": way, "one": np.mean([*map(accuracy, probabilities)])}
            for size, count in SUBSETS.items():
                subsets = [*itertools.islice(itertools.combinations(made, size), count)]
                with patch.object(bench, "trained", lambda candidate, rows, number, tick, made=made: made[number]):
                    means = [bench.averaged(candidate, all_rows, subset, lambda: None)[0] for subset in subsets]
                outputs = {
                    "weights": [bench.logits(mean, encoded) for mean in means],
                    "probabilities": [sum(probabilities[number] for number in subset) for subset in subsets],
                }
                line |= {f"{of} of {size}": np.mean([*map(accuracy, each)]) for of, each in outputs.items()}
            print(line, flush=True)
            new = not options.table.is_file()
            pd.DataFrame([line]).to_csv(options.table, mode="a", header=new, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
