"""Metrics, as local ``evaluate.Metric`` classes that need no network."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics as sk
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BINS = 15  # of confidence, for the calibration error


def _both(feature: Any) -> datasets.Features:
    return datasets.Features({"predictions": feature, "references": feature})


_LABELS = _both(datasets.Value("int64"))
_NUMBERS = _both(datasets.Value("float64"))
_TAGS = _both(datasets.Sequence(datasets.Value("string")))
_TEXTS = _both(datasets.Value("string"))

METRICS: dict[str, type[evaluate.Metric]] = {}


class _Metric(evaluate.Metric):
    """The base class of metrics: enters each under its key in :data:`METRICS` and describes it to ``evaluate``."""

    bounds: tuple[float, float] = (0.0, 1.0)  # the lowest and the highest possible score

    def __init_subclass__(cls, *, key: str, citation: str = "", features: datasets.Features = _LABELS) -> None:
        about = (cls.__doc__ or key).partition("\n")[0]
        cls._key, cls._described = key, {"description": about, "citation": citation, "features": features}
        METRICS[key] = cls

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(**self._described)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {self._key: float(self._score(predictions, references))}


class MatthewsCorrelation(_Metric, key="matthews_correlation", citation="Matthews, 1975"):
    """Matthews correlation coefficient, the metric of CoLA.

    Example:
        >>> MatthewsCorrelation(keep_in_memory=True).compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
        {'matthews_correlation': 0.5773502691896258}
    """

    bounds = (-1.0, 1.0)

    def _score(self, predictions: Any, references: Any) -> float:
        return sk.matthews_corrcoef(references, predictions)


class Accuracy(_Metric, key="accuracy"):
    """Fraction of correct predictions.

    Example:
        >>> Accuracy(keep_in_memory=True).compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
        {'accuracy': 0.75}
    """

    def _score(self, predictions: Any, references: Any) -> float:
        return sk.accuracy_score(references, predictions)


class F1(_Metric, key="f1"):
    """F1 of class 1, for two classes.

    Example:
        >>> F1(keep_in_memory=True).compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
        {'f1': 0.8}
    """

    def _score(self, predictions: Any, references: Any) -> float:
        return sk.f1_score(references, predictions, labels=[1], average="micro", zero_division=0.0)


class MacroF1(_Metric, key="macro_f1"):
    """Mean F1 over the classes that occur in the labels or the predictions.

    Example:
        >>> MacroF1(keep_in_memory=True).compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
        {'macro_f1': 0.7333333333333334}
    """

    def _score(self, predictions: Any, references: Any) -> float:
        return sk.f1_score(references, predictions, average="macro", zero_division=0.0)


class Pearson(_Metric, key="pearson", citation="Pearson, 1895", features=_NUMBERS):
    """Pearson correlation; 0 if all predictions, or all references, are equal.

    Example:
        >>> result = Pearson(keep_in_memory=True).compute(predictions=[1.0, 2.0, 3.0], references=[2.0, 4.0, 5.0])
        >>> round(result["pearson"], 4)
        0.982
    """

    bounds = (-1.0, 1.0)

    def _score(self, predictions: Any, references: Any) -> float:
        return _correlation(stats.pearsonr, predictions, references)


class Spearman(_Metric, key="spearman", citation="Spearman, 1904", features=_NUMBERS):
    """Spearman rank correlation; 0 if all predictions, or all references, are equal.

    Example:
        >>> Spearman(keep_in_memory=True).compute(predictions=[1.0, 2.0, 9.0], references=[2.0, 4.0, 6.0])
        {'spearman': 1.0}
    """

    bounds = (-1.0, 1.0)

    def _score(self, predictions: Any, references: Any) -> float:
        return _correlation(stats.spearmanr, predictions, references)


def _correlation(function: Callable[[Any, Any], Any], predictions: Any, references: Any) -> float:
    sides = [np.asarray(side, float) for side in (predictions, references)]
    if any(len(side) < 2 or np.ptp(side) <= 1e-12 * np.abs(side).max() for side in sides):
        return 0.0
    return float(function(*sides).statistic)


class EntityF1(_Metric, key="entity_f1", citation="Nakayama, seqeval, 2018", features=_TAGS):
    """Micro F1 of entities; type and both boundaries must match (computed by seqeval, as CoNLL's script does).

    Example:
        >>> rows = {"predictions": [["B-PER", "O", "B-LOC"]], "references": [["B-PER", "I-PER", "B-LOC"]]}
        >>> EntityF1(keep_in_memory=True).compute(**rows)
        {'entity_f1': 0.5}
    """

    def _score(self, predictions: Any, references: Any) -> float:
        from seqeval.metrics import f1_score

        return f1_score(references, predictions, zero_division=0)


class Bleu(_Metric, key="bleu", citation="Post, 2018", features=_TEXTS):
    """Corpus BLEU from 0 to 100, by sacreBLEU with its defaults (13a tokenizer, case-sensitive).

    Example:
        >>> Bleu(keep_in_memory=True).compute(predictions=["a b c d e"], references=["a b c d e"])
        {'bleu': 100.0}
    """

    bounds = (0.0, 100.0)

    def _score(self, predictions: Any, references: Any) -> float:
        from sacrebleu import corpus_bleu

        # Rounding can put a perfect score slightly above 100.
        return min(100.0, float(corpus_bleu(list(predictions), [list(references)], force=True).score))


class ExactMatch(_Metric, key="exact_match", features=_TEXTS):
    """Fraction of texts that are exactly the right ones.

    Example:
        >>> ExactMatch(keep_in_memory=True).compute(predictions=["a b", "a"], references=["a b", "A"])
        {'exact_match': 0.5}
    """

    def _score(self, predictions: Any, references: Any) -> float:
        return float(np.mean([ours == theirs for ours, theirs in zip(predictions, references, strict=True)]))


class AnswerF1(_Metric, key="answer_f1", citation="Rajpurkar et al., 2016", features=_TEXTS):
    """Mean F1 of the words of answers, normalized as SQuAD's.

    Example:
        >>> AnswerF1(keep_in_memory=True).compute(predictions=["the red house", "a"], references=["house", "b"])
        {'answer_f1': 0.3333333333333333}
    """

    def _score(self, predictions: Any, references: Any) -> float:
        return float(np.mean([word_f1(ours, theirs) for ours, theirs in zip(predictions, references, strict=True)]))


def normalized(text: str) -> str:
    """Return a text as SQuAD compares it: in small letters, without punctuation, articles and further spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the words of a predicted text, both texts normalized; 1 if both have no words.

    Reference:
        SQuAD (arXiv 1606.05250), Section 6.1; SQuAD 2.0 (arXiv 1806.03822) for texts without words.
    """
    ours, theirs = Counter(normalized(prediction).split()), Counter(normalized(reference).split())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def accuracy_of(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """:class:`Accuracy` from confusion matrices, ``(..., C, C)``, as ``(...)``, such as one for each bootstrap sample.

    A confusion matrix has the number of rows by class (first) and predicted class (second).
    """
    return np.trace(confusion, axis1=-2, axis2=-1) / confusion.sum((-2, -1))


def matthews_correlation_of(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """:class:`MatthewsCorrelation` in the form of :func:`accuracy_of`; 0 if all labels or all predictions are equal.

    Reference:
        Gorodkin, Comparing Two K-Category Assignments by a K-Category Correlation Coefficient (2004).
    """
    gold, given = confusion.sum(-1).astype(float), confusion.sum(-2).astype(float)
    total = gold.sum(-1)
    covariance = np.trace(confusion, axis1=-2, axis2=-1) * total - (gold * given).sum(-1)
    variances = (total**2 - (gold**2).sum(-1)) * (total**2 - (given**2).sum(-1))
    return np.where(variances > 0, covariance / np.sqrt(np.where(variances > 0, variances, 1.0)), 0.0)


def f1_of(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """:class:`F1` in the form of :func:`accuracy_of`; 0 if class 1 occurs neither in the labels nor the predictions."""
    if confusion.shape[-1] < 2:
        return np.zeros(confusion.shape[:-2])
    return _f1_by_class(confusion)[0][..., 1]


def macro_f1_of(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """:class:`MacroF1` in the form of :func:`accuracy_of`."""
    scores, occurs = _f1_by_class(confusion)
    return scores.sum(-1) / occurs.sum(-1)


def _f1_by_class(confusion: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    both = confusion.sum(-1) + confusion.sum(-2)
    return 2 * np.diagonal(confusion, axis1=-2, axis2=-1) / np.maximum(both, 1), both > 0


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over 15 bins of confidence, by their size.

    It is a number in ``[0, 1]``, 0 is best. ``probabilities`` are ``(n, classes)``, ``labels`` ``(n,)``.

    Reference:
        Guo et al., On Calibration of Modern Neural Networks (ICML 2017), Eq. 3.
    """
    confidence, predicted = probabilities.double().max(-1)
    gap = (predicted == labels).double() - confidence
    # Bins exclude their lower and include their upper edge: (0, 1/15], (1/15, 2/15], ...
    number = (confidence * _BINS).ceil().long().clamp(1, _BINS) - 1
    sums = gap.new_zeros(_BINS).index_add(0, number, gap)
    return float(sums.abs().sum() / len(labels))


# The metrics that a confusion matrix determines.
CONFUSION = {
    "matthews_correlation": matthews_correlation_of,
    "accuracy": accuracy_of,
    "f1": f1_of,
    "macro_f1": macro_f1_of,
}
