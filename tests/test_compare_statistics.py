"""The statistics of comparisons, against formulas written out here and simulated data with a known effect."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from attnreg.errors import InputError
from attnreg.experiments.compare.statistics import detectable, holm, mean_over_tasks, paired_difference, power
from attnreg.experiments.fit.answers import OF_CLASSES, score_of
from attnreg.experiments.tasks import metrics


def test_paired_difference_is_students():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 7), rng.normal(0, 1, 7)
    got = paired_difference(a, b, confidence=0.9)
    gaps = a - b
    error = math.sqrt(sum((g - gaps.mean()) ** 2 for g in gaps) / 6) / math.sqrt(7)
    half = stats.t.ppf(0.95, 6) * error
    assert got.mean == pytest.approx(sum(gaps) / 7)
    assert (got.low, got.high) == (pytest.approx(gaps.mean() - half), pytest.approx(gaps.mean() + half))
    assert got.p == pytest.approx(2 * stats.t.sf(abs(gaps.mean()) / error, 6))


@pytest.mark.parametrize("right", [[150], [150, 201, 77], [11, 201, 272]])
def test_no_interval_where_there_is_no_spread(right):
    accuracies = np.array(right) / 277
    got = paired_difference((np.array(right) + 3) / 277, accuracies)  # the gaps differ in their last bits
    assert got.mean == pytest.approx(3 / 277)
    assert all(map(math.isnan, got[1:]))
    assert paired_difference([0.1 + 0.2, 0.6, 0.7], [0.3, 0.6, 0.7]).mean == 0.0


def test_unequal_numbers_of_seeds_are_refused():
    with pytest.raises(InputError, match="Expected one score per seed from both methods"):
        paired_difference([1.0, 2.0], [1.0])


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", OF_CLASSES)
def test_scores_of_a_fit_are_those_of_metrics(name, classes):
    rng = np.random.default_rng(classes)
    for _ in range(20):
        labels, predictions = rng.integers(0, classes, 12), rng.integers(0, max(1, classes - 1), 12)
        expected = metrics.METRICS[name](keep_in_memory=True).compute(predictions=predictions, references=labels)[name]
        assert score_of(name, labels, predictions, 4) == pytest.approx(expected)


def stepwise(p_values, alpha):
    """Holm's procedure as he gives it: which hypotheses it rejects."""
    rejected = set()
    for rank, (p, i) in enumerate(sorted((p, i) for i, p in enumerate(p_values))):
        if p > alpha / (len(p_values) - rank):
            break
        rejected.add(i)
    return rejected


def test_holm_rejects_what_the_stepwise_procedure_does():
    rng = np.random.default_rng(0)
    for _ in range(300):
        p_values = list(rng.random(rng.integers(1, 8)) ** 3)
        adjusted = holm(p_values)
        for alpha in (0.01, 0.05, 0.3):
            assert {i for i, p in enumerate(adjusted) if p <= alpha} == stepwise(p_values, alpha)


def test_holm_leaves_out_what_is_not_known():
    assert holm([0.01, math.nan, 0.04])[::2] == [0.02, 0.04]
    assert math.isnan(holm([0.01, math.nan])[1])
    assert holm([]) == []


def test_calibration_error_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(400, 3, generator=generator, dtype=torch.float64).softmax(-1)
    labels = torch.randint(0, 3, (400,), generator=generator)
    bins, total = 15, 0.0
    for number in range(bins):
        pairs = zip(probabilities.tolist(), labels.tolist(), strict=True)
        own = [(row, label) for row, label in pairs if number / bins < max(row) <= (number + 1) / bins]
        if own:
            right = sum(row.index(max(row)) == label for row, label in own) / len(own)
            total += len(own) / 400 * abs(right - sum(max(row) for row, _ in own) / len(own))
    assert metrics.calibration_error(probabilities, labels) == pytest.approx(total, abs=1e-12)
    assert metrics.calibration_error(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == 1.0


@pytest.mark.parametrize(("effect", "seeds"), [(0.5, 6), (0.8, 16), (0.0, 9)])
def test_power_is_how_often_a_difference_is_found(effect, seeds):
    draws = np.random.default_rng(0).normal(effect, 1.0, (40_000, seeds))
    found = (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean()
    assert power(effect, 1.0, seeds) == pytest.approx(found, abs=0.01)
    assert power(3 * effect, 3.0, seeds) == pytest.approx(power(effect, 1.0, seeds))


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.3, 4.0])
def test_detectable_differences_fit_the_power(ratio):
    slow = next(n for n in itertools.count(2) if power(ratio, 1.0, n) >= 0.8)
    assert detectable(1.0, slow) <= ratio * (1 + 1e-9)
    if slow > 2:
        assert detectable(1.0, slow - 1) > ratio
    assert power(detectable(2.0, 7), 2.0, 7) == pytest.approx(0.8)
    assert math.isnan(detectable(1.0, 1))


def test_the_interval_over_tasks_holds_what_it_promises():
    """Over many sets of tasks, about as often as it says; with twelve tasks a little less often."""
    draw, holds = np.random.default_rng(2), 0
    for number in range(200):
        effects = draw.normal(0.5, 0.3, 12)
        gaps = [draw.normal(effect, 0.5, 4) for effect in effects]
        mean, low, high = mean_over_tasks(gaps, resamples=500, seed=number)
        assert mean == pytest.approx(np.mean([gap.mean() for gap in gaps]))
        holds += low <= 0.5 <= high
    assert 170 <= holds <= 199
