"""Losses by cross-entropy: with smoothed labels, weighted prompts, or weighted classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.arguments import NotNegative, ProbabilityBelowOne, not_negative, probability
from attnreg.errors import InputError
from attnreg.functional.seeded import on_device
from attnreg.outputs import IGNORED, aligned_labels, moved_labels, needed_labels_of, predictions_of, shifts_labels
from attnreg.training.method import Batch


class CrossEntropy:
    r"""Cross-entropy with smoothed labels, weighted prompts or weighted classes: a ``loss_function`` of methods.

    .. math:: \mathcal L = \frac{1}{|R|} \Big( \sum_{t \in R} \ell_t + \lambda \sum_{t \in P} \ell_t \Big), \qquad
        \ell_t = -(1 - \epsilon)\, w_{y_t} \log p_t(y_t) - \frac{\epsilon}{C} \sum_{c=1}^{C} w_c \log p_t(c)

    R are the rows or positions with a label. P are the tokens of prompts: predicted by a causal language model, no
    padding, with the label -100, in rows that have a label, too. Since the sum is divided by the
    number of labels, micro-batches add up to their batch, and a response weighs the same after a short and a long
    prompt; torch's mean with ``weight`` divides by the weights of the batch instead.

    Args:
        model: the model, or a wrapper of it, which tells whether labels are shifted.
        smoothing: share of a label that is spread over all C classes (epsilon).
        prompt: weight of a prompt's token, relative to a response's (lambda); 0 leaves prompts out.
        weights: weight of every class (w; default: 1).

    Raises:
        InputError: if an argument is out of range, or there is a ``prompt`` but the model is no causal language model.
            In a step: if there are no logits ``(..., C)`` or the labels ``(...)`` are no classes.

    Reference:
        Label smoothing (Szegedy et al., CVPR 2016, arXiv 1512.00567), Section 7; weighted instruction tuning
        (Chatterjee et al., TACL 2025, arXiv 2507.07817).

    Example:
        >>> from types import SimpleNamespace
        >>> loss_function = CrossEntropy(nn.Linear(1, 1), smoothing=0.1)
        >>> logits = torch.tensor([[0.0, 2.0]])
        >>> loss_function(SimpleNamespace(logits=logits), {"labels": torch.tensor([1])})
        tensor(0.2269)
    """

    def __init__(
        self,
        model: nn.Module,
        smoothing: ProbabilityBelowOne = 0.0,
        prompt: NotNegative = 0.0,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.model = model
        self.smoothing = probability("smoothing", smoothing, "[0, 1)")
        self.prompt = not_negative("prompt", prompt)
        self.weights = weights
        if prompt and not shifts_labels(model):
            raise InputError(
                f"Only causal language models have a `prompt` to weigh, and {type(model).__name__} is not one."
            )

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        logits = predictions_of(outputs)
        if logits is None:
            raise InputError(f"CrossEntropy needs `logits` in the output, but {type(outputs).__name__} has none.")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = needed_labels_of(batch, logits)
        predicted = aligned_labels(self.model, labels, logits)
        if predicted.shape != logits.shape[:-1] or labels.is_floating_point() or logits.shape[-1] == 1:
            raise InputError(
                f"CrossEntropy needs labels that are classes, of shape {tuple(logits.shape[:-1])}, got {labels.dtype} "
                f"of shape {tuple(labels.shape)}."
            )
        total = self._sum(logits, labels)
        if self.prompt:
            total = total + self.prompt * self._sum(logits, _prompts(labels, batch))
        return total / (predicted != IGNORED).sum()

    def _sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        classes = aligned_labels(self.model, labels, logits).flatten()
        weights = None if self.weights is None else on_device(self.weights, logits.device, logits.dtype)
        return F.cross_entropy(logits.flatten(0, -2), classes, weights, reduction="sum", label_smoothing=self.smoothing)


def _prompts(labels: Tensor, batch: Batch) -> Tensor:
    """Return as labels the tokens without a label that are no padding, in rows with a label to predict."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or ids.shape != labels.shape or (mask is not None and mask.shape != labels.shape):
        raise InputError("CrossEntropy with `prompt` needs `input_ids`, and an `attention_mask` if any, like `labels`.")
    is_prompt = (labels == IGNORED) & (moved_labels(labels) != IGNORED).any(-1, keepdim=True)
    return ids.where(is_prompt if mask is None else is_prompt & mask.bool(), IGNORED)


def balanced_weights(labels: Iterable[int] | Tensor, classes: int) -> list[float]:
    r"""Return weights that give all classes that occur the same total weight, and rows the mean weight 1.

    .. math:: w_c = \frac{n}{C\, n_c}

    n rows have a label, the class number, C of the ``classes`` occur, and :math:`n_c` rows are of class c, as in
    scikit-learn. A class that no row has gets 0. Rows labelled -100 do not count.

    Example:
        >>> balanced_weights([0, 0, 0, 1], classes=3)
        [0.6666666666666666, 2.0, 0.0]
    """
    counts = Counter(int(label) for label in labels if label != IGNORED)
    if strange := sorted(counts.keys() - {*range(classes)}):
        raise InputError(f"Expected class numbers from 0 to {classes - 1}, got {strange[0]}.")
    rows = sum(counts.values())
    return [rows / (len(counts) * counts[c]) if counts[c] else 0.0 for c in range(classes)]
