"""Metrics as ``evaluate.Metric`` classes, so that they work without a network."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray
from sklearn import metrics as sk
from torch import Tensor

_LABELS = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})


class MatthewsCorrelation(evaluate.Metric):
    """Matthews' correlation coefficient, the metric of CoLA.

    Example:
        >>> MatthewsCorrelation(keep_in_memory=True).compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
        {'matthews_correlation': 0.5773502691896258}
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Matthews correlation coefficient",
            citation="Matthews, 1975",
            features=_LABELS,
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"matthews_correlation": float(sk.matthews_corrcoef(references, predictions))}


class Accuracy(evaluate.Metric):
    """Share of right predictions.

    Example:
        >>> Accuracy(keep_in_memory=True).compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
        {'accuracy': 0.75}
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description="Accuracy", citation="", features=_LABELS)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(sk.accuracy_score(references, predictions))}


def accuracy_of(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """Accuracy from counts; :class:`Accuracy` for a thousand resamples at once.

    Args:
        confusion: ``(..., C, C)``, how many rows of a class (first) were given a class (second).

    Returns:
        ``(...)``.

    Example:
        >>> float(accuracy_of(np.array([[3, 1], [0, 4]])))
        0.875
    """
    return np.trace(confusion, axis1=-2, axis2=-1) / confusion.sum((-2, -1))


def matthews_correlation_of(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """Matthews' correlation from counts; :class:`MatthewsCorrelation` for a thousand resamples at once.

    Args:
        confusion: ``(..., C, C)``, how many rows of a class (first) were given a class (second).

    Returns:
        ``(...)``; 0 where all rows are of one class, or were given one.

    Reference:
        Gorodkin, Comparing Two K-Category Assignments by a K-Category Correlation Coefficient (2004).

    Example:
        >>> float(matthews_correlation_of(np.array([[1, 1], [0, 2]])).round(4))
        0.5774
    """
    gold, given = confusion.sum(-1).astype(float), confusion.sum(-2).astype(float)
    total = gold.sum(-1)
    covariance = np.trace(confusion, axis1=-2, axis2=-1) * total - (gold * given).sum(-1)
    variances = (total**2 - (gold**2).sum(-1)) * (total**2 - (given**2).sum(-1))
    return np.where(variances > 0, covariance / np.sqrt(np.where(variances > 0, variances, 1.0)), 0.0)


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: how far confidence is from accuracy, weighted over bins of confidence.

    Args:
        probabilities: ``(n, classes)``.
        labels: ``(n,)``.
        bins: number of bins of equal width.

    Returns:
        within ``[0, 1]``, 0 being best.

    Reference:
        Guo et al., On Calibration of Modern Neural Networks (ICML 2017), Eq. 3.

    Example:
        >>> import torch
        >>> calibration_error(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]))
        0.0
    """
    confidence, predicted = probabilities.double().max(-1)
    gap = (predicted == labels).double() - confidence
    # Bins are open below and closed above, (0, 1/15], (1/15, 2/15] and so on.
    number = (confidence * bins).ceil().long().clamp(1, bins) - 1
    sums = gap.new_zeros(bins).index_add(0, number, gap)
    return float(sums.abs().sum() / len(labels))


METRICS: dict[str, type[evaluate.Metric]] = {"matthews_correlation": MatthewsCorrelation, "accuracy": Accuracy}
CONFUSION = {"matthews_correlation": matthews_correlation_of, "accuracy": accuracy_of}
