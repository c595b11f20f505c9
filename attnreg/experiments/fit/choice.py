"""The choice among tries by their out-of-fold predictions, and the score that the chosen try will have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from attnreg.experiments.fit.answers import Values

Numbers = NDArray[np.int64]
Score = Callable[[Values, Values], float]  # of labels and predictions; the higher, the better
_ERRORS = 0.5  # standard errors below the best score, within which what comes first is chosen


class Estimate(NamedTuple):
    """The score that a chosen try will have on new rows, and the ends of its 95 % interval."""

    score: float
    low: float
    high: float


def scores_of(score: Score, labels: Values, tries: Values) -> NDArray[np.float64]:
    """Return the mean score over repeats, by try; ``tries`` are predictions ``(tries, repeats, n)``."""
    return np.array([np.mean([score(labels, repeat) for repeat in repeats]) for repeats in tries])


def first_of_best(scores: NDArray[np.float64], errors: NDArray[np.float64]) -> int:
    """Return the first try whose score is at most half a standard error below the best score.

    ``errors``, ``(tries, tries)``, are the standard errors of differences between scores. A try that comes first
    because it is usually the best is not given up for a chance difference. Half an error, because what is usually the
    best is not so with every model.

    Reference:
        The rule of one standard error: Breiman et al., Classification and Regression Trees (1984), Section 3.4.3.

    Example:
        >>> errors = np.array([[0.0, 0.04], [0.04, 0.0]])
        >>> first_of_best(np.array([0.80, 0.81]), errors), first_of_best(np.array([0.80, 0.83]), errors)
        (0, 1)
    """
    best = int(np.argmax(scores))
    return int(np.argmax(scores >= scores[best] - _ERRORS * errors[best] - 1e-12))


def chosen_of(
    score: Score, labels: Values, tries: Values, units: Numbers | None = None, *, resamples: int = 200, seed: int = 0
) -> int:
    """Return the number of the try that predictions ``(tries, repeats, n)`` choose: the :func:`first_of_best`."""
    scores = scores_of(score, labels, tries)
    if not scores.argmax():  # the first try is the best, whatever the errors
        return 0
    return first_of_best(scores, _errors(_sampled(score, labels, tries, _samples(labels, units, resamples, seed))))


def bias_corrected(
    score: Score,
    labels: Values,
    tries: Values,
    units: Numbers | None = None,
    *,
    best: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[Estimate, list[float]]:
    """Estimate the score of the chosen try, without the optimism of scoring it on rows that chose it (BBC-CV).

    Every bootstrap sample of rows chooses a try on the rows drawn, which is scored on the rows left out. By how much
    the try that all rows choose scores more there, on average, is subtracted from this try's score on all rows. For
    accuracy, that comes to the mean score on rows left out; others have a bias where these rows are few. Also returns
    the share of samples that chose a try, by try.

    Args:
        score: returns the score of predictions from labels and predictions; the higher, the better.
        labels: class numbers or, for a regressor, numbers, ``(n,)``.
        tries: out-of-fold predictions, ``(tries, repeats, n)``, of which the :func:`first_of_best` is chosen.
        units: unit of every row, such as its group; rows of a unit are drawn together (default: every row alone).
        best: number of the try that all rows choose (default: the :func:`first_of_best`).
        resamples: number of bootstrap samples.
        seed: seed of the draws.

    Reference:
        Tsamardinos, Greasidou, Borboudakis, Bootstrapping the out-of-sample predictions for efficient and accurate
        cross-validation (Machine Learning 107:1895, 2018), Algorithm 5.

    Example:
        >>> def accuracy(labels, predictions):
        ...     return float((labels == predictions).mean())
        >>> labels = np.arange(200) % 2
        >>> noise = np.random.default_rng(0).integers(0, 2, (30, 1, 200))
        >>> best = max(accuracy(labels, predictions) for predictions in noise)
        >>> estimate, _ = bias_corrected(accuracy, labels, noise)
        >>> best > 0.54, estimate.score < 0.51
        (True, True)
    """
    samples = _samples(labels, units, resamples, seed)
    samples = samples[(samples == 0).any(1)]
    sampled = _sampled(score, labels, tries, samples)
    errors = _errors(sampled)
    chosen = np.array([first_of_best(scores, errors) for scores in sampled])
    all_scores = scores_of(score, labels, tries)
    best = first_of_best(all_scores, errors) if best is None else best
    unseen, of_best = np.array([
        scores_of(score, labels[counts == 0], tries[[choice, best]][..., counts == 0])
        for counts, choice in zip(samples, chosen, strict=True)
    ]).T  # fmt: skip
    # Samples may choose a try with a higher score than that of the best, which does not raise the estimate.
    estimate = all_scores[best] + min(0.0, (unseen - of_best).mean())
    low, high = np.clip(np.quantile(unseen, [0.025, 0.975]) + estimate - unseen.mean(), -1.0, 1.0)
    low, high = min(low, estimate), max(high, estimate)  # a few samples may lie far below all others
    shares = np.bincount(chosen, minlength=len(tries)) / len(chosen)
    return Estimate(float(estimate), float(low), float(high)), shares.tolist()


def widened(estimate: Estimate, count: int) -> Estimate:
    """Widen an interval to that of a share of ``count`` rows, since samples of rows that are right have no errors.

    The interval does not go below 0.

    Reference:
        Wilson, Probable inference, the law of succession, and statistical inference (JASA 22:209, 1927).

    Example:
        >>> [round(end, 3) for end in widened(Estimate(1.0, 1.0, 1.0), 16)]  # 16 rows, all right
        [1.0, 0.806, 1.0]
    """
    wilson = stats.binomtest(round(estimate.score * count), count).proportion_ci(method="wilson")
    low = max(0.0, min(estimate.low, float(wilson.low)))
    return Estimate(estimate.score, low, max(estimate.high, float(wilson.high)))


def probability_best(
    score: Score, labels: Values, tries: Values, *, resamples: int = 500, seed: int = 0
) -> list[float]:
    """Return the share of bootstrap samples of the rows in which no other try scores higher, by try."""
    scores = _sampled(score, labels, tries, _samples(labels, None, resamples, seed))
    return (scores >= scores.max(1, keepdims=True) - 1e-12).mean(0).tolist()


def _sampled(score: Score, labels: Values, tries: Values, samples: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the scores of tries on bootstrap samples, ``(resamples, tries)``."""
    drawn = (np.repeat(np.arange(len(labels)), counts) for counts in samples)
    return np.array([scores_of(score, labels[rows], tries[..., rows]) for rows in drawn])


