"""Statistics of a comparison: paired t-test, bootstrap over rows, Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from attnreg.errors import InputError


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
