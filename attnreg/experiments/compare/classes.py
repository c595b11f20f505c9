"""What the predictions of a method's networks say about each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnreg.experiments.compare.group import Group
from attnreg.experiments.results.plots.comparison import Reliability

MOST_CLASSES = 20  # to show one by one
BINS = 15  # as many as in the calibration error


class ClassScores(NamedTuple):
    """Precision, recall and F1 of one class, means over seeds."""

    precision: float
    recall: float
    f1: float


def class_names(groups: Sequence[Group]) -> list[str]:
    """Return the names of the task's classes; numbers if the runs do not name them."""
    highest = max(int(max(group.labels.max(), *(p.max() for p in group.predictions))) for group in groups)
    names = groups[0].results[0].get("classes") or []
    return list(names) if len(names) > highest else [str(number) for number in range(highest + 1)]


def confusion(group: Group, classes: int) -> NDArray[np.int64]:
    """Return the number of rows by class (first) and predicted class (second), summed over seeds."""
    predicted = np.concatenate(group.predictions)
    cells = np.tile(group.labels, len(group.predictions)) * classes + predicted
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def class_scores(group: Group, classes: int) -> list[ClassScores]:
    """Return the scores of each class; 0 for the precision of a class that is never predicted."""
    from sklearn.metrics import precision_recall_fscore_support

    numbers = list(range(classes))
    each = [
        precision_recall_fscore_support(group.labels, predicted, labels=numbers, zero_division=0.0)[:3]
        for predicted in group.predictions
    ]
    return [ClassScores(*map(float, scores)) for scores in np.mean(each, axis=0).T]


def reliability(group: Group) -> Reliability | None:
    """Return accuracy by confidence, over the rows of all seeds; ``None`` if the networks have no probabilities."""
    if not group.has_classes or not group.has("dev", "calibration_error") or "logits" not in group.records[0][0]:
        return None
    logits = np.array([row["logits"] for records in group.records for row in records])
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    confidence = (shifted / shifted.sum(1, keepdims=True)).max(1)
    right = np.concatenate(group.predictions) == np.tile(group.labels, len(group.predictions))
    number = np.clip(np.ceil(confidence * BINS), 1, BINS).astype(int) - 1
    rows = np.bincount(number, minlength=BINS)
    held = rows > 0
    sure, accurate = (np.bincount(number, weights=each, minlength=BINS)[held] for each in (confidence, right))
    return Reliability(sure / rows[held], accurate / rows[held], rows[held])