def _errors(sampled: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard errors of the differences between the scores of tries, ``(tries, tries)``."""
    return (sampled[:, :, None] - sampled[:, None]).std(0)


def _samples(labels: Values, units: Numbers | None, resamples: int, seed: int) -> NDArray[np.int64]:
    """Return how often a row is drawn, ``(resamples, n)``; if all rows are of one unit, every row is drawn alone."""
    rows = np.arange(len(labels))
    unit = rows if units is None or len(np.unique(units)) == 1 else np.unique(units, return_inverse=True)[1]
    count = int(unit.max()) + 1
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), resamples)[:, unit]


def temperature_of(logits: NDArray[np.float64], labels: Numbers) -> float:
    """Return the temperature that makes held-out logits ``(n, classes)`` most likely, between 1/20 and 20.

    As if one row more had all classes alike, since a few rows that are all right do not make a model certain.

    Reference:
        Guo et al., On Calibration of Modern Neural Networks (ICML 2017), Section 4.2.
    """

    def loss(power: float) -> float:
        scaled = special.log_softmax(logits / np.exp(power), axis=1)
        return -float(scaled[np.arange(len(labels)), labels].sum() + scaled.mean())

    return float(np.exp(optimize.minimize_scalar(loss, bounds=(-np.log(20), np.log(20)), method="bounded").x))


def decay_of(sizes: Sequence[int], scores: Sequence[float]) -> float:
    """Return the power with which errors fall with the number of rows, from 0 (not at all) to 1, by least squares.

    Reference:
        Power laws of learning curves: Viering and Loog, The Shape of Learning Curves (arXiv 2103.10948).

    Example:
        >>> round(decay_of([100, 200, 400], [0.6, 0.7, 0.775]), 2)
        0.42
    """
    errors = np.log(np.maximum(1 - np.asarray(scores, float), 1e-4))
    slope = float(np.polyfit(np.log(np.asarray(sizes, float)), errors, 1)[0])
    return float(np.clip(-slope, 0.0, 1.0))


def certain_decay(sizes: Sequence[int], scores: NDArray[np.float64]) -> float:
    """Return :func:`decay_of` the mean of scores ``(sizes, folds)``, less its standard error by a jackknife."""
    folds = scores.shape[1]
    decays = np.array([decay_of(sizes, np.delete(scores, fold, axis=1).mean(1).tolist()) for fold in range(folds)])
    error = np.sqrt((folds - 1) / folds * ((decays - decays.mean()) ** 2).sum())
    return max(0.0, decay_of(sizes, scores.mean(1).tolist()) - float(error))
