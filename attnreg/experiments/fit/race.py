"""A fit from its first step to its last: tries race over folds, the best is chosen, scored and trained on all rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from attnreg._files import write_text
from attnreg.experiments.fit.answers import Values
from attnreg.experiments.fit.choice import (
    Estimate,
    bias_corrected,
    certain_decay,
    chosen_of,
    decay_of,
    probability_best,
    scores_of,
    temperature_of,
)
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.rows import Numbers, Rows
from attnreg.experiments.fit.side_by_side import Processes
from attnreg.experiments.fit.tries import Bench, Logits, Try

PENALTIES = (0.01, 0.1, 1.0)  # of linear probes
LOSING = 0.05  # a try that is the best with less than this probability is dropped
_ROW_EPOCHS, FEWEST_EPOCHS, MOST_EPOCHS = 5000, 5, 20  # of a fine-tuning: fewer rows are seen more often
_OF_CLASS = 100  # row epochs of a class, at least
PART = 0.2  # of the time, that a fine-tuning on all rows takes at most; and that probes take before it
_RATE, _WIDTH = 1e-4, 384  # learning rate, which suits states of this width; wider models need a lower one
_PARTS = (0.5, 0.7, 1.0)  # of the rows of a fold, for the learning curve, whose last piece counts

Change = Callable[[Try], Mapping[str, Any]]
#: What may help fine-tuning that a linear probe has beaten: time may have been short for it, or its steps too long.
REMEDIES: Sequence[Change] = (
    lambda leader: {"epochs": 2 * leader.epochs},
    lambda leader: {"learning_rate": leader.learning_rate / 2},
)
#: What joins the race after a fold, if there is time: changes of the try that leads, of those that they change.
LATER: Sequence[Change] = (
    lambda leader: {"ad_drop": leader.epochs > 1 and not leader.contrasts},
    *REMEDIES,
    lambda leader: {"r_drop": not leader.contrasts},
)

Place = tuple[int, int]  # a repeat and a fold of it
Job = tuple[Try, Place]


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
    certain_decay: float  #: that, less its standard error
    trained_on: float  #: share of all rows that tries were trained on
    trainings: int
    curve: dict[int, float]  #: scores of a linear probe by the number of rows
    since: dict[Try, float]  #: seconds before the trainings with which each try began
    seconds: float  #: of the race
    in_bfloat16: bool  #: whether networks computed in it while they were trained
    at_a_time: int  #: trainings, at the end of the race
    ended: str  #: why the race ended, as a sentence

    def summary(self) -> dict[str, object]:
        """Return what ``result.json`` holds."""
        others = (
            "temperature", "decay", "certain_decay", "trained_on", "trainings",
            "seconds", "in_bfloat16", "at_a_time", "curve", "ended",
        )  # fmt: skip
        return {
            "best": str(self.best),
            "score": self.estimate._asdict(),
            "in_folds": self.in_folds._asdict(),
            "tries": {str(which): score for which, score in zip(self.tries, self.scores, strict=True)},
            "dropped": {str(which): score for which, score in self.dropped.items()},
            **{name: getattr(self, name) for name in others},
        }


class Race:
    """Out-of-fold logits of tries, trained when asked for; in a folder, they are kept and read again."""

    def __init__(self, bench: Bench, rows: Rows, clock: Clock, seed: int, folder: Path | None) -> None:
        self.bench, self.rows, self.clock, self.seed = bench, rows, clock, seed
        self.answers = rows.answers
        self.folder, self.repeats, self.processes = folder, list(rows.repeats(seed)), Processes(bench)
        self.places: list[Place] = [(r, fold) for r, folds in enumerate(self.repeats) for fold in range(len(folds))]
        self.done: dict[Try, dict[Place, Logits]] = {}
        self.since: dict[Try, float] = {}
        self.alive, self.dropped = list[Try](), dict[Try, float]()
        self.folds, self.trainings = len(self.repeats[0]), 0

    def run(self) -> Outcome:
        """Race tries until the time is spent, and choose the best."""
        began = self.clock.spent
        probes = [Try(penalty=penalty) for penalty in PENALTIES]
        for fold in range(self.folds):
            self.train(itertools.product(probes, [(0, fold)]))
            if self.clock.spent - began > PART * self.clock.budget:
                break
        self.alive = [*self.done]
        probe = probes[int(np.argmax(self.scores(probes)))]
        self.clock.tell(f"{probe}: {self.answers.shown(self.scores([probe])[0])} out of fold")
        self.bench.measure()
        self.processes.start(self.clock.left)
        if self.processes.count > 1:
            self.clock.tell(f"{self.processes.count} trainings at a time")
        self.alive = [*(entrants := self._entrants(probe)), *self.alive]
        later = [*LATER]
        ended = f"All {len(self.places)} folds were used."
        number = 0
        while number < len(self.places):
            repeat, fold = self.places[number]
            # A repeat is of use only as a whole.
            needed = self.places[number : number + 1 if repeat == 0 or fold else number + self.folds]
            while repeat == 0 and len(self.tuned) > 1 and not self.is_time_for(itertools.product(self.tuned, needed)):
                leader = self.leader(self.tuned)
                others = [each for each in self.tuned if each != leader]
                self.drop(others[int(np.argmin(self.scores(others)))])
            if not self.tuned:
                ended = (
                    "A linear probe was better than all fine-tuning." if entrants else "Time was short for fine-tuning."
                )
                break
            if not self.is_time_for(itertools.product(self.tuned, needed)):
                ended = f"Time ended the race after {number} of at most {len(self.places)} folds."
                break
            together = self._together(number)
            self.train(itertools.product(self.alive, together))
            number += len(together)
            raced = self.tuned
            for each in self._losing():
                self.drop(each)
            for change in [each for each in later if self.tuned or each in REMEDIES]:
                able = [each for each in self.tuned or raced if replace(each, **change(each)) != each]
                if able and self.join(replace(leader := self.leader(able), **change(leader)), number):
                    later.remove(change)
                    break
        return self._conclude(probe, ended)

    @property
    def tuned(self) -> list[Try]:
        """The ways of fine-tuning that are in the race."""
        return [each for each in self.alive if not each.is_probe]

    def drop(self, which: Try) -> None:
        """Take a try out of the race."""
        self.dropped[which] = float(self.scores([which])[0])
        self.clock.tell(f"dropped {which}: {self.answers.shown(self.dropped[which])}")
        self.alive.remove(which)

    def join(self, which: Try, folds: int) -> bool:
        """Let a new try make up for the first folds, if there is time for that and for the rest of the first repeat."""
        places, following = self.places[:folds], self.places[folds : max(self.folds, folds + 1)]
        jobs = [*itertools.product([which], places), *itertools.product([which, *self.tuned], following)]
        if which in self.done or not self.is_time_for(jobs):
            return False
        self.train(itertools.product([which], places))
        self.alive.insert(len(self.tuned), which)  # probes come last
        return True

    def _entrants(self, probe: Try) -> list[Try]:
        """Return the ways of fine-tuning that begin the race, as long as there is time for."""
        plan = None if self.folder is None else self.folder / "epochs"  # a fit that goes on must have the same tries
        if plan is not None and plan.is_file():
            affordable = float(plan.read_text())
        else:
            affordable = self.clock.left / (self.bench.seconds * len(self.rows))
        row_epochs = max(_ROW_EPOCHS, _OF_CLASS * self.answers.outputs)
        most = min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(row_epochs / len(self.rows))))
        rate = _RATE * min(1.0, _WIDTH / self.bench.width)
        plain = Try(min(most, int(affordable * PART)), rate)
        after_probe = min(-(-most // 2), int(affordable / 4))
        with_head = Try(max(1, after_probe), rate, penalty=probe.penalty, fits_head=True)
        # Those come first that usually score most; pairs of more classes than this have no room in a batch.
        some = [with_head, plain] if plain.epochs >= FEWEST_EPOCHS else [with_head]
        if self.answers.classes is not None and 2 * self.answers.outputs <= self.bench.batch_size:
            some.insert(0, replace(with_head, penalty=1.0, fits_head=False, contrasts=True))
        while some and not self.is_time_for(itertools.product(some, self.places[: min(2, len(some))])):
            some.pop()
        if some and plan is not None:  # a fit that goes on with a larger budget plans anew if nothing was trained
            write_text(plan, str(affordable))
        return some

    def is_time_for(self, jobs: Iterable[Job]) -> bool:
        """Whether there is time for some trainings, and then for the longest on all rows; for what is kept there is."""
        jobs, (train, held) = [*jobs], self.repeats[0][0]
        if all(self.is_kept(*job) for job in jobs):
            return True
        passes = [which.passes for which, _ in jobs]
        rows = self.processes.longest([each * len(train) + len(held) / 3 for each in passes])
        return self.bench.seconds * (rows + 1.2 * max(passes) * len(self.rows)) + 2.0 <= self.clock.left

    def is_kept(self, which: Try, place: Place) -> bool:
        """Whether a try was trained on a fold, also by a process that was stopped."""
        path = self._path(which, place)
        return place in self.done.get(which, {}) or (path is not None and path.is_file())

    def _path(self, which: Try, place: Place) -> Path | None:
        name = f"{str(which).replace(' ', '-')} {self.places.index(place)}.npz"
        return None if self.folder is None else self.folder / name

    def train(self, jobs: Iterable[Job]) -> None:
        """Train tries on folds, and keep their logits of the rows held out, unless they are there."""
        new: list[Job] = []
        for which, place in jobs:
            self.since.setdefault(which, self.clock.spent)
            path = self._path(which, place)
            if place in self.done.get(which, {}):
                continue
            if path is None or not path.is_file():
                new.append((which, place))
                continue
            kept = np.load(path)
            self.clock.resume(float(kept["seconds"]))
            self._keep(which, place, kept["logits"])
        given = [(which, *self.repeats[r][fold], self.seed + self.places.index((r, fold))) for which, (r, fold) in new]
        names = ", ".join({str(which): None for which, _ in new if not which.is_probe})
        began = self.clock.spent
        for number, logits in self.processes.out_of_fold(given, lambda: self.clock.tick(f"training {names}")):
            which, place = new[number]
            if (path := self._path(which, place)) is not None:
                unfinished = path.with_suffix(".new")
                with unfinished.open("wb") as file:
                    np.savez(file, logits=logits, seconds=self.clock.spent - began)
                unfinished.replace(path)
            began = self.clock.spent
            self.trainings += not which.is_probe
            self._keep(which, place, logits)

    def _keep(self, which: Try, place: Place, logits: Logits) -> None:
        self.done.setdefault(which, {})[place] = logits
        if not which.is_probe:
            held = self.repeats[place[0]][place[1]][1]
            score = self.answers(self.rows.labels[held], self.answers.predicted(logits))
            self.clock.tell(f"{which}, fold {self.places.index(place) + 1}: {self.answers.shown(score)}")

    def _together(self, number: int) -> list[Place]:
        """Return the folds that are raced on next: as many of a repeat as occupy all processes, if there is time."""
        most = min(self.folds - self.places[number][1], self.processes.count // len(self.tuned))
        while most > 1 and not self.is_time_for(itertools.product(self.tuned, self.places[number : number + most])):
            most -= 1
        return self.places[number : number + max(1, most)]

    def table(self, tries: list[Try]) -> tuple[Values, Numbers, NDArray[np.float64]]:
        """Return predictions ``(tries, repeats, n)``, the rows, and logits, of the folds that all of them have done."""
        shared = set.intersection(*(set(self.done[each]) for each in tries))
        whole = [r for r in range(len(self.repeats)) if all((r, fold) in shared for fold in range(self.folds))]
        repeats = whole or [0]
        places = [[(r, fold) for fold in range(self.folds) if (r, fold) in shared] for r in repeats]
        rows = np.sort(np.concatenate([self.repeats[r][fold][1] for r, fold in places[0]]))
        logits = np.empty((len(tries), len(repeats), len(rows), self.answers.outputs))
        for number, each in enumerate(tries):
            for repeat, some in enumerate(places):
                held = np.concatenate([self.repeats[r][fold][1] for r, fold in some])
                found = np.concatenate([self.done[each][place] for place in some])
                logits[number, repeat] = found[np.argsort(held)]
        return self.answers.predicted(logits), rows, logits

    def scores(self, tries: list[Try]) -> NDArray[np.float64]:
        """Return the scores of tries on the folds that all of them have done."""
        predictions, rows, _ = self.table(tries)
        return scores_of(self.answers, self.rows.labels[rows], predictions)

    def leader(self, tries: list[Try]) -> Try:
        """Return the try that would be chosen."""
        predictions, rows, _ = self.table(tries)
        labels, units = self.rows.labels[rows], self.rows.units[rows]
        return tries[chosen_of(self.answers, labels, predictions, units, seed=self.seed)]

    def _losing(self) -> list[Try]:
        """Return the tries in the race that are hardly the best, by a bootstrap of the rows."""
        predictions, rows, _ = self.table(self.alive)
        shares = probability_best(self.answers, self.rows.labels[rows], predictions, seed=self.seed)
        return [each for each, share in zip(self.alive, shares, strict=True) if share < LOSING]

    def _conclude(self, probe: Try, ended: str) -> Outcome:
        """Choose the best try, and estimate its score on new rows."""
        tries = self.alive
        predictions, rows, logits = self.table(tries)
        labels, scores = self.rows.labels[rows], self.scores(tries)
        best = tries.index(self.leader(tries))
        # Those that were dropped were chosen from, too: without them, the promise would be too high.
        pool = np.stack([*predictions, *(self._filled(each, rows, predictions[best]) for each in self.dropped)])
        in_folds, chosen = bias_corrected(self.answers, labels, pool, self.rows.units[rows], seed=self.seed)
        # Samples may choose another that scores higher, and is not the one that is trained.
        in_folds = Estimate(*(np.array(in_folds) - max(0.0, in_folds.score - scores[best])).tolist())
        share = float(np.mean([len(train) for train, _ in self.repeats[0]]) / len(self.rows))
        in_each = self._curve(probe)
        curve = {size: float(np.mean(scores)) for size, scores in in_each.items()}
        # With all rows instead of those of a fold, errors fall as the learning curve says, as far as it is certain.
        decay = decay_of([*curve], [*curve.values()])
        certain = certain_decay([*in_each], np.array([*in_each.values()]))
        whole = Estimate(*(1 - (1 - each) * share**certain for each in in_folds))
        of_best = logits[best].mean(0)
        temperature = 1.0 if self.answers.classes is None else temperature_of(of_best, labels)
        return Outcome(
            tries[best], whole, in_folds, tries, scores.tolist(), chosen[: len(tries)], self.dropped, rows, of_best,
            temperature, decay, certain, share, self.trainings, curve, self.since,
            self.clock.spent, self.bench.in_bfloat16, self.processes.count, ended,
        )  # fmt: skip

    def _filled(self, which: Try, rows: Numbers, best: Values) -> Values:
        """Return the predictions of a try that was dropped on some rows, and those of the best on all others."""
        filled, place = best.copy(), np.full(len(self.rows), -1)
        place[rows] = np.arange(len(rows))
        for (repeat, fold), logits in self.done[which].items():
            held = place[self.repeats[repeat][fold][1]]
            if repeat == 0:
                filled[0, held[held >= 0]] = self.answers.predicted(logits)[held >= 0]
        return filled

    def _curve(self, probe: Try) -> dict[int, list[float]]:
        """Return the scores of a linear probe in each fold by the number of rows that it is fitted to."""
        draw, curve, labels = np.random.default_rng(self.seed), dict[int, list[float]](), self.rows.labels
        strata = self.answers.strata(labels)
        for part in _PARTS:  # of each class
            scores, sizes = [], []
            for train, held in self.repeats[0]:
                of_class = [draw.permutation(train[strata[train] == each]) for each in np.unique(strata[train])]
                some = np.concatenate([rows[: max(1, round(part * len(rows)))] for rows in of_class])
                logits = self.bench.out_of_fold(probe, some, held, self.seed, lambda: None)
                scores.append(self.answers(labels[held], self.answers.predicted(logits)))
                sizes.append(len(some))
            curve[round(np.mean(sizes))] = scores
        return curve

    def final(self, best: Try) -> nn.Module:
        """Train the best try on all rows."""
        self.clock.tell(f"training {best} on all {len(self.rows)} rows")
        everything = np.arange(len(self.rows))
        return self.bench.trained(best, everything, self.seed, lambda: self.clock.tick(f"{best}, all rows"))
