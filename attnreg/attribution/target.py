"""What is explained: the score s of a model's output, as one number per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnreg.errors import InputError

IGNORED = -100  # the label that transformers gives to positions without one


class Target:
    r"""The score s, chosen by the shape of the logits.

    * classification and multiple choice, ``(B, C)``: :math:`\sum_b z_{b, c_b}`, the logit of each sample's class;
    * tokens, ``(B, N, C)``: :math:`\sum_{b,n} \log \mathrm{softmax}(z_{bn})_{c_{bn}}` over labelled positions;
    * regression, ``(B,)`` or ``(B, 1)``, or labels of the logits' shape: :math:`-\sum (z - y)^2`.

    The classes c are the predicted ones (pseudo-labels), fixed by the plain forward pass, or the gold labels. Labels of
    causal language models are moved one position to the left first, as those models do.

    Args:
        kind: ``"predicted"``, ``"label"``, or a function of the model's output and the batch that gives the score of
            each sample, ``(B,)``, or of the batch.
        shift_labels: the logits at a position predict the label of the next one.

    Raises:
        ValueError: if ``kind`` is none of these.

    Reference:
        AD-DROP (NeurIPS 2022), Section 3.2.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
        >>> target = Target("predicted")
        >>> target.score(logits, {}, target.classes(logits, {}))
        tensor([5.])
    """

    def __init__(
        self, kind: str | Callable[[Any, Mapping[str, Any]], Tensor] = "predicted", *, shift_labels: bool = False
    ) -> None:
        if kind not in ("predicted", "label") and not callable(kind):
            raise InputError(f"Expected `target` to be 'predicted', 'label' or a function, got {kind!r}.")
        self.kind = kind
        self.shift_labels = shift_labels

    def for_model(self, model: nn.Module) -> Target:
        """The target as it suits a model.

        Raises:
            InputError: if the model's head needs a function.
        """
        if callable(self.kind):
            return self
        if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
            raise InputError(
                "Expected `target` to be a function for a multi-label classifier, got "
                f"{self.kind!r}: which labels are to be explained is yours to say."
            )
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # within an adapter's wrapper, perhaps
        return Target(self.kind, shift_labels=any(type(module).__name__ in known for module in model.modules()))

    def _labels(self, batch: Mapping[str, Any]) -> Any:
        labels = batch.get("labels")
        if self.shift_labels and isinstance(labels, Tensor):
            return F.pad(labels[..., 1:], (0, 1), value=IGNORED)
        return labels

    def classes(self, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """The classes whose score is explained; ``None`` where there are none."""
        if callable(self.kind):
            return None
        logits, labels = logits_of(output), self._labels(batch)
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
        """The score of the batch, shape ``(1,)``.

        Args:
            output: what the model returned.
            batch: what it was given.
            classes: of :meth:`classes`.

        Raises:
            InputError: if the output is none that the target knows.
        """
        if callable(self.kind):
            return self.kind(output, batch).sum().reshape(1)
        logits = logits_of(output)
        if classes is None:
            labels = _needed(batch.get("labels"), "gold scores as labels")
            return -F.mse_loss(logits.reshape(-1), labels.reshape(-1).to(logits.dtype), reduction="sum").reshape(1)
        if logits.dim() == 2:
            return logits.gather(-1, classes.reshape(-1, 1)).sum().reshape(1)
        flat = logits.flatten(0, -2), classes.reshape(-1)
        return -F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum").reshape(1)


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: the output itself, or its ``logits``."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if not isinstance(logits, Tensor) or logits.dim() not in (1, 2, 3):
        raise InputError(
            f"Expected an output with `logits` of shape (B,), (B, C) or (B, N, C), got {type(output).__name__}"
            + (f" with logits of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else "")
            + ": pass `target` as a function of the output and the batch that gives the score to explain."
        )
    return logits


def _is_regression(logits: Tensor, labels: Any) -> bool:
    if logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1):
        return True
    return isinstance(labels, Tensor) and labels.is_floating_point() and labels.shape == logits.shape


def _unlabelled(logits: Tensor, batch: Mapping[str, Any]) -> Tensor | None:
    """The positions that carry no label or, where no labels are given, are padding."""
    for name in ("labels", "decoder_attention_mask", "attention_mask"):
        tensor = batch.get(name)
        if isinstance(tensor, Tensor) and tensor.shape == logits.shape[:2]:
            return tensor == (IGNORED if name == "labels" else 0)
    return None


def _needed(labels: Any, what: str) -> Tensor:
    if not isinstance(labels, Tensor):
        raise InputError(f"Expected {what} in the batch to attribute to, got none: pass them as `labels`.")
    return labels
