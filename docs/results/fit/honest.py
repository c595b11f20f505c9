"""Is what `attnreg fit` promises what it then scores? Races of stand-ins on real sentences, many of them, in minutes.

Usage: python docs/results/fit/honest.py --data DATA --model FOLDER [--sets cr trec] [--sizes 60 150 500] [--draws 40]
       [--budgets 30 60 150 400]

Each draw takes some rows of a data set to fit, and all others to test. A fine-tuning is stood in for by logistic
regression on a random part of the model's features, another part for each try, and takes as long as told; a probe
reads fewer of them (`--probe 1 --tuned 0.5`: more). All else is the race itself: what joins, what is dropped, when time
ends it, and the promise, at budgets of some epochs, in turn.
"""

from __future__ import annotations

import argparse
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import beside
import numpy as np
import torch
from scipy import special
from sklearn.linear_model import LogisticRegression

from attnreg import TextClassifier
from attnreg.experiments.fit.answers import score_of
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.race import Race
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.fit.tries import Bench, Try


@dataclass
class StandIn:
    """A bench on which nothing is fine-tuned. Its clock goes on by the time that fine-tuning would take."""

    features: Any
    labels: Any
    classes: int
    time: list[float]
    parts: tuple[float, float]  #: of the features, that a probe and a fine-tuning read
    seconds = 0.01
    width = 384
    batch_size = 16
    in_bfloat16 = False
    threads = 1
    ad_drop_layer = 0
    next_length = 0  # nothing is cut

    @staticmethod
    def slowness(which: Try) -> float:
        """Return how many times as long a pass takes as usual."""
        return 1.0

    @staticmethod
    def has_memory_for(which: Try) -> bool:
        """Nothing takes memory."""
        return True

    def measure(self) -> None:
        """Leave the made-up time as it is."""

    def read_by(self, which: Try) -> Any:
        """Return the features that a try reads."""
        draw = np.random.default_rng(zlib.crc32(("probe" if which.is_probe else str(which)).encode()))
        return self.features[:, draw.random(self.features.shape[1]) < self.parts[not which.is_probe]]

    def fitted(self, which: Try, train: Any) -> Any:
        """Fit logistic regression as a try."""
        return LogisticRegression(C=which.penalty, max_iter=1000).fit(self.read_by(which)[train], self.labels[train])

    def out_of_fold(self, which: Try, train: Any, held: Any, seed: int, tick: Any) -> Any:
        """Return logits of rows held out, as the bench of a fit does."""
        self.time[0] += self.seconds * which.passes * len(train)
        fitted = self.fitted(which, train)
        scores = fitted.decision_function(self.read_by(which)[held])
        logits = np.full((len(held), self.classes), -50.0)
        both = scores if scores.ndim == 2 else np.stack([-scores, scores], 1) / 2
        logits[:, fitted.classes_] = special.log_softmax(both, axis=1)
        return logits


def drawn(
    features: Any, labels: Any, size: int, seed: int, parts: tuple[float, float], epochs: int
) -> dict[str, float]:
    """Return what a race on some rows promises, minus the score on all others, in points, and whether it covers it."""
    order = np.random.default_rng([seed, size]).permutation(len(labels))
    classes, counts = np.unique(labels[order[:size]], return_counts=True)
    known = order[np.isin(labels[order], classes[counts >= 4])]
    train = known[np.isin(known, order[:size])]
    test = known[np.isin(known, order[size:])]
    rows = Rows.checked([f"row {number}" for number in train], labels[train])
    time = [0.0]
    Clock.now = staticmethod(lambda: time[0])
    bench = StandIn(features, np.searchsorted(rows.answers.classes, labels), len(rows.answers.classes), time, parts)
    here = StandIn(features[train], rows.labels, len(rows.answers.classes), time, parts)
    budget = epochs * bench.seconds * len(train)
    found = Race(here, rows, Clock(budget, lambda text: None), seed, None).run()  # type: ignore[arg-type]
    predicted = bench.fitted(found.best, train).predict(bench.read_by(found.best)[test])
    score = score_of("accuracy", bench.labels[test], predicted, len(rows.answers.classes))
    low, high = found.estimate[1:]
    return {
        "test": 100 * score,
        "promised - test": 100 * (found.estimate.score - score),
        "best in folds - test": 100 * (max(found.scores) - score),
        "in the interval": 100.0 * (low <= score <= high),
    }


def main() -> None:
    """Print a line of means and standard errors for each data set and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sets", nargs="+", default=["cr", "trec"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[60, 150, 500])
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--budgets", nargs="+", type=int, default=[30, 60, 150, 400])
    parser.add_argument("--probe", type=float, default=0.3)
    parser.add_argument("--tuned", type=float, default=0.8)
    options = parser.parse_args()
    for name in options.sets:
        texts, labels = list[Any](), list[str]()
        for split in ("train", "validation", "test"):
            for whole, part in zip((texts, labels), beside.split(options.data / name, split), strict=True):
                whole += part
        rows = Rows.checked(texts, labels)
        model = TextClassifier(options.model, device="cpu")
        model.answers_, model.columns_ = rows.answers, [*rows.columns]
        network = model._load(str(options.model))
        given = model._dataset(rows.texts, rows.labels.tolist())
        states = Bench(network, model._kind, given, 16, torch.device("cpu"), 0).encoded[0].states
        features = ((states - states.mean(0)) / states.std()).numpy()
        for size in options.sizes:
            parts = options.probe, options.tuned
            found = [
                drawn(features, rows.labels, size, seed, parts, options.budgets[seed % len(options.budgets)])
                for seed in range(options.draws)
            ]
            columns = {key: np.array([each[key] for each in found]) for key in found[0]}
            error = len(found) ** -0.5
            said = [f"{key} {values.mean():+.1f} ± {values.std() * error:.1f}" for key, values in columns.items()]
            print(f"{name}, {size} rows: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
