"""The statistics of a comparison; scipy does the work."""

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
        mean: of the differences.
        low: lower end of the confidence interval.
        high: its upper end.
        p: two-sided p-value of the mean being 0.
    """

    mean: float
    low: float
    high: float
    p: float


def paired_difference(scores: ArrayLike, others: ArrayLike, confidence: float = 0.95) -> Difference:
    """Student's paired t-test and interval, over seeds.

    It answers for other seeds, that is for other orders of the data and other heads, on the same dev rows.

    Args:
        scores: ``(n,)``, one per seed.
        others: ``(n,)``, of the same seeds.
        confidence: of the interval.

    Returns:
        the difference; interval and p are NaN where fewer than two seeds, or no spread, leave them undefined.

    Raises:
        InputError: if the two are not of one length.

    Example:
        >>> difference = paired_difference([3.0, 4.0, 6.0], [1.0, 3.0, 4.0])
        >>> round(difference.mean, 3), round(difference.low, 3), round(difference.p, 3)
        (1.667, 0.232, 0.038)
    """
    a, b = np.asarray(scores, float), np.asarray(others, float)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise InputError(f"Expected as many scores on both sides, got {a.shape} and {b.shape}.")
    gaps = a - b
    if len(gaps) < 2 or np.ptp(gaps) <= 1e-12 * max(np.abs(a).max(), np.abs(b).max()):  # rounding is no spread
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
    """Percentile bootstrap of the mean (over seeds) difference of a metric, over the dev rows.

    It answers for other dev rows, with the same trained networks. Both methods are scored on the same resampled rows.

    Args:
        metric: of counts ``(..., C, C)``, a value in :data:`attnreg.experiments.tasks.metrics.CONFUSION`.
        labels: ``(n,)``.
        predictions: ``(n,)`` for each seed.
        others: ``(n,)`` for each seed, of the other method.
        confidence: of the interval.
        resamples: number of bootstrap samples.
        seed: of the resampling.

    Returns:
        both ends of the interval.
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
    """Holm's step-down adjustment: rejecting what is below 0.05 rejects anything wrongly in at most 5 % of cases.

    Args:
        p_values: one per comparison; NaN ones stay NaN and do not count.

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
