"""Metrics, as local ``evaluate.Metric`` classes that need no network."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import stats
from sklearn import metrics as sk
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
BINS = 15  # of confidence, for the calibration error

_LABELS, _NUMBERS, _TEXTS = (datasets.Value(dtype) for dtype in ("int64", "float64", "string"))
_TAGS = datasets.Sequence(_TEXTS)


def _metric(
    name: str, about: str, function: Callable[[Any, Any], float], *, feature: Any = _LABELS, highest: float = 1.0
) -> Any:
    """Create the class of a metric from a function of predictions and references, whose best value is ``highest``."""

    class Metric(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            features = datasets.Features({"predictions": feature, "references": feature})
            return evaluate.MetricInfo(description=about, citation="", features=features)

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return {name: float(function(predictions, references))}

    Metric.__name__, Metric.__doc__, Metric.highest = name, about, highest
    return Metric


def _correlation(function: Callable[[Any, Any], Any], predictions: Any, references: Any) -> float:
    sides = [np.asarray(side, float) for side in (predictions, references)]
    if any(len(side) < 2 or np.ptp(side) <= 1e-12 * np.abs(side).max() for side in sides):
        return 0.0
    return float(function(*sides).statistic)


def _entity_f1(predictions: Any, references: Any) -> float:
    from seqeval.metrics import f1_score

    return f1_score(references, predictions, zero_division=0)


def _bleu(predictions: Any, references: Any) -> float:
    from sacrebleu import corpus_bleu

    # Rounding can put a perfect score slightly above 100.
    return min(100.0, float(corpus_bleu(list(predictions), [list(references)], force=True).score))


def _mean(score: Callable[[str, str], float]) -> Callable[[Any, Any], float]:
    return lambda ours, theirs: float(np.mean([score(*pair) for pair in zip(ours, theirs, strict=True)]))


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


#: The classes of metrics by name: local ``evaluate.Metric`` classes that need no network.
METRICS = {metric.__name__: metric for metric in (
    _metric("matthews_correlation", "Matthews correlation coefficient, the metric of CoLA.",
            lambda ours, theirs: sk.matthews_corrcoef(theirs, ours)),
    _metric("accuracy", "Fraction of correct predictions.", lambda ours, theirs: sk.accuracy_score(theirs, ours)),
    _metric("f1", "F1 of class 1, for two classes.", lambda ours, theirs: sk.f1_score(
            theirs, ours, labels=[1], average="micro", zero_division=0.0)),
    _metric("macro_f1", "Mean F1 over the classes that occur in the labels or the predictions.",
            lambda ours, theirs: sk.f1_score(theirs, ours, average="macro", zero_division=0.0)),
    _metric("pearson", "Pearson correlation; 0 if all predictions, or all references, are equal.",
            partial(_correlation, stats.pearsonr), feature=_NUMBERS),
    _metric("spearman", "Spearman rank correlation; 0 if all predictions, or all references, are equal.",
            partial(_correlation, stats.spearmanr), feature=_NUMBERS),
    _metric("entity_f1", "Micro F1 of entities; type and both boundaries must match (by seqeval, as CoNLL's script).",
            _entity_f1, feature=_TAGS),
    _metric("bleu", "Corpus BLEU from 0 to 100, by sacreBLEU with its defaults (13a tokenizer, case-sensitive).",
            _bleu, feature=_TEXTS, highest=100.0),
    _metric("exact_match", "Fraction of texts that are exactly the right ones.", _mean(str.__eq__), feature=_TEXTS),
    _metric("answer_f1", "Mean F1 of the words of answers, normalized as SQuAD's.", _mean(word_f1), feature=_TEXTS),
)}  # fmt: skip


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over 15 bins of confidence, by their size.

    It is a number in ``[0, 1]``, 0 is best. ``probabilities`` are ``(n, classes)``, ``labels`` ``(n,)``.

    Reference:
        Guo et al., On Calibration of Modern Neural Networks (ICML 2017), Eq. 3.
    """
    confidence, predicted = probabilities.double().max(-1)
    gap = (predicted == labels).double() - confidence
    # Bins exclude their lower and include their upper edge: (0, 1/15], (1/15, 2/15], ...
    number = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    sums = gap.new_zeros(BINS).index_add(0, number, gap)
    return float(sums.abs().sum() / len(labels))
