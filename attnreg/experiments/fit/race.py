"""A fit from its first step to its last: tries race over folds, the best is chosen, scored and trained on all rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from attnreg.experiments.fit.choice import (
    Estimate,
    bias_corrected,
    decay_of,
    probability_best,
    score_of,
    scores_of,
    temperature_of,
)
from attnreg.experiments.fit.rows import Numbers, Rows
from attnreg.experiments.fit.tries import Bench, Logits, Try
from attnreg.experiments.results.document import duration

PENALTIES = (0.01, 0.1, 1.0)  # of linear probes
LOSING = 0.05  # a try that is the best with less than this probability is dropped
_ROW_EPOCHS = 5000  # of a fine-tuning: fewer rows are seen more often
_PARTS = (0.25, 0.5, 1.0)  # of the rows of a fold, for the learning curve
Say = Callable[[str], None]


class Clock:
    """The budget of a fit, in seconds of this machine, of which an earlier part of the fit may have spent some."""

    def __init__(self, budget: float, say: Say) -> None:
        self.budget, self.say, self._began, self._said = budget, say, time.monotonic(), time.monotonic()

    def resume(self, seconds: float) -> None:
        """Count seconds that an earlier process has spent."""
        self._began -= seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.budget - (time.monotonic() - self._began)

    def tick(self, doing: str) -> None:
        """Say what is being done and how much time is left, every half a minute."""
        if time.monotonic() - self._said > 30:
            self.tell(doing)

    def tell(self, what: str) -> None:
        """Say something, and how much time is left."""
        self._said = time.monotonic()
        self.say(f"{what}  (at most {duration(max(0.0, self.left))} left)")


@dataclass
class Outcome:
    """What a fit has found. Tries and their out-of-fold results are those that were on the same rows."""

    best: Try
    estimate: Estimate  #: the score of the best try on new rows, trained on all rows
    in_folds: Estimate  #: that of tries trained on the rows of folds
    tries: list[Try]  #: those that raced to the end, and the probes
    scores: list[float]
    chosen: list[float]  #: how often each try would have been chosen
    dropped: dict[Try, float]  #: tries that were dropped, with their score on their rows
    rows: Numbers  #: the rows that tries were scored on
    logits: Logits  #: of the best try, of these rows, mean over repeats
    temperature: float
    decay: float  #: the power with which errors fall with the number of rows
    trained_on: float  #: share of all rows that tries were trained on
    trainings: int
    untried: list[Try] = field(default_factory=list)


class Race:
    """Out-of-fold logits of tries, trained when asked for; in a folder, they are kept and read again."""

    def __init__(self, bench: Bench, rows: Rows, clock: Clock, metric: str, seed: int, folder: Path | None) -> None:
        self.bench, self.rows, self.clock, self.metric, self.seed = bench, rows, clock, metric, seed
        self.folder, self.repeats = folder, list(rows.repeats(seed))
        self.done: dict[Try, dict[tuple[int, int], Logits]] = {}
        self.trainings = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            clock.resume(sum(float(np.load(each)["seconds"]) for each in folder.glob("*.npz")))

    def run(self) -> Outcome:
        """Race tries until the time is spent, and choose the best."""
        for penalty in PENALTIES:
            for fold in self._folds(0):
                self.train(Try(penalty=penalty), 0, fold)
        probes = [*self.done]
        best_probe = self.leader(probes)
        self.clock.tell(f"{best_probe}: {self.score(best_probe):.1%} out of fold")
        self.bench.measure()
        alive, later = self._entrants(best_probe)
        dropped: dict[Try, float] = {}
        for repeat, fold in self._places(alive):
            if not all(self.train_in_time(each, repeat, fold, alive) for each in alive):
                break
            for each in self._losing([*alive, *probes]):
                dropped[each] = self.score(each)
                self.clock.tell(f"dropped {each}: {dropped[each]:.1%}")
                alive, probes = ([every for every in some if every != each] for some in (alive, probes))
            if later and alive and (idea := later.pop(0)(self.leader(alive))) not in {*self.done}:
                places = [*self.done[alive[0]]]
                if self.cost(idea) * (len(places) + 1) <= self.clock.left - self.reserve([*alive, idea]):
                    for place in places:
                        self.train(idea, *place)
                    alive.append(idea)
            if not alive:
                break
        return self._conclude([*probes, *alive], dropped, best_probe)

    def _entrants(self, probe: Try) -> tuple[list[Try], list[Callable[[Try], Try]]]:
        """Return the ways of fine-tuning that begin the race, as many as there is time for, and what may join later."""
        epochs = int(np.clip(round(_ROW_EPOCHS / len(self.rows)), 3, 20))
        plain = Try(epochs, 1e-4)
        with_head = Try(-(-epochs // 2), 1e-4, penalty=probe.penalty, fits_head=True)
        wanted = [with_head, plain]
        while epochs > 1 and self.cost(with_head) + self.reserve([with_head]) > self.clock.left:
            epochs -= 1
            with_head = replace(with_head, epochs=epochs)
            wanted = [with_head]
        admitted: list[Try] = []
        for each in wanted:
            some = [*admitted, each]
            if (1 if not admitted else 2) * sum(map(self.cost, some)) + self.reserve(some) <= self.clock.left:
                admitted = some
        return admitted, [
            lambda leader: replace(leader, ad_drop=True),
            lambda leader: replace(leader, epochs=2 * leader.epochs),
            lambda leader: replace(leader, learning_rate=leader.learning_rate / 2),
            lambda leader: replace(leader, r_drop=True),
        ]

    def _folds(self, repeat: int) -> range:
        return range(len(self.repeats[repeat]))

    def _places(self, alive: list[Try]) -> Iterator[tuple[int, int]]:
        """Yield repeats and folds; a repeat after the first only if there is time for all of it."""
        for repeat in range(len(self.repeats)):
            yield from ((repeat, fold) for fold in self._folds(repeat))

    def cost(self, which: Try) -> float:
        """Estimate the seconds of training a try on a fold."""
        train, held = self.repeats[0][0]
        return self.bench.seconds * (which.passes * len(train) + len(held) / 3)

    def reserve(self, alive: list[Try]) -> float:
        """Estimate the seconds of training one of some tries on all rows, with some to spare."""
        return 1.2 * self.bench.seconds * len(self.rows) * max((each.passes for each in alive), default=0.0) + 2.0

    def train_in_time(self, which: Try, repeat: int, fold: int, alive: list[Try]) -> bool:
        """Train a try on a fold if there is time for it, and say whether there was."""
        if self.cost(which) > self.clock.left - self.reserve(alive):
            return False
        self.train(which, repeat, fold)
        return True

    def train(self, which: Try, repeat: int, fold: int) -> None:
        """Train a try on a fold and keep its logits of the rows held out, unless they are there."""
        train, held = self.repeats[repeat][fold]
        number = repeat * len(self.repeats[0]) + fold
        path = None if self.folder is None else self.folder / f"{str(which).replace(' ', '-')} {number}.npz"
        if path is not None and path.is_file():
            logits: Logits = np.load(path)["logits"]
        else:
            began, doing = time.perf_counter(), f"{which}, fold {number + 1}"
            logits = self.bench.out_of_fold(which, train, held, self.seed + number, lambda: self.clock.tick(doing))
            self.trainings += not which.is_probe
            if path is not None:
                new = path.with_suffix(".new")
                with new.open("wb") as file:
                    np.savez(file, logits=logits, seconds=time.perf_counter() - began)
                new.replace(path)
        self.done.setdefault(which, {})[repeat, fold] = logits
        if not which.is_probe:
            right = score_of(self.metric, self.rows.labels[held], logits.argmax(1), len(self.rows.classes))
            self.clock.tell(f"{which}, fold {number + 1}: {right:.1%}")

    def table(self, tries: list[Try]) -> tuple[NDArray[np.int64], Numbers, NDArray[np.float64]]:
        """Return predictions ``(tries, repeats, n)``, the rows, and logits, of the folds that all of them have done."""
        shared = set.intersection(*(set(self.done[each]) for each in tries))
        whole = [r for r in range(len(self.repeats)) if all((r, fold) in shared for fold in self._folds(r))]
        repeats = whole or [0]
        places = [[(r, fold) for fold in self._folds(r) if (r, fold) in shared] for r in repeats]
        rows = np.sort(np.concatenate([self.repeats[r][fold][1] for r, fold in places[0]]))
        logits = np.empty((len(tries), len(repeats), len(rows), len(self.rows.classes)))
        for number, each in enumerate(tries):
            for repeat, some in enumerate(places):
                held = np.concatenate([self.repeats[r][fold][1] for r, fold in some])
                found = np.concatenate([self.done[each][place] for place in some])
                logits[number, repeat] = found[np.argsort(held)]
        return logits.argmax(-1), rows, logits

    def score(self, which: Try) -> float:
        """Return the score of a try on all folds that it has done."""
        predictions, rows, _ = self.table([which])
        return self._scores(predictions, rows)[0]

    def leader(self, tries: list[Try]) -> Try:
        """Return the try that scores best on the folds that all have done."""
        predictions, rows, _ = self.table(tries)
        return tries[int(np.argmax(self._scores(predictions, rows)))]

    def _scores(self, predictions: NDArray[np.int64], rows: Numbers) -> list[float]:
        everything = np.arange(len(rows))
        return scores_of(self.metric, self.rows.labels[rows], predictions, everything, len(self.rows.classes))

    def _losing(self, tries: list[Try]) -> list[Try]:
        """Return the tries that are hardly the best, by a bootstrap of the rows."""
        predictions, rows, _ = self.table(tries)
        labels, classes = self.rows.labels[rows], len(self.rows.classes)
        shares = probability_best(self.metric, labels, predictions, classes, seed=self.seed)
        return [each for each, share in zip(tries, shares, strict=True) if share < LOSING]

    def _conclude(self, tries: list[Try], dropped: dict[Try, float], probe: Try) -> Outcome:
        """Choose the best try, and estimate its score on new rows."""
        predictions, rows, logits = self.table(tries)
        labels, classes = self.rows.labels[rows], len(self.rows.classes)
        scores = self._scores(predictions, rows)
        best = int(np.argmax(scores))
        in_folds, chosen = bias_corrected(
            self.metric, labels, predictions, classes, self.rows.units[rows], seed=self.seed
        )
        share = float(np.mean([len(train) for train, _ in self.repeats[0]]) / len(self.rows))
        decay = self._decay(probe)
        # With all rows instead of those of a fold, errors fall as the learning curve says.
        whole = Estimate(*(1 - (1 - each) * share**decay for each in in_folds))
        of_best = logits[best].mean(0)
        return Outcome(
            tries[best], whole, in_folds, tries, scores, chosen, dropped, rows, of_best,
            temperature_of(of_best, labels), decay, share, self.trainings,
        )  # fmt: skip

    def _decay(self, probe: Try) -> float:
        """Return how fast errors fall with the number of rows, by the learning curve of a linear probe."""
        draw, sizes, scores = np.random.default_rng(self.seed), [], []
        for part in _PARTS:
            found = []
            for fold, (train, held) in enumerate(self.repeats[0]):
                if part == 1.0:
                    logits = self.done[probe][0, fold]
                else:
                    some = draw.permutation(train)[: max(2, round(part * len(train)))]
                    if len({*self.rows.labels[some].tolist()}) < 2:
                        continue
                    logits = self.bench.out_of_fold(probe, some, held, self.seed, lambda: None)
                found.append(score_of(self.metric, self.rows.labels[held], logits.argmax(1), len(self.rows.classes)))
            sizes.append(round(part * len(self.repeats[0][0][0])))
            scores.append(float(np.mean(found)))
        return decay_of(sizes, scores)

    def final(self, best: Try) -> nn.Module:
        """Train the best try on all rows."""
        self.clock.tell(f"training {best} on all {len(self.rows)} rows")
        everything = np.arange(len(self.rows))
        return self.bench.trained(best, everything, self.seed, lambda: self.clock.tick(f"{best}, all rows"))
