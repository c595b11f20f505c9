"""The race of a fit: its promise against a slow loop and simulations, its time, and whom it drops."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy import special

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.fit import race
from attnreg.experiments.fit.answers import Answers, score_of
from attnreg.experiments.fit.choice import bias_corrected, certain_decay, chosen_of, decay_of, temperature_of, widened
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.race import Race
from attnreg.experiments.fit.rows import Rows
from tests.helpers.bench import MadeUp


def accuracy(labels, predictions):
    return score_of("accuracy", labels, predictions, 0)


def slow_estimate(labels, tries, draws):
    """The estimate of BBC-CV with the rule of half a standard error, written out, and how often each try is chosen."""
    found = []
    for drawn in draws:
        inside = [row for row, times in enumerate(drawn) for _ in range(times)]
        outside = [row for row, times in enumerate(drawn) if not times]
        found.append([[sum(each[row] == labels[row] for row in some) for some in (inside, outside)] for each in tries])

    def chosen(right):
        best = max(range(len(tries)), key=lambda number: right[number])
        for number in range(len(tries)):
            gaps = [each[best][0] - each[number][0] for each in found]
            mean = sum(gaps) / len(gaps)
            if right[best] - right[number] <= math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / 2:
                break
        return number

    of_all = [sum(each == labels) for each in tries]
    gaps, times_chosen = [], [0] * len(tries)
    for right, drawn in zip(found, draws, strict=True):
        number = chosen([inside for inside, _ in right])
        times_chosen[number] += 1
        gaps.append((right[number][1] - right[chosen(of_all)][1]) / sum(not times for times in drawn))
    score = of_all[chosen(of_all)] / len(labels) + min(0, sum(gaps) / len(gaps))
    return score, [times / len(draws) for times in times_chosen]


def test_the_estimate_is_that_of_a_slow_loop():
    draw = np.random.default_rng(3)
    labels = draw.integers(0, 3, 40)
    tries = np.where(draw.random((5, 40)) < 0.6, labels, draw.integers(0, 3, (5, 40)))
    estimate, chosen = bias_corrected(accuracy, labels, tries[:, None], resamples=50, seed=4)
    draws = np.random.default_rng(4).multinomial(40, np.full(40, 1 / 40), 50)
    expected = slow_estimate(labels, tries, draws)
    assert (estimate.score, chosen) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    assert len([share for share in chosen if share]) > 2


@pytest.mark.parametrize("classes", [15, 40])
def test_macro_f1_of_classes_with_few_rows_is_promised_without_bias(classes):
    answers, truth, promised = Answers("macro_f1", np.arange(classes)), [], []
    for seed in range(24):
        draw = np.random.default_rng(seed)
        labels, new = np.arange(6 * classes) % classes, np.arange(400 * classes) % classes
        tries, of_new = (
            np.where(draw.random((3, 1, len(rows))) < 0.6, rows, draw.integers(0, classes, (3, 1, len(rows))))
            for rows in (labels, new)
        )
        promised.append(bias_corrected(answers, labels, tries, resamples=60, seed=seed)[0].score)
        truth.append(answers(new, of_new[0, 0]))
    assert np.mean(promised) == pytest.approx(np.mean(truth), abs=0.03)


@pytest.mark.parametrize(("rows", "truth"), [(8, 0.85), (60, 0.97), (600, 0.995)])
def test_an_interval_holds_the_truth_also_where_few_rows_are_wrong(rows, truth):
    covered, labels = [], np.zeros(rows, int)
    for seed in range(60):
        tries = (np.random.default_rng(seed).random((1, 1, rows)) > truth).astype(int)
        interval = widened(bias_corrected(accuracy, labels, tries, resamples=60, seed=seed)[0], rows)
        covered.append(interval.low <= truth <= interval.high)
        assert interval.low < interval.high <= 1
    assert np.mean(covered) > 0.9


@pytest.mark.parametrize("best", [None, 0, 1])
def test_a_promise_is_at_most_the_score_of_what_is_trained(best):
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 200)
    tries = np.stack([np.where(draw.random(200) < right, labels, 1 - labels) for right in (0.6, 0.97)])[:, None]
    estimate, _ = bias_corrected(accuracy, labels, tries, resamples=60, best=best)
    own = accuracy(labels, tries[1 if best is None else best, 0])
    assert own - 0.02 <= estimate.score <= own
    assert estimate.low < estimate.score < estimate.high <= 1


def test_a_race_in_which_all_rows_are_right_promises_no_certainty(monkeypatch):
    found, _ = raced(100, lambda which: 1.0, monkeypatch, many=40)
    assert found.in_folds.score == found.in_folds.high == 1
    assert found.in_folds.low == pytest.approx(1 / (1 + 1.96**2 / 40), abs=1e-3)  # of 40 rows


@pytest.mark.parametrize(("more", "chosen"), [(0, 0), (2, 0), (5, 1), (20, 1)])
def test_the_first_try_is_kept_unless_another_is_better_by_more_than_chance(more, chosen):
    labels = np.zeros(100, int)
    first, second = (np.arange(100) % 10 < 3).astype(int), (np.arange(100) % 7 < 2).astype(int)
    second[np.flatnonzero(second)[: (second.sum() - first.sum()) + more]] = 0
    assert first.sum() - second.sum() == more
    assert chosen_of(accuracy, labels, np.stack([first, second])[:, None]) == chosen


def test_rows_of_one_group_are_drawn_each_by_itself():
    labels = np.arange(40) % 2
    tries = np.stack([labels, 1 - labels])[:, None]
    estimate, chosen = bias_corrected(accuracy, labels, tries, np.zeros(40), resamples=20)
    assert estimate.score == chosen[0] == 1


def test_the_best_of_many_is_flattered_and_the_estimate_is_not():
    truth, naive, corrected, covered = 0.7, [], [], []
    for seed in range(40):
        draw = np.random.default_rng(seed)
        labels = draw.integers(0, 2, 100)
        tries = np.where(draw.random((15, 1, 100)) < truth, labels, 1 - labels)  # all equally good
        naive.append(max(score_of("accuracy", labels, each[0], 2) for each in tries))
        estimate, _ = bias_corrected(accuracy, labels, tries, resamples=100, seed=seed)
        corrected.append(estimate.score)
        covered.append(estimate.low <= truth <= estimate.high)
    noise = 3 * np.std(corrected) / np.sqrt(len(corrected))
    assert np.mean(naive) > truth + 0.05
    assert abs(np.mean(corrected) - truth) < max(noise, 0.015)
    assert np.mean(covered) > 0.9


def raced(budget, right, monkeypatch, many=200, folder=None):
    """The outcome of a race with made-up scores, and the seconds that it took."""
    time = [0.0]
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: time[0]))
    rows = Rows.checked([f"text {number}" for number in range(many)], [number % 2 for number in range(many)])
    race = Race(MadeUp(rows, time, right), rows, Clock(budget, lambda text: None), 0, folder)
    return race.run(), time[0]


@pytest.mark.parametrize("budget", [28, 100])
def test_a_race_that_goes_on_after_its_last_fold_chooses_as_before(budget, monkeypatch, tmp_path):
    def right(which):
        return 0.6 if which.is_probe else 0.7 + 0.1 * which.ad_drop

    before, spent = raced(budget, right, monkeypatch, folder=tmp_path)
    after, more = raced(budget, right, monkeypatch, folder=tmp_path)
    assert (after.best, after.tries, after.dropped, after.ended) == (
        before.best, before.tries, before.dropped, before.ended
    )  # fmt: skip
    assert not before.best.is_probe
    assert spent > 0
    assert more == 0
    assert after.trainings == before.trainings > 0  # of both processes


@pytest.mark.parametrize("budget", [24, 28, 52])
def test_fine_tuning_enters_a_race_whatever_the_time_for_it(budget, monkeypatch):
    found, _ = raced(budget, lambda which: 0.6 if which.is_probe else 0.8, monkeypatch)
    assert not found.best.is_probe


@pytest.mark.parametrize("takes", [True, False])
def test_ad_drop_joins_where_the_model_takes_it(takes, monkeypatch):
    monkeypatch.setattr(MadeUp, "ad_drop_layer", 0 if takes else None)
    found, _ = raced(2000, lambda which: 0.6 if which.is_probe else 0.8, monkeypatch)
    assert any(candidate.ad_drop for candidate in (*found.tries, *found.dropped)) == takes


@pytest.mark.parametrize("budget", [7.5, 8.0, 12.0, 24.0, 60.0])
def test_a_look_at_ad_drop_takes_time(budget, monkeypatch):
    def look(bench):
        bench.time[0] += 1.0
        return 0

    monkeypatch.setattr(MadeUp, "ad_drop_layer", property(look))
    found, _ = raced(budget, lambda which: 0.6 if which.is_probe else 0.8, monkeypatch)
    assert found.best in found.tries


def test_the_promise_of_a_probe_rests_on_all_of_its_folds(monkeypatch):
    found, _ = raced(28, lambda which: 0.8 if which.is_probe else 0.6, monkeypatch)
    assert found.best.is_probe
    assert len(found.rows) == 200
    assert all(each.is_probe for each in found.tries)
    assert found.ended.startswith("Time ended the race after 2 of")


def test_a_bad_training_does_not_end_all_fine_tuning(monkeypatch):
    out_of_fold = MadeUp.out_of_fold

    def worse_at_first(self, which, train, held, seed, tick):
        self.right = lambda each: 0.7 if each.is_probe else 0.95 if seed else 0.4
        return out_of_fold(self, which, train, held, seed, tick)

    monkeypatch.setattr(MadeUp, "out_of_fold", worse_at_first)
    found, _ = raced(40, None, monkeypatch)
    assert not found.best.is_probe


def test_probes_that_are_slow_are_not_scored_on_all_folds(monkeypatch):
    slow = MadeUp.out_of_fold

    def out_of_fold(self, which, *more):
        self.time[0] += 2
        return slow(self, which, *more)

    monkeypatch.setattr(MadeUp, "out_of_fold", out_of_fold)
    found, spent = raced(8, lambda which: 0.8, monkeypatch)
    assert spent == 2 * (3 + 5)  # three probes in a fold; for the learning curve, two folds, of which one is known
    assert len(found.rows) == 40
    assert found.best.is_probe


@pytest.mark.parametrize("budget", [5, 15, 200, 250, 4000])
def test_a_race_leaves_time_to_train_the_best_on_all_rows(budget, monkeypatch):
    found, spent = raced(budget, lambda which: 0.6 if which.is_probe else 0.8, monkeypatch)
    trainings = 2 if len(found.rows) > 80 else 1  # after two folds of five, twice
    assert spent + trainings * MadeUp.seconds * 200 * found.best.passes <= budget
    assert found.best.is_probe == (budget < 15)
    assert found.ended.startswith("Time was short" if budget < 15 else "All 15" if budget == 4000 else "Time ended")


def test_the_budget_that_fine_tuning_needs_is_told(monkeypatch):
    found, _ = raced(5, lambda which: 0.6, monkeypatch)
    needed = int(re.fullmatch(r"Time was short .* needs a budget above (\d+) s here\.", found.ended)[1])
    assert not raced(needed + 1, lambda which: 0.6, monkeypatch)[0].ended.startswith("Time was short")
    assert raced(needed - 1, lambda which: 0.6, monkeypatch)[0].ended.startswith("Time was short")


def test_a_race_finds_the_best_and_drops_what_is_losing(monkeypatch):
    right = {True: 0.95, False: 0.75}
    found, _ = raced(1000, lambda which: 0.55 if which.is_probe else right[which.ad_drop], monkeypatch)
    assert found.best.ad_drop
    assert any(which.is_probe for which in found.dropped)
    assert any(which.is_plain for which in found.dropped)
    assert found.in_folds.low < 0.95 < found.in_folds.high
    assert found.in_folds.score == pytest.approx(0.95, abs=0.03)
    assert found.estimate.score >= found.in_folds.score


@pytest.mark.parametrize("budget", [400, 800])
def test_what_usually_scores_most_is_kept_where_another_is_better_by_chance(budget, monkeypatch):
    found, _ = raced(budget, lambda which: 0.83 if which.contrasts else 0.8, monkeypatch)
    assert found.scores[0] < max(found.scores)
    assert found.best.contrasts
    assert found.best == found.tries[0]


def test_who_leads_is_not_dropped_where_time_is_short(monkeypatch):
    monkeypatch.setattr(Race, "leader", lambda self, tries: tries[0])
    monkeypatch.setattr(Race, "_losing", lambda self: [])
    # Trainings take longer than was foreseen, so that there is no time for all.
    slow = MadeUp.out_of_fold

    def out_of_fold(self, *given):
        self.time[0] += 3 * (not given[0].is_probe)
        return slow(self, *given)

    monkeypatch.setattr(MadeUp, "out_of_fold", out_of_fold)
    found, _ = raced(130, lambda which: 0.5 if which.contrasts else 0.8, monkeypatch)
    assert found.dropped
    assert found.best.contrasts


def test_probes_come_last_as_what_usually_scores_least(monkeypatch):
    found, _ = raced(400, lambda which: 0.79 if which.is_probe else 0.8, monkeypatch)
    kinds = [each.is_probe for each in found.tries]
    assert any(each.ad_drop for each in found.tries)  # which joined later
    assert kinds == sorted(kinds) != [False] * len(kinds)


@pytest.mark.parametrize("budget", [*range(60, 400, 20)])
def test_no_change_joins_at_the_cost_of_a_fold(budget, monkeypatch):
    found, _ = raced(budget, lambda which: 0.6 if which.is_probe else 0.8 + 0.1 * which.ad_drop, monkeypatch)
    tuned = [which for which in [*found.tries, *found.dropped] if not which.is_probe]
    if len(tuned) > 3 or any(which.ad_drop or which.r_drop or which.learning_rate < 1e-4 for which in tuned):
        assert len(found.rows) == 200


def test_ad_drop_joins_beside_contrastive_fine_tuning_that_leads(monkeypatch):
    found, _ = raced(4000, lambda which: 0.55 if which.is_probe else 0.8 + 0.15 * which.contrasts, monkeypatch)
    assert found.best.contrasts
    tries = [*found.tries, *found.dropped]
    assert any(which.ad_drop for which in tries)
    assert not any(which.contrasts and (which.ad_drop or which.r_drop) for which in tries)


def test_the_promise_counts_that_dropped_tries_were_chosen_from(monkeypatch):
    pools = []

    def estimated(score, labels, tries, *more, **options):
        pools.append((tries, options["best"]))
        return bias_corrected(score, labels, tries, *more, **options)

    monkeypatch.setattr(race, "bias_corrected", estimated)
    found, _ = raced(40, lambda which: 0.6 if which.is_probe else 0.7, monkeypatch)
    ((pool, best),) = pools
    assert found.tries[best] == found.best
    assert found.dropped
    assert len(pool) == len(found.tries) + len(found.dropped)
    of_best = pool[found.tries.index(found.best)]
    for each in pool[len(found.tries) :]:
        assert 0 < (each != of_best).sum() < 40 * 4  # of the 40 rows of each fold that it has seen


def test_a_race_that_fine_tuning_loses_ends_early(monkeypatch):
    found, spent = raced(1000, lambda which: 0.95 if which.is_probe else 0.6, monkeypatch)
    assert found.best.is_probe
    assert found.ended == "A linear probe was better than all fine-tuning."
    assert spent < 500


@pytest.mark.parametrize(
    "learns",
    [lambda which: which.epochs > 15, lambda which: which.learning_rate < 1e-4],
    ids=["more epochs", "a lower rate"],
)
def test_fine_tuning_that_lost_comes_back_as_what_may_help_it(learns, monkeypatch):
    def right(which):
        if which.is_probe:
            return 0.85
        return 0.4 if not which.fits_head else 0.99 if learns(which) else 0.5

    found, _ = raced(1000, right, monkeypatch)
    assert found.best.fits_head
    assert learns(found.best)
    assert any(which.ad_drop for which in [*found.tries, *found.dropped])  # of what came back, not of what had lost
    assert all(learns(which) for which in [*found.tries, *found.dropped] if which.ad_drop)


def test_a_few_rows_that_are_all_right_make_no_model_certain():
    labels = np.arange(12) % 2
    logits = np.eye(2)[labels] * 1.5  # 82 % sure, and always right
    sure = special.softmax(logits / temperature_of(logits, labels), axis=1).max(1)
    assert 0.85 < sure.min() < 0.98


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_fine_tuning_of_numbers_that_diverges_is_dropped(number, monkeypatch):
    time, rows = [0.0], Rows.checked([f"text {n}" for n in range(60)], [*range(60)], numbers=True)
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: time[0]))

    def out_of_fold(self, which, train, held, seed, tick):
        self.time[0] += self.seconds * which.passes * len(train)
        return np.full((len(held), 1), number) if which.fits_head else rows.labels[held, None] ** 3

    monkeypatch.setattr(MadeUp, "out_of_fold", out_of_fold)
    found = Race(MadeUp(rows, time, None), rows, Clock(60, lambda text: None), 0, None).run()
    assert not found.best.fits_head
    assert [score for which, score in found.dropped.items() if which.fits_head] == [0.0]


@pytest.mark.parametrize(("seconds_a_token", "too_long"), [(0.009, False), (0.011, True)])
def test_rows_that_there_is_no_time_to_read_once_are_refused_early(seconds_a_token, too_long, monkeypatch):
    time, lengths = [0.0], [8] * 50 + [12] * 50  # 1,000 tokens
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: time[0]))
    clock = Clock(10, lambda text: None)
    time[0] = 60.0  # such as of an earlier process
    read = []

    def read_all():
        for batch in clock.paced([{"input_ids": torch.zeros(1, length)} for length in lengths]):
            read.append(batch)
            time[0] += seconds_a_token * batch["input_ids"].numel()

    if too_long:
        with pytest.raises(InputError, match="to read all rows once takes about 11 s here, more than the budget"):
            read_all()
        assert len(read) == 12  # a tenth of the budget has passed
    else:
        read_all()
        assert len(read) == 100


def test_the_rows_of_a_fit_are_read_in_its_time(tiny, monkeypatch):
    time = itertools.count(0, 5)
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: next(time)))
    with pytest.raises(InputError, match="Only to read all rows once takes about"):
        attnreg.TextClassifier(tiny, budget=10).fit([f"the boy {n}" for n in range(200)], [0, 1] * 100)


def test_temperature_and_decay():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(4000, 3))
    labels = np.array([draw.choice(3, p=np.exp(row) / np.exp(row).sum()) for row in logits])
    assert temperature_of(5 * logits, labels) == pytest.approx(5, rel=0.1)
    assert decay_of([10, 40], [0.5, 0.75]) == pytest.approx(0.5)
    assert decay_of([10, 40], [0.75, 0.5]) == 0
    alike, differing = np.array([[0.5, 0.5], [0.75, 0.75]]), np.array([[0.4, 0.6], [0.85, 0.65]])
    assert certain_decay([10, 40], alike) == pytest.approx(0.5)
    assert certain_decay([10, 40], differing) == pytest.approx(0.5 - abs(1.0 - 0.096) / 2, abs=0.01)
