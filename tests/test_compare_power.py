"""What seeds can show and what tasks say together, against slow versions and simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from attnreg.errors import InputError
from attnreg.experiments.compare.statistics import (
    detectable,
    mean_over_tasks,
    mean_ranks,
    power,
    practically_equal,
    probability_of_improvement,
    seeds_needed,
)


@pytest.mark.parametrize(("effect", "seeds"), [(0.5, 6), (0.8, 16), (0.0, 9)])
def test_power_is_how_often_a_difference_is_found(effect, seeds):
    draws = np.random.default_rng(0).normal(effect, 1.0, (40_000, seeds))
    found = (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean()
    assert power(effect, 1.0, seeds) == pytest.approx(found, abs=0.01)
    assert power(3 * effect, 3.0, seeds) == pytest.approx(power(effect, 1.0, seeds))


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.3, 4.0])
def test_seeds_needed_are_the_fewest_and_detectable_differences_fit(ratio):
    slow = next(n for n in itertools.count(2) if power(ratio, 1.0, n) >= 0.8)
    assert seeds_needed(ratio, 1.0) == slow
    assert detectable(1.0, slow) <= ratio * (1 + 1e-9)
    if slow > 2:
        assert detectable(1.0, slow - 1) > ratio
    assert power(detectable(2.0, 7), 2.0, 7) == pytest.approx(0.8)
    assert math.isnan(detectable(1.0, 1))


def test_equality_in_practice_is_two_one_sided_tests():
    gaps = np.random.default_rng(1).normal(0.002, 0.004, 12)
    mean, error = gaps.mean(), gaps.std(ddof=1) / math.sqrt(12)
    for region in (0.001, 0.004, 0.01):
        expected = max(stats.t.sf((mean + region) / error, 11), stats.t.cdf((mean - region) / error, 11))
        assert practically_equal(gaps, region) == pytest.approx(expected)
    assert practically_equal([0.001, 0.001], 0.01) == 0.0
    assert practically_equal([0.1, 0.1], 0.01) == 1.0
    assert math.isnan(practically_equal([0.1], 0.01))


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
    assert all(math.isnan(end) for end in mean_over_tasks([[1.0, 2.0]])[1:])
    with pytest.raises(InputError):
        mean_over_tasks([[1.0], []])


def test_improvement_and_ranks_by_counting():
    draw = np.random.default_rng(3)
    scores = [draw.integers(0, 4, (3, 5)) for _ in range(2)]  # with ties
    wins = [[1.0 if a > b else 0.5 if a == b else 0.0 for a in task[0] for b in task[1]] for task in scores]
    expected = np.mean([np.mean(task) for task in wins])
    assert probability_of_improvement([t[0] for t in scores], [t[1] for t in scores]) == pytest.approx(expected)
    ranks = np.zeros(3)
    for task in scores:
        for seed in range(5):
            for method in range(3):
                mine = task[method][seed]
                better, equal = (task[:, seed] > mine).sum(), (task[:, seed] == mine).sum()
                ranks[method] += (better + (equal + 1) / 2) / 10
    assert mean_ranks(scores) == pytest.approx(ranks)
