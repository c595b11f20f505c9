"""The loss of a forward pass: the model's own, or that of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from attnreg.errors import InputError
from attnreg.regularizer.base import MaskProvider
from attnreg.regularizer.protocols import ComputesLoss

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
        loss_function: computes the loss from both; ``None`` takes ``output.loss``.
        name: what a user calls this function, for messages.

    Raises:
        InputError: if there is no such loss.

    Example:
        >>> import torch
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
    own = getattr(output, "loss", None)
    if not isinstance(own, Tensor):
        raise InputError(
            f"The model's output, {type(output).__name__}, has no `loss`: pass `labels` in the batch, or {name}."
        )
    return own


def check_loss(provider: MaskProvider, loss_function: LossFunction | None) -> None:
    """Check that no provider learns by another loss than the model.

    Raises:
        InputError: if one would compute the model's own loss although there is a ``loss_function``.
    """
    for each in provider.modules() if loss_function is not None else ():
        if isinstance(each, ComputesLoss) and each.loss is None:
            raise InputError(
                f"{type(each).__name__} learns by the model's own loss, but training has another `loss_function`: give "
                "the function to the provider, too, as `loss`."
            )
