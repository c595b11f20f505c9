"""What a number of seeds can show: detectable differences, seeds needed, and practical equivalence."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

MOST = 100_000


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
        if high > MOST:
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
