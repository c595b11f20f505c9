"""Losses by cross-entropy: with smoothed labels or weighted classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.arguments import ProbabilityBelowOne, probability_below_one
from attnreg.errors import InputError
from attnreg.outputs import IGNORED, aligned_labels, needed_labels_of, predictions_of
from attnreg.training.method import Batch


class CrossEntropy:
    r"""Cross-entropy with smoothed labels: a ``loss_function`` of methods.

    .. math:: \ell_t = -(1 - \epsilon) \log p_t(y_t) - \frac{\epsilon}{C} \sum_{c=1}^{C} \log p_t(c)

    The loss is its mean over rows, or over positions with a label.

    Args:
        model: the model, or a wrapper of it, which tells whether labels are shifted.
        smoothing: share of each label that is spread over all C classes (epsilon).

    Raises:
        InputError: if ``smoothing`` is out of range. In a step: if there are no logits ``(..., C)``
            or the labels ``(...)`` are not one class for each.

    Reference:
        Label smoothing (Szegedy et al., CVPR 2016, arXiv 1512.00567), Section 7.

    Example:
        >>> from types import SimpleNamespace
        >>> loss_function = CrossEntropy(nn.Linear(1, 1), smoothing=0.1)
        >>> logits = torch.tensor([[0.0, 2.0]])
        >>> loss_function(SimpleNamespace(logits=logits), {"labels": torch.tensor([1])})
        tensor(0.2269)
    """

    def __init__(self, model: nn.Module, smoothing: ProbabilityBelowOne = 0.0) -> None:
        self.model = model
        self.smoothing = probability_below_one("smoothing", smoothing)

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        logits = predictions_of(outputs)
        if logits is None:
            raise InputError(f"CrossEntropy needs `logits` in the output, {type(outputs).__name__}, but found none.")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = needed_labels_of(batch, logits)
        if labels.shape != logits.shape[:-1] or labels.is_floating_point() or logits.shape[-1] == 1:
            raise InputError(
                f"CrossEntropy needs labels that are classes, of shape {tuple(logits.shape[:-1])}, got {labels.dtype} "
                f"of shape {tuple(labels.shape)}."
            )
        own = aligned_labels(self.model, labels).flatten()
        total = F.cross_entropy(logits.flatten(0, -2), own, reduction="sum", label_smoothing=self.smoothing)
        return total / (own != IGNORED).sum()


def balanced_weights(labels: Iterable[int], classes: int) -> list[float]:
    r"""Return weights by which each class that occurs has the same weight in total, and each row 1 on average.

    .. math:: w_c = \frac{n}{C\, n_c}

    n rows have a label, the class number, C of the ``classes`` occur, and :math:`n_c` rows are of class c, as in
    scikit-learn. A class that no row has gets 0.

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

    Shape:
        ``outputs.logits`` ``(B, C)``, ``batch["labels"]`` ``(B,)`` and a weight for each class; returns a 0-d tensor.

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
        logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
        weights = torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)
        return F.cross_entropy(logits, batch["labels"], weights, reduction="none").mean()
