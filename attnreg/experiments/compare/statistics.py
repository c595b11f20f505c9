"""Statistics of a comparison: paired tests over seeds, what a number of seeds can show, and means over tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from attnreg.errors import InputError

MOST_SEEDS = 100_000


@dataclass(frozen=True)
class Difference:
    """A mean paired difference.

    Args:
        mean: mean of the differences.
        low: lower end of the confidence interval.
        high: upper end of the confidence interval.
        p: two-sided p-value of the hypothesis that the mean is 0.
    """

    mean: float
    low: float
    high: float
    p: float

    @property
    def estimate(self) -> tuple[float, float, float]:
        """The mean and its interval."""
        return self.mean, self.low, self.high


def paired_difference(scores: ArrayLike, others: ArrayLike, confidence: float = 0.95) -> Difference:
    """Student's paired t-test and confidence interval, over seeds.

    It tells what other seeds (other data orders and head initializations) would change on the same dev rows.

    Args:
        scores: ``(n,)``, one per seed.
        others: ``(n,)``, the other method's scores for the same seeds.
        confidence: confidence level of the interval (default: 0.95).

    Returns:
        the difference; interval and p are NaN for a single seed, or if all differences are equal.

    Raises:
        InputError: if the two do not have the same length.

    Example:
        >>> difference = paired_difference([3.0, 4.0, 6.0], [1.0, 3.0, 4.0])
        >>> round(difference.mean, 3), round(difference.low, 3), round(difference.p, 3)
        (1.667, 0.232, 0.038)
    """
    a, b = np.asarray(scores, float), np.asarray(others, float)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise InputError(f"Expected one score per seed from both methods, got shapes {a.shape} and {b.shape}.")
    gaps = a - b
    if len(gaps) < 2 or np.ptp(gaps) <= 1e-12 * max(np.abs(a).max(), np.abs(b).max()):  # only rounding
        return Difference(float(gaps.mean()), math.nan, math.nan, math.nan)
    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval(confidence)
    return Difference(float(gaps.mean()), float(interval.low), float(interval.high), float(test.pvalue))


def bootstrap_over_rows(
    metric: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    labels: ArrayLike,
    predictions: Sequence[ArrayLike],
    others: Sequence[ArrayLike],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap over dev rows, for the difference of a metric between two methods, averaged over seeds.

    It tells what other dev rows would change for the same networks. Both methods are scored on the same resampled rows.

    Args:
        metric: function of confusion matrices ``(..., C, C)``, a value of
            :data:`attnreg.experiments.tasks.metrics.CONFUSION`.
        labels: ``(n,)``.
        predictions: predicted classes ``(n,)`` for each seed.
        others: predicted classes ``(n,)`` of the other method for each seed.
        confidence: confidence level of the interval (default: 0.95).
        resamples: number of bootstrap samples.
        seed: seed of the resampling.

    Returns:
        lower and upper end of the interval.
    """
    gold, ours, theirs = np.asarray(labels), np.asarray(predictions), np.asarray(others)
    classes = 1 + int(max(gold.max(), ours.max(), theirs.max()))

    def scores(predicted: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        cells = (gold * classes + predicted)[rows]
        apart = np.arange(len(cells))[:, None] * classes**2
        counts = np.bincount((cells + apart).ravel(), minlength=len(cells) * classes**2)
        return metric(counts.reshape(-1, classes, classes))

    def difference(rows: NDArray[np.int64], axis: int) -> NDArray[np.float64]:
        flat = rows.reshape(-1, rows.shape[axis])
        gaps = [scores(a, flat) - scores(b, flat) for a, b in zip(ours, theirs, strict=True)]
        return np.mean(gaps, axis=0).reshape(rows.shape[:-1])

    result = stats.bootstrap(
        (np.arange(len(gold)),),
        difference,
        vectorized=True,
        batch=200,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons by Holm's step-down method, which controls the family-wise error rate.

    Args:
        p_values: one per comparison; NaN stays NaN and does not count.

    Returns:
        adjusted p-values, in the same order.

    Reference:
        Holm, A Simple Sequentially Rejective Multiple Test Procedure (1979).

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, least = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(known):
        least = max(least, min(1.0, (len(known) - rank) * p))
        adjusted[i] = least
    return adjusted


def practically_equal(gaps: ArrayLike, region: float) -> float:
    """Test that a mean paired difference lies within a region of practical equivalence (two one-sided t-tests).

    Args:
        gaps: ``(n,)``, differences of single seeds.
        region: r, above 0: differences between -r and r count as equal in practice.

    Returns:
        the p-value of the hypothesis that they differ by more: if it is small, they are equal in practice. NaN for one
        seed.

    Reference:
        Schuirmann, A comparison of the two one-sided tests procedure (1987).

    Example:
        >>> round(practically_equal([0.001, -0.002, 0.001, 0.0], 0.005), 4)
        0.0029
    """
    each = np.asarray(gaps, float)
    if len(each) < 2:
        return math.nan
    if np.ptp(each) == 0:
        return 0.0 if abs(each[0]) < region else 1.0
    above = stats.ttest_1samp(each, -region, alternative="greater").pvalue
    below = stats.ttest_1samp(each, region, alternative="less").pvalue
    return float(max(above, below))


def power(difference: float, deviation: float, seeds: int, level: float = 0.05) -> float:
    """Return the probability that a two-sided paired t-test over seeds finds a true difference.

    Args:
        difference: the true mean difference.
        deviation: standard deviation of the differences of single seeds.
        seeds: number of seeds, at least 2.
        level: significance level.

    Example:
        >>> round(power(0.01, 0.0133, 16), 3)
        0.803
    """
    freedom, shift = seeds - 1, difference / deviation * math.sqrt(seeds)
    limit = stats.t.ppf(1 - level / 2, freedom)
    other = stats.nct.cdf(-limit, freedom, shift)  # of the wrong sign; scipy gives NaN where it is next to nothing
    return float(stats.nct.sf(limit, freedom, shift) + np.nan_to_num(other))


def seeds_needed(difference: float, deviation: float, wanted: float = 0.8, level: float = 0.05) -> int | None:
    """Return the smallest number of seeds with which a paired t-test finds a true difference with a given power.

    Args:
        difference: the true mean difference, above 0.
        deviation: standard deviation of the differences of single seeds.
        wanted: power, the probability of finding it.
        level: significance level.

    Returns:
        the number, or ``None`` above 100 000.

    Example:
        >>> seeds_needed(0.01, 0.0133), seeds_needed(0.01, 0.0), seeds_needed(1e-6, 1.0)
        (16, 2, None)
    """
    if not deviation:
        return 2
    low, high = 1, 2
    while power(difference, deviation, high, level) < wanted:
        low, high = high, 2 * high
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(difference, deviation, middle, level) >= wanted else (middle, high)
    return high


def detectable(deviation: float, seeds: int, wanted: float = 0.8, level: float = 0.05) -> float:
    """Return the true difference that a paired t-test over these seeds finds with a given power; NaN for one seed.

    Example:
        >>> round(detectable(0.0133, 16), 4)
        0.01
    """
    if seeds < 2:
        return math.nan
    if not deviation:
        return 0.0
    high = 0.01
    while power(high, 1.0, seeds, level) < wanted:
        high *= 2
    return float(deviation * optimize.brentq(lambda effect: power(effect, 1.0, seeds, level) - wanted, 0.0, high))


def mean_over_tasks(
    gaps: Sequence[ArrayLike], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of the tasks' mean differences, with a bootstrap interval over tasks and seeds.

    Each resample draws tasks, and for each drawn task its seeds, with replacement. The interval tells what other tasks
    of this sort and other seeds would change; with few tasks it is too narrow.

    Args:
        gaps: for each task, the paired differences of its seeds, ``(n,)``.
        confidence: confidence level of the interval.
        resamples: number of bootstrap samples.
        seed: seed of the resampling.

    Returns:
        the mean, and the lower and the upper end of the interval, which are NaN for a single task.

    Example:
        >>> mean, low, high = mean_over_tasks([[0.01, 0.02], [0.03, 0.04]])
        >>> round(mean, 3), low < mean < high
        (0.025, True)
    """
    each = [np.asarray(gap, float) for gap in gaps]
    if not each or not all(len(gap) for gap in each):
        raise InputError("Expected at least one difference for each task.")
    mean = float(np.mean([gap.mean() for gap in each]))
    if len(each) < 2:
        return mean, math.nan, math.nan
    draw = np.random.default_rng(seed)
    means = np.stack([draw.choice(gap, (resamples, len(each), len(gap))).mean(-1) for gap in each], -1)
    tasks = draw.integers(len(each), size=(resamples, len(each)))
    drawn = np.take_along_axis(means, tasks[..., None], -1)[..., 0].mean(-1)
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return mean, float(low), float(high)


def probability_of_improvement(scores: Sequence[ArrayLike], others: Sequence[ArrayLike]) -> float:
    """Probability that a run of one method scores higher than a run of another, averaged over tasks; ties count half.

    Args:
        scores: for each task, the scores of a method's seeds.
        others: for each task, the scores of the other method's seeds.

    Reference:
        Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice (2021).

    Example:
        >>> probability_of_improvement([[1.0, 2.0]], [[0.0, 2.0]])
        0.625
    """
    each = []
    for mine, theirs in zip(scores, others, strict=True):
        a, b = np.asarray(mine, float)[:, None], np.asarray(theirs, float)[None]
        each.append(((a > b) + 0.5 * (a == b)).mean())
    return float(np.mean(each))


def mean_ranks(scores: Sequence[Sequence[ArrayLike]]) -> NDArray[np.float64]:
    """Rank the methods on each task and seed (1 is the best, ties share), and average.

    Args:
        scores: for each task and method, the scores of the seeds.

    Returns:
        ``(methods,)``.

    Example:
        >>> mean_ranks([[[0.5, 0.6], [0.7, 0.6]]]).tolist()
        [1.75, 1.25]
    """
    means = [stats.rankdata(-np.asarray(task, float), axis=0).mean(1) for task in scores]
    return np.asarray(np.mean(means, axis=0), float)
