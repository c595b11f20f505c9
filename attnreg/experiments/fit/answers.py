"""The labels of rows, classes or numbers: how they are predicted, scored and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import number_of

OF_CLASSES = ("accuracy", "macro_f1")  # metrics; the first is the default
OF_NUMBERS = ("pearson", "spearman")
_STRATA = 10  # groups of similar numbers, at most
Values = NDArray[Any]  # class numbers, or numbers


@dataclass(frozen=True, eq=False)
class Answers:
    """The labels of rows: classes, or numbers, which are standardized for training.

    Called with labels and predictions, it returns their score, of which 1 is the best.
    """

    metric: str
    classes: NDArray[Any] | None = None  #: the classes, sorted; ``None`` for numbers
    center: float = 0.0  #: mean of the numbers
    scale: float = 1.0  #: their standard deviation

    @classmethod
    def of(cls, metric: str | None, classes: NDArray[Any] | None, numbers: Sequence[float] = ()) -> Answers:
        """Return the answers for labels that are classes or numbers; raise if the metric does not suit them."""
        known = OF_NUMBERS if classes is None else OF_CLASSES
        if metric is not None and metric not in known:
            kind = "numbers" if classes is None else "classes"
            raise InputError(
                f"Expected `metric` to be one of {', '.join(known)}, as labels are {kind}, got {metric!r}."
            )
        if classes is not None:
            return cls(metric or known[0], classes)
        return cls(metric or known[0], None, float(np.mean(numbers)), float(np.std(numbers)))

    @property
    def outputs(self) -> int:
        """How many outputs a network has for a row."""
        return 1 if self.classes is None else len(self.classes)

    @property
    def in_words(self) -> str:
        """The metric in the words that follow a score."""
        words = {"pearson": "of 1 in Pearson's correlation", "spearman": "of 1 in Spearman's rank correlation"}
        return words.get(self.metric, self.metric.replace("_", " "))

    def __call__(self, labels: Values, predictions: Values) -> float:
        """Return the score of predictions."""
        return score_of(self.metric, labels, predictions, self.outputs)

    def score_of_data(self, outputs: Values, labels: Sequence[Any], row_numbers: Sequence[int]) -> float:
        """Return the score of a network's outputs for labels as the data spells them.

        A class that training lacked is never right. A label that is no number raises an error with its row number.
        """
        if self.classes is None:
            answers = np.array(numbers_in(labels, row_numbers))
        else:
            numbers = {str(name): number for number, name in enumerate(self.classes)}
            answers = np.array([numbers.get(str(label), len(numbers)) for label in labels])
        return score_of(self.metric, answers, self.predicted(outputs), self.outputs + 1)

    def predicted(self, logits: Values) -> Values:
        """Return the classes or numbers that logits ``(..., outputs)`` predict."""
        return logits[..., 0] if self.classes is None else logits.argmax(-1)

    def strata(self, labels: Values) -> Values:
        """Return classes, or groups of similar numbers, by which rows are spread evenly over folds."""
        if self.classes is not None:
            return labels
        order: Values = np.argsort(np.argsort(labels, kind="stable"))
        return order * min(_STRATA, len(labels) // 10) // len(labels)

    def trivial(self, labels: Values) -> tuple[str, Values]:
        """Return the name of a constant predictor, and its predictions."""
        if self.classes is None:
            return "mean of all labels", np.full(len(labels), labels.mean())
        return "majority class", np.full(len(labels), np.bincount(labels).argmax())

    def real(self, numbers: Values) -> Values:
        """Return standardized numbers in the units of the data."""
        return numbers * self.scale + self.center

    def shown(self, score: float) -> str:
        """Return a score as text."""
        return f"{score:.2f}" if self.classes is None else f"{score:.1%}"


def numbers_in(labels: Sequence[Any], row_numbers: Sequence[int]) -> list[float]:
    """Return labels as numbers; raise, with its row number in the data, if a label is no number."""
    numbers = list[float]()
    for row, label in zip(row_numbers, labels, strict=True):
        if (number := number_of(label)) is None:
            raise InputError(f"Expected numbers as labels, got {label!r} in row {row}.")
        numbers.append(number)
    return numbers


def score_of(metric: str, labels: Values, predictions: Values, classes: int) -> float:
    """Return the metric of predicted classes or numbers; a correlation is 0 if one side is constant."""
    from scipy.stats import rankdata  # late: a command that is refused does not need it

    if metric in OF_NUMBERS:  # scipy's pearsonr takes five times as long, and a bootstrap asks thousands of times
        a, b = (labels, predictions) if metric == "pearson" else map(rankdata, (labels, predictions))
        if any(np.ptp(side) <= 1e-12 * np.abs(side).max() for side in (a, b)):
            return 0.0
        return float(np.corrcoef(a, b)[0, 1])
    if metric == "accuracy":
        return float((labels == predictions).mean())
    confusion = np.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes)
    totals = confusion.sum(0) + confusion.sum(1)  # 0 for a class that neither occurs nor is predicted
    return float((2 * confusion.diagonal() / np.maximum(totals, 1)).sum() / (totals > 0).sum())
