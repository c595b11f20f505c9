"""The loss, logits and labels of a batch, under whichever names a model has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnreg.errors import InputError

IGNORED = -100  # transformers' label for positions without one
_ENDS = ("start", "end")  # of an answer in a text
#: computes the loss, 0-d, from the model's output and the batch
LossFunction = Callable[[Any, Mapping[str, Any]], Tensor]


def loss_of(
    output: Any,
    batch: Mapping[str, Any],
    loss_function: LossFunction | None = None,
    name: str = "`loss_function` to the training method",
) -> Tensor:
    """Return the loss of a forward pass, 0-d.

    Args:
        output: the model's output.
        batch: the batch it is for.
        loss_function: computes the loss from both; ``None`` takes the model's own.
        name: what a user calls this function, for messages.

    Raises:
        InputError: if there is no such loss.

    Example:
        >>> from types import SimpleNamespace
        >>> output = SimpleNamespace(logits=torch.tensor([[1.0], [4.0]]))
        >>> loss_of(output, {}, lambda output, batch: output.logits.mean())
        tensor(2.5000)
    """
    if loss_function is not None:
        loss = loss_function(output, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise InputError(f"Expected {name.split()[0]} to return a 0-d tensor, got {got}.")
        return loss
    own = _field(output, "loss")
    if not isinstance(own, Tensor):
        raise InputError(
            f"The model's output, {type(output).__name__}, has no `loss`: pass `labels` in the batch, or {name}."
        )
    return own


def predictions_of(output: Any) -> Tensor | None:
    """Return the logits in a model's output: the output itself, or its ``logits``; ``None`` if it has none.

    A model for extractive question answering has two classifications over the N positions of a row, the start and the
    end of the answer: ``start_logits`` and ``end_logits`` become ``(B, 2, N)``.

    Example:
        >>> predictions_of({"start_logits": torch.zeros(3, 7), "end_logits": torch.ones(3, 7)}).shape
        torch.Size([3, 2, 7])
    """
    if isinstance(output, Tensor):
        return output
    ends = [_field(output, f"{name}_logits") for name in _ENDS]
    if all(isinstance(each, Tensor) for each in ends):
        return torch.stack(ends, 1)
    logits = _field(output, "logits")
    return logits if isinstance(logits, Tensor) else None


def labels_of(batch: Mapping[str, Any], logits: Tensor) -> Any:
    """Return the labels that belong to logits; ``None`` if the batch has none.

    For extractive question answering, these are ``start_positions`` and ``end_positions``, as ``(B, 2)``. A position
    beyond the row counts as not labelled, as in the losses of transformers.

    Args:
        batch: the model's keyword arguments.
        logits: what :func:`predictions_of` returned.

    Example:
        >>> positions = {"start_positions": torch.tensor([1, 9]), "end_positions": torch.tensor([2, 9])}
        >>> labels_of(positions, torch.zeros(2, 2, 5))
        tensor([[   1,    2],
                [-100, -100]])
    """
    ends = [batch.get(f"{name}_positions") for name in _ENDS]
    if batch.get("labels") is not None or not all(isinstance(each, Tensor) for each in ends):
        return batch.get("labels")
    positions = torch.stack([each.reshape(-1) for each in ends if isinstance(each, Tensor)], 1).clamp(min=0)
    return positions.masked_fill(positions >= logits.shape[-1], IGNORED)


def needed_labels_of(batch: Mapping[str, Any], logits: Tensor) -> Tensor:
    """Return what :func:`labels_of` returns.

    Raises:
        InputError: if the batch has no labels.
    """
    labels = labels_of(batch, logits)
    if not isinstance(labels, Tensor):
        raise InputError(f"The batch has no labels, got {', '.join(batch)}: pass them as `labels`.")
    return labels


def rows_of(batch: Mapping[str, Any]) -> int:
    """Return the number of labelled rows of a batch: of its labels, else of its first tensor.

    Example:
        >>> rows_of({"input_ids": torch.ones(6, 4), "labels": torch.ones(2)}), rows_of({"input_ids": torch.ones(6, 4)})
        (2, 6)
    """
    labels = batch.get("labels")
    given = labels if isinstance(labels, Tensor) else next(each for each in batch.values() if isinstance(each, Tensor))
    return len(given)


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
