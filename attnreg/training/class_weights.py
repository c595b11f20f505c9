"""Weights of classes in the loss, for data in which some classes are rare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.training.method import Batch


def balanced_weights(labels: Iterable[int], classes: int) -> list[float]:
    r"""Return weights by which each class that occurs has the same weight in total, and each row 1 on average.

    .. math:: w_c = \frac{n}{C\, n_c}

    n rows have a label, C classes occur, and :math:`n_c` rows are of class c, as in scikit-learn. A class that no row
    has gets 0.

    Args:
        labels: the class number of each row.
        classes: number of classes.

    Example:
        >>> balanced_weights([0, 0, 0, 1], classes=3)
        [0.6666666666666666, 2.0, 0.0]
    """
    counts = Counter(labels)
    rows = sum(counts.values())
    return [rows / (len(counts) * counts[c]) if counts[c] else 0.0 for c in range(classes)]


class WeightedCrossEntropy:
    """The mean over rows of the cross-entropy, times the weight of the row's class: a ``loss_function`` of methods.

    Torch's mean with ``weight`` divides by the weights of the batch instead. In a batch of one class it would ignore
    them, and micro-batches would not add up to their batch.

    Args:
        weights: one for each class.

    Shape:
        ``outputs.logits`` ``(B, C)`` and ``batch["labels"]`` ``(B,)``; returns a 0-d tensor.

    Example:
        >>> from types import SimpleNamespace
        >>> loss_function = WeightedCrossEntropy([0.5, 2.0])
        >>> loss_function(SimpleNamespace(logits=torch.zeros(2, 2)), {"labels": torch.tensor([0, 1])})
        tensor(0.8664)
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = tuple(weights)

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        logits = outputs.logits if outputs.logits.dtype == torch.float64 else outputs.logits.float()
        weights = torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)
        return F.cross_entropy(logits, batch["labels"], weights, reduction="none").mean()
