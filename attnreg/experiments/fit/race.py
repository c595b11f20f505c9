"""A fit from its first step to its last: tries race over folds, the best is chosen, scored and trained on all rows."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnreg._files import write_text
from attnreg.errors import AttnRegWarning
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
    widened,
)
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.outcome import Outcome
from attnreg.experiments.fit.rows import MANY, Numbers, Rows
from attnreg.experiments.fit.side_by_side import Processes
from attnreg.experiments.fit.tries import Bench, Logits, Try
from attnreg.experiments.results.document import duration

PENALTIES = (0.01, 0.1, 1.0)  # of linear probes
LOSING = 0.05  # a try is dropped if its probability of being the best is lower
_ROW_EPOCHS, FEWEST_EPOCHS, MOST_EPOCHS = 5000, 5, 20  # of a fine-tuning: fewer rows are seen more often
_CLASS_ROW_EPOCHS = 100  # per class, at least
PART = 0.2  # of the time: at most for fine-tuning on all rows; and for probes in folds
_FOLDS_FIRST = 2  # before a second training on all rows, which is worth more than further folds
LONGER = 0.2  # of the time left: at most for probes with more tokens
_SLOWER = 3.0  # times as long as before takes the reading of texts that are cut at twice as many tokens, at most
_RATE, _WIDTH = 1e-4, 384  # a learning rate for states of this width; wider models need a lower rate
_PARTS = (0.5, 0.7, 1.0)  # of a fold's training rows, for the learning curve

Change = Callable[[Try], Mapping[str, Any]]
#: Changes for fine-tuning that a linear probe has beaten: its epochs may have been too few, or its steps too long.
REMEDIES: Sequence[Change] = (
    lambda leader: {"epochs": 2 * leader.epochs},
    lambda leader: {"learning_rate": leader.learning_rate / 2},
)
#: Changes that join the race after a fold, if there is time: each changes the leader of the tries that it can change.
LATER: Sequence[Change] = (
    lambda leader: {"ad_drop": leader.epochs > 1 and not leader.contrasts},
    *REMEDIES,
    lambda leader: {"r_drop": not leader.contrasts},
)

Fold = tuple[int, int]  # the number of a repeat, and the number of a fold within it
Job = tuple[Try, Fold]


class Race:
    """The race of tries, and their out-of-fold logits, which are kept in the folder, if any, for a later process."""

    def __init__(self, bench: Bench, rows: Rows, clock: Clock, seed: int, folder: Path | None) -> None:
        self.bench, self.rows, self.clock, self.seed = bench, rows, clock, seed
        self.answers = rows.answers
        self.folder, self.repeats, self.processes = folder, list(rows.repeats(seed)), Processes(bench)
        self.all_folds: list[Fold] = [(r, i) for r, folds in enumerate(self.repeats) for i in range(len(folds))]
        self.done: dict[Try, dict[Fold, Logits]] = {}
        self.alive, self.dropped, self.since = list[Try](), dict[Try, float](), dict[Try, float]()
        self.fold_count = len(self.repeats[0])
        self.reserved = 1  # trainings on all rows, for which there is time after a fold
        self._least: dict[int, float] = {}  # seconds, by length; with a larger budget, fine-tuning enters the race

    def run(self) -> Outcome:
        """Race tries until the time is spent, and choose the best."""
        began = self.clock.spent
        probes = [Try(penalty=penalty) for penalty in PENALTIES]
        for fold in self.all_folds[: self.fold_count]:
            self.train(itertools.product(probes, [fold]))
            if self.clock.spent - began > PART * self.clock.budget:
                break
        best = self._at_lengths(probes, self.clock.spent - began)
        probe = best[int(np.argmax(self.scores(best)))]
        # What comes first is not given up for a chance difference: more tokens rarely score less.
        self.alive = sorted(self.done, key=lambda each: each.max_length != probe.max_length)
        self.bench.measure()
        self.processes.start(self.clock.left)
        if self.processes.count > 1:
            self.clock.tell(f"{self.processes.count} trainings at a time")
        entrants: list[Try] = []
        for shorter in reversed(best[: best.index(probe) + 1]):
            if not entrants and self.bench.has_memory_for(shorter):
                entrants = self._entrants(shorter)
        self.alive = [*entrants, *self.alive]
        ended, number, later = f"All {len(self.all_folds)} folds were used.", 0, [*LATER]
        while number < len(self.all_folds):
            repeat, index = self.all_folds[number]
            self.reserved = 1 if number < _FOLDS_FIRST else 2
            # A later repeat counts only as a whole.
            needed = self.all_folds[number : number + 1 if repeat == 0 or index else number + self.fold_count]
            while repeat == 0 and len(self.tuned) > 1 and not self.is_time_for(itertools.product(self.tuned, needed)):
                leader = self.leader(self.tuned)
                followers = [candidate for candidate in self.tuned if candidate != leader]
                self.drop(followers[int(np.argmin(self.scores(followers)))])
            if not self.tuned:
                ended = self._without_tuning(probe, entrants)
                break
            if not self.is_time_for(itertools.product(self.tuned, needed)):
                ended = f"Time ended the race after {number} of at most {len(self.all_folds)} folds."
                break
            folds = self._next_folds(number)
            self.train(itertools.product(self.alive, folds))
            number += len(folds)
            raced, losing = self.tuned, self._losing()
            beaten = {*raced} <= {*losing}
            if beaten and number < self.fold_count:  # few rows, or one bad training, do not end all fine-tuning
                losing.remove(self.leader(raced))
            for loser in losing:
                self.drop(loser)
            for change in [each for each in later if each in REMEDIES or not beaten]:
                able = [way for way in self.tuned or raced if replace(way, **change(way)) != way]
                if able and self.join(replace(leader := self.leader(able), **change(leader)), number):
                    later.remove(change)
                    break
        return self._conclude(probe, ended)

    def _without_tuning(self, probe: Try, entrants: list[Try]) -> str:
        """Say why no fine-tuning is in the race any more."""
        if not entrants:
            return f"Time was short for fine-tuning, which needs a budget above {duration(self._least[0])} here."
        more = probe.max_length
        if more in self._least and entrants[0].max_length < more:
            return (
                f"A linear probe of {more} tokens was better than fine-tuning of fewer tokens; fine-tuning of {more} "
                f"needs a budget above {duration(self._least[more])} here."
            )
        return "A linear probe was better than all fine-tuning."

    def _at_lengths(self, probes: list[Try], taken: float) -> list[Try]:
        """Return the best probe at every length: more tokens, slower than ``taken`` seconds, follow while they help."""
        best: list[Try] = []
        folds, began, limit = [*self.done[probes[0]]], self.clock.spent, LONGER * self.clock.left
        while True:
            best.append(probes[int(np.argmax(self.scores(probes)))])
            *_, before, score = [-math.inf, *self.scores(best)]
            self.clock.tell(f"{best[-1]}: {self.answers.shown(score)} out of fold")
            if score <= before or not (length := self.bench.next_length):
                return best
            probes = [replace(probe, max_length=length) for probe in probes]
            is_read = all(self.is_done(*job) for job in itertools.product(probes, folds))  # by an earlier process
            needed = _SLOWER * self.bench.latest.seconds + taken
            is_time = is_read or self.clock.spent - began + needed <= limit
            if not (is_time and self.bench.read_longer(length)):
                warnings.warn(
                    f"Many texts are cut at {self.bench.latest.kind.max_length} tokens: "
                    f"{'to read more of them failed' if is_time else 'there is no time to read more of them'}. Give "
                    f"{'--max-length' if is_time else 'a larger --budget, or --max-length'}.",
                    AttnRegWarning, stacklevel=2,
                )  # fmt: skip
                return best
            start = self.clock.spent
            self.train(itertools.product(probes, folds))
            taken = self.clock.spent - start

    @property
    def tuned(self) -> list[Try]:
        """The ways of fine-tuning that are in the race."""
        return [candidate for candidate in self.alive if not candidate.is_probe]

    def drop(self, loser: Try) -> None:
        """Take a try out of the race."""
        self.dropped[loser] = float(self.scores([loser])[0])
        self.clock.tell(f"dropped {loser}: {self.answers.shown(self.dropped[loser])}")
        self.alive.remove(loser)

    def join(self, newcomer: Try, number: int) -> bool:
        """Train a new try on the folds before a number, if there is time for these and the rest of the first repeat."""
        past, following = self.all_folds[:number], self.all_folds[number : max(self.fold_count, number + 1)]
        jobs = [*itertools.product([newcomer], past), *itertools.product([newcomer, *self.tuned], following)]
        if newcomer in self.done or not self.is_time_for(jobs):
            return False
        if newcomer.ad_drop and self.bench.ad_drop_layer is None:
            return False
        self.train(itertools.product([newcomer], past))
        self.alive.insert(len(self.tuned), newcomer)  # probes come last
        return True

    def _entrants(self, probe: Try) -> list[Try]:
        """Return the ways of fine-tuning, at a probe's length, that begin the race, as many as there is time for."""
        length = probe.max_length
        row_epochs = max(_ROW_EPOCHS, _CLASS_ROW_EPOCHS * self.answers.outputs)
        most = min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(row_epochs / len(self.rows))))
        rate = _RATE * min(1.0, _WIDTH / self.bench.width)
        seconds = self.bench.seconds * self.bench.slowness(probe) * len(self.rows)
        affordable, planned = self.clock.left / seconds, 0.0
        self._least[length] = self.clock.spent + 2 * most * seconds
        plan = None if self.folder is None else self.folder / "plan"  # a continued fit must have the same tries
        if plan is not None and plan.is_file() and len(numbers := plan.read_text().split()) == 3:
            planned, earlier, earlier_length = map(float, numbers)
            if self.clock.budget <= planned and earlier_length != length:
                return []
            if earlier_length == length:
                affordable = max(affordable, earlier) if self.clock.budget > planned else earlier
        plain = Try(min(most, int(affordable * PART)), rate, max_length=length)
        after_probe = min(-(-most // 2), int(affordable / 4))
        if length and 2 * after_probe < most:
            return []  # more tokens are not worth fewer epochs
        with_head = replace(plain, epochs=max(1, after_probe), penalty=probe.penalty, fits_head=True)
        # The way that usually scores most comes first. Contrasts need room in a batch for a pair of every class; they
        # gain where rows are few, and take longer.
        entrants = [with_head, plain] if plain.epochs >= FEWEST_EPOCHS else [with_head]
        if self.answers.classes is not None and 2 * self.answers.outputs <= self.bench.batch_size:
            contrasts = replace(with_head, penalty=1.0, fits_head=False, contrasts=True)
            entrants = [contrasts, *entrants] if len(self.rows) < MANY else [*entrants, contrasts]
        if not length:
            self._least[0] = self.clock.spent + self._seconds_for([(entrants[0], self.all_folds[0])])
        # As many as there is time for on one fold, and for one of them on another.
        while entrants and not self.is_time_for(itertools.product(entrants + entrants[1:2], self.all_folds[:1])):
            if self.is_done(entrants[-1], self.all_folds[0]):  # in an earlier process of this fit
                break
            entrants.pop()
        if entrants and plan is not None:  # without entrants, a fit that continues with a larger budget plans anew
            write_text(plan, f"{max(planned, self.clock.budget)} {affordable} {length}")
        return entrants

    def is_time_for(self, jobs: Iterable[Job]) -> bool:
        """Whether there is time for trainings and then for the longest of them on all rows; always if all are done."""
        jobs = [*jobs]
        return all(self.is_done(*job) for job in jobs) or self._seconds_for(jobs) <= self.clock.left

    def _seconds_for(self, jobs: Sequence[Job]) -> float:
        """Return the seconds that jobs take, and then the longest, as often as is reserved, with two to spare."""
        train, held = self.repeats[0][0]
        ways = [(candidate.passes, self.bench.slowness(candidate)) for candidate, _ in jobs]
        rows = self.processes.longest([slower * (passes * len(train) + len(held) / 3) for passes, slower in ways])
        final = max(slower * passes for passes, slower in ways) * len(self.rows)
        return self.bench.seconds * (rows + self.reserved * 1.2 * final) + 2.0

    def is_done(self, candidate: Try, fold: Fold) -> bool:
        """Whether a try was trained on a fold, perhaps by an earlier process."""
        path = self._path(candidate, fold)
        return fold in self.done.get(candidate, {}) or (path is not None and path.is_file())

    def _path(self, candidate: Try, fold: Fold) -> Path | None:
        of_head = f"-C{candidate.penalty:g}" * candidate.fits_head
        name = f"{str(candidate).replace(' ', '-')}{of_head} {self.all_folds.index(fold)}.npz"
        return None if self.folder is None else self.folder / name

    def train(self, jobs: Iterable[Job]) -> None:
        """Train tries on folds and keep their logits of held-out rows; read the logits that are saved already."""
        untrained: list[Job] = []
        for candidate, fold in jobs:
            self.since.setdefault(candidate, self.clock.spent)
            if fold in self.done.get(candidate, {}):
                continue
            if (path := self._path(candidate, fold)) is None or not path.is_file():
                untrained.append((candidate, fold))
                continue
            saved = np.load(path)
            self.clock.resume(float(saved["seconds"]))
            self._keep(candidate, fold, saved["logits"])
        seeds = {fold: self.seed + number for number, fold in enumerate(self.all_folds)}
        calls = [(candidate, *self.repeats[fold[0]][fold[1]], seeds[fold]) for candidate, fold in untrained]
        names = ", ".join({str(candidate): None for candidate, _ in untrained if not candidate.is_probe})
        began = self.clock.spent
        for number, logits in self.processes.out_of_fold(calls, lambda: self.clock.tick(f"training {names}")):
            candidate, fold = untrained[number]
            if (path := self._path(candidate, fold)) is not None:
                unfinished = path.with_suffix(".new")
                with unfinished.open("wb") as file:
                    np.savez(file, logits=logits, seconds=self.clock.spent - began)
                unfinished.replace(path)
            began = self.clock.spent
            self._keep(candidate, fold, logits)

    def _keep(self, candidate: Try, fold: Fold, logits: Logits) -> None:
        # A training that has diverged predicts nothing.
        self.done.setdefault(candidate, {})[fold] = logits = np.nan_to_num(logits, nan=0.0, posinf=0.0, neginf=0.0)
        if not candidate.is_probe:
            held = self.repeats[fold[0]][fold[1]][1]
            score = self.answers(self.rows.labels[held], self.answers.predicted(logits))
            self.clock.tell(f"{candidate}, fold {self.all_folds.index(fold) + 1}: {self.answers.shown(score)}")

    def _next_folds(self, number: int) -> list[Fold]:
        """Return the next folds of the race: as many of a repeat as occupy all processes, if there is time."""
        count = min(self.fold_count - self.all_folds[number][1], self.processes.count // len(self.tuned))
        while count > 1 and not self.is_time_for(itertools.product(self.tuned, self.all_folds[number:][:count])):
            count -= 1
        return self.all_folds[number:][: max(1, count)]

    def table(self, tries: list[Try]) -> tuple[Values, Numbers, NDArray[np.float64]]:
        """Return predictions ``(tries, repeats, n)``, rows and logits, of the folds that all these tries have done."""
        shared = set.intersection(*(set(self.done[candidate]) for candidate in tries))
        done = [[fold for fold in self.all_folds if fold[0] == r and fold in shared] for r in range(len(self.repeats))]
        done = [folds for folds in done if len(folds) == self.fold_count] or done[:1]  # whole repeats, or the first
        rows = np.sort(np.concatenate([self.repeats[r][i][1] for r, i in done[0]]))
        logits = np.empty((len(tries), len(done), len(rows), self.answers.outputs))
        for number, candidate in enumerate(tries):
            for repeat, folds in enumerate(done):
                held = np.concatenate([self.repeats[r][i][1] for r, i in folds])
                of_folds = np.concatenate([self.done[candidate][fold] for fold in folds])
                logits[number, repeat] = of_folds[np.argsort(held)]
        return self.answers.predicted(logits), rows, logits

    def scores(self, tries: list[Try]) -> NDArray[np.float64]:
        """Return the scores of tries on the folds that all of these tries have done."""
        predictions, rows, _ = self.table(tries)
        return scores_of(self.answers, self.rows.labels[rows], predictions)

    def leader(self, tries: list[Try]) -> Try:
        """Return the try that the results so far would choose."""
        predictions, rows, _ = self.table(tries)
        labels, units = self.rows.labels[rows], self.rows.units[rows]
        return tries[chosen_of(self.answers, labels, predictions, units, seed=self.seed)]

    def _losing(self) -> list[Try]:
        """Return the tries in the race that are most probably not the best, by a bootstrap of the rows."""
        predictions, rows, _ = self.table(self.alive)
        shares = probability_best(self.answers, self.rows.labels[rows], predictions, seed=self.seed)
        return [candidate for candidate, share in zip(self.alive, shares, strict=True) if share < LOSING]

    def _conclude(self, probe: Try, ended: str) -> Outcome:
        """Choose the best try, and estimate its score on new rows."""
        leader = self.leader(self.alive)
        # The promise of a probe rests on all of its folds, not only on those that fine-tuning has done.
        for other in [other for other in self.tuned if self.done[leader].keys() - self.done[other].keys()]:
            self.drop(other)
        predictions, rows, logits = self.table(tries := self.alive)
        labels, scores = self.rows.labels[rows], self.scores(tries)
        best = tries.index(self.leader(tries))
        # Dropped tries were in the choice, too: without them, the promise would be too high.
        pool = np.stack([*predictions, *(self._filled(loser, rows, predictions[best]) for loser in self.dropped)])
        units = self.rows.units[rows]
        in_folds, chosen = bias_corrected(self.answers, labels, pool, units, best=best, seed=self.seed)
        if self.answers.classes is not None:  # groups count as such where no bootstrap sample tells their spread
            in_folds = widened(in_folds, len({*units.tolist()}) if in_folds.low == in_folds.high else len(rows))
        share = float(np.mean([len(train) for train, _ in self.repeats[0]]) / len(self.rows))
        by_size = self._curve(probe)
        curve = {size: float(np.mean(fold_scores)) for size, fold_scores in by_size.items()}
        # On all rows, errors are lower than in folds, as the learning curve says, as far as it is certain.
        decay = decay_of([*curve], [*curve.values()])
        certain = certain_decay([*by_size], np.array([*by_size.values()]))
        estimate = Estimate(*(1 - (1 - score) * share**certain for score in in_folds))
        trainings = sum(len(folds) for candidate, folds in self.done.items() if not candidate.is_probe)
        of_best = logits[best].mean(0)
        temperature = 1.0 if self.answers.classes is None else temperature_of(of_best, labels)
        return Outcome(
            tries[best], estimate, in_folds, tries, scores.tolist(), chosen[: len(tries)], self.dropped, rows, of_best,
            temperature, decay, certain, share, trainings, curve, self.since,
            self.clock.spent, self.bench.in_bfloat16, self.processes.count, ended,
        )  # fmt: skip

    def _filled(self, loser: Try, rows: Numbers, best: Values) -> Values:
        """Return the predictions of a dropped try, and those of the best on the rows that the dropped try lacks."""
        filled, positions = best.copy(), np.full(len(self.rows), -1)
        positions[rows] = np.arange(len(rows))
        for (repeat, index), logits in self.done[loser].items():
            held = positions[self.repeats[repeat][index][1]]
            if repeat == 0:
                filled[0, held[held >= 0]] = self.answers.predicted(logits)[held >= 0]
        return filled

    def _curve(self, probe: Try) -> dict[int, list[float]]:
        """Return the scores of a linear probe in all folds, by the number of rows that the probe is fitted to."""
        draw, curve, labels = np.random.default_rng(self.seed), dict[int, list[float]](), self.rows.labels
        strata, whole = self.answers.strata(labels), self.done[probe]
        # As many folds as there was time for before; the error of a decay takes two.
        folds = [fold for fold in self.all_folds[: self.fold_count] if fold in whole]
        for part in _PARTS:
            scores, sizes = [], []
            for fold in folds if len(folds) > 1 else self.all_folds[:2]:
                train, held = self.repeats[0][fold[1]]
                in_strata = [draw.permutation(train[strata[train] == stratum]) for stratum in np.unique(strata[train])]
                drawn = np.concatenate([rows[: max(1, round(part * len(rows)))] for rows in in_strata])
                if part == 1 and fold in whole:
                    logits = whole[fold]
                else:
                    logits = self.bench.out_of_fold(probe, drawn, held, self.seed, lambda: None)
                scores.append(self.answers(labels[held], self.answers.predicted(logits)))
                sizes.append(len(drawn))
            curve[round(np.mean(sizes))] = scores
        return curve
