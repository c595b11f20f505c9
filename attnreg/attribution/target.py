"""The score s that attribution explains: one number per batch, computed from a model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.errors import InputError
from attnreg.outputs import IGNORED, labels_of, moved_labels, predictions_of, shifts_labels


class Target:
    r"""The score s to explain, chosen by the shape of the logits.

    * classification and multiple choice, ``(B, C)``: :math:`\sum_b z_{b, c_b}`, the logit of each sample's class;
    * tokens, ``(B, N, C)``: :math:`\sum_{b,n} \log \mathrm{softmax}(z_{bn})_{c_{bn}}` over labelled positions;
    * extractive question answering: the same for two classes per row, the positions where the answer begins and ends;
    * regression, ``(B,)`` or ``(B, 1)``, or float labels in the logits' shape: :math:`-\sum (z - y)^2`.

    The classes c are the predicted ones (pseudo-labels), fixed by the plain forward pass, or the gold labels. If the
    model shifts its labels one position to the left, as causal language models do, so does the target.

    Args:
        kind: ``"predicted"``, ``"label"``, or a function of the model's output and the batch that returns the score of
            each sample, ``(B,)``, or of the batch.
        shift_labels: whether the logits at a position predict the label of the next position. By default, both readings
            are compared with the model's own loss; if neither matches it, the model's class decides.

    Reference:
        AD-DROP (NeurIPS 2022), Section 2, and its official code.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
        >>> target = Target("predicted")
        >>> target.score(logits, {}, target.classes(logits, {}))
        tensor([5.])
    """

    def __init__(
        self, kind: str | Callable[[Any, Mapping[str, Any]], Tensor] = "predicted", *, shift_labels: bool | None = None
    ) -> None:
        if kind not in ("predicted", "label") and not callable(kind):
            raise InputError(f"Expected `target` to be 'predicted', 'label' or a function, got {kind!r}.")
        self.kind = kind
        self.shift_labels = shift_labels
        self._by_class = False

    def for_model(self, model: nn.Module) -> Target:
        """Adapt the target to a model; one with several labels per row needs a function as ``kind``."""
        if callable(self.kind):
            return self
        if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
            raise InputError(
                f"A multi-label classifier has no single class to explain, as `target` {self.kind!r} needs: pass a "
                "function that scores the labels to explain."
            )
        target = Target(self.kind, shift_labels=self.shift_labels)
        target._by_class = shifts_labels(model)
        return target

    def _labels(self, output: Any, batch: Mapping[str, Any]) -> Any:
        labels: Any = labels_of(batch, logits_of(output))
        if not isinstance(labels, Tensor) or batch.get("labels") is None:
            return labels
        if self.shift_labels is None:
            shifts = _shifts_labels(output, batch)
            self.shift_labels = self._by_class if shifts is None else shifts
        return moved_labels(labels) if self.shift_labels else labels

    def classes(self, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the classes whose score is explained; ``None`` for regression and for a function."""
        if callable(self.kind):
            return None
        logits, labels = logits_of(output), self._labels(output, batch)
        if _is_regression(logits, labels):
            return None
        if self.kind == "label":
            return _needed(labels, "labels")
        classes = logits.detach().argmax(-1)
        if logits.dim() == 3:
            ignored = _unlabelled(logits, {**batch, "labels": labels})
            classes = classes if ignored is None else classes.masked_fill(ignored, IGNORED)
        return classes

    def score(self, output: Any, batch: Mapping[str, Any], classes: Tensor | None) -> Tensor:
        """Compute the score of the batch, shape ``(1,)``, given the result of :meth:`classes`."""
        if callable(self.kind):
            score = self.kind(output, batch)
            if not isinstance(score, Tensor):
                raise InputError(f"Expected `target` to return a tensor, the score to explain, got {score!r}.")
            return score.sum().reshape(1)
        logits = logits_of(output)
        if classes is None:
            labels = _needed(batch.get("labels"), "gold scores")
            return -F.mse_loss(logits.reshape(-1), labels.reshape(-1).to(logits.dtype), reduction="sum").reshape(1)
        if logits.dim() == 2:
            return logits.gather(-1, classes.reshape(-1, 1)).sum().reshape(1)
        flat = logits.flatten(0, -2), classes.reshape(-1)
        return -F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum").reshape(1)


def logits_of(output: Any) -> Tensor:
    """Return what :func:`attnreg.outputs.predictions_of` finds, or raise if it has no known shape."""
    logits = predictions_of(output)
    if not isinstance(logits, Tensor) or logits.dim() not in (1, 2, 3):
        shape = f" with logits of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise InputError(
            f"The model's output, {type(output).__name__}{shape}, has no `logits` of shape (B,), (B, C) or (B, N, C): "
            "pass `target` as a function of the output and the batch that returns the score to explain."
        )
    return logits


def _shifts_labels(output: Any, batch: Mapping[str, Any]) -> bool | None:
    """Whether a model's loss compares each label with the logits one position before it; ``None`` if unclear."""
    loss, logits, labels = getattr(output, "loss", None), logits_of(output), batch["labels"]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or logits.dim() != 3 or labels.shape != logits.shape[:2]:
        return None
    own, flat, distances = float(loss.detach()), logits.detach().flatten(0, 1).float(), []
    for each in (labels, moved_labels(labels)):
        count = (each != IGNORED).sum() if (given := batch.get("num_items_in_batch")) is None else given
        total = F.cross_entropy(flat, each.flatten(), ignore_index=IGNORED, reduction="sum")
        distances.append(abs(own - float(total) / max(float(count), 1.0)))
    plain, shifted = distances
    if plain == shifted or min(plain, shifted) > 1e-3 * abs(own) + 1e-4:
        return None
    return shifted < plain


def _is_regression(logits: Tensor, labels: Any) -> bool:
    one_number = logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1)
    return one_number or (isinstance(labels, Tensor) and labels.is_floating_point() and labels.shape == logits.shape)


def _unlabelled(logits: Tensor, batch: Mapping[str, Any]) -> Tensor | None:
    """Find the positions without a label or, if no labels are given, the padding."""
    for name in ("labels", "decoder_attention_mask", "attention_mask"):
        tensor = batch.get(name)
        if isinstance(tensor, Tensor) and tensor.shape == logits.shape[:2]:
            return tensor == (IGNORED if name == "labels" else 0)
    return None


def _needed(labels: Any, what: str) -> Tensor:
    if not isinstance(labels, Tensor):
        raise InputError(f"The batch to attribute has no {what}: pass them as `labels`.")
    return labels
