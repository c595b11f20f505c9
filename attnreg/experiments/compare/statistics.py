"""Statistics of a comparison: paired tests over seeds, what a number of seeds can show, and means over tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from attnreg.errors import InputError

POWER = 0.8


class Difference(NamedTuple):
    """A mean paired difference, the ends of its confidence interval, and the two-sided p-value that the mean is 0."""

    mean: float
    low: float
    high: float
    p: float


def paired_difference(scores: ArrayLike, others: ArrayLike, confidence: float = 0.95) -> Difference:
    """Student's paired t-test and interval, from one score per seed of both methods: what other seeds would change.

    Interval and p are NaN for a single seed, or if all differences are equal.
    """
    a, b = np.asarray(scores, float), np.asarray(others, float)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise InputError(f"Expected one score per seed from both methods, got shapes {a.shape} and {b.shape}.")
    gaps = a - b
    mean, rounding = float(gaps.mean()), 1e-12 * max(np.abs(a).max(), np.abs(b).max())
    if len(gaps) < 2 or np.ptp(gaps) <= rounding:
        return Difference(mean if abs(mean) > rounding else 0.0, math.nan, math.nan, math.nan)
    test = stats.ttest_rel(a, b)
    low, high = test.confidence_interval(confidence)
    return Difference(mean, float(low), float(high), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons by Holm's step-down method (1979); NaN stays NaN and does not count."""
    ordered = sorted((p, position) for position, p in enumerate(p_values) if not math.isnan(p))
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, position) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - rank) * p))
        adjusted[position] = largest
    return adjusted


def power(difference: float, deviation: float, seeds: int) -> float:
    """Return the probability that a two-sided paired t-test over at least 2 seeds finds a true mean difference.

    ``deviation`` is the standard deviation of the differences of single seeds; the significance level is 0.05.
    """
    freedom, shift = seeds - 1, difference / deviation * math.sqrt(seeds)
    limit = stats.t.ppf(1 - 0.05 / 2, freedom)
    opposite = stats.nct.cdf(-limit, freedom, shift)  # the tail of the wrong sign; scipy gives NaN where it is almost 0
    return float(stats.nct.sf(limit, freedom, shift) + np.nan_to_num(opposite))


def detectable(deviation: float, seeds: int) -> float:
    """Return the true difference for which the :func:`power` is 0.8; NaN for one seed."""
    if seeds < 2:
        return math.nan
    high = 0.01
    while power(high, 1.0, seeds) < POWER:
        high *= 2
    return float(deviation * optimize.brentq(lambda effect: power(effect, 1.0, seeds) - POWER, 0.0, high))


def mean_over_tasks(gaps: Sequence[ArrayLike], *, resamples: int = 10_000, seed: int = 0) -> tuple[float, float, float]:
    """Mean of the tasks' mean differences, and the ends of its 95 % bootstrap interval.

    A resample draws tasks, and per drawn task its seeds, with replacement; with few tasks, the interval is too
    narrow. ``gaps`` are the paired differences of the seeds, per task.
    """
    of_tasks = [np.asarray(gap, float) for gap in gaps]
    mean = float(np.mean([gap.mean() for gap in of_tasks]))
    generator = np.random.default_rng(seed)
    means = np.stack([generator.choice(gap, (resamples, len(of_tasks), len(gap))).mean(-1) for gap in of_tasks], -1)
    tasks = generator.integers(len(of_tasks), size=(resamples, len(of_tasks)))
    resampled = np.take_along_axis(means, tasks[..., None], -1)[..., 0].mean(-1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return mean, float(low), float(high)
