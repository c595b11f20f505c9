"""Statistics over several tasks: mean difference, probability of improvement, ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from attnreg.errors import InputError


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
