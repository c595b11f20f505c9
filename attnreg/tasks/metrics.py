"""Metrics as ``evaluate.Metric`` classes, so that they work without a network."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sklearn import metrics as sk

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


METRICS: dict[str, type[evaluate.Metric]] = {"matthews_correlation": MatthewsCorrelation, "accuracy": Accuracy}
