"""Metrics as ``evaluate.Metric`` classes, so that they work without a network."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
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
