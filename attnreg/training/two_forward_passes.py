"""What methods share that make the predictions of two forward passes agree."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from attnreg.attribution.outputs import predictions_of
from attnreg.errors import InputError
from attnreg.injection import AttachHandle
from attnreg.regularizer.base import MaskProvider
from attnreg.regularizer.protocols import draws_in_prepare, that_look_at_batches
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import IGNORED, Batch, Shared


def disagreement(logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    r"""Measure how far two predictions differ: symmetric KL for classes, mean squared error for scores.

    .. math:: \tfrac12 \big( \mathrm{KL}(P_1 \| P_2) + \mathrm{KL}(P_2 \| P_1) \big)
        = \tfrac12 \sum_c (P_{1c} - P_{2c}) (\log P_{1c} - \log P_{2c})

    Args:
        logits: logits of the first pass, ``(..., C)``; C = 1 is a score (regression).
        other: logits of the second pass, of the same shape.
        labels: ``(...)``; positions labelled -100 do not count.

    Returns:
        The mean over rows or labelled positions, 0-d.

    Raises:
        InputError: if C > 1 and the labels are not one class per row or position.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> disagreement(*logits, torch.tensor([1]))
        tensor(0.1155)
    """
    a, b = (logits, other) if logits.dtype == torch.float64 else (logits.float(), other.float())
    if logits.shape[-1] == 1:
        return (a - b).square().mean()
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise InputError(
            f"Expected labels to be classes of shape {tuple(logits.shape[:-1])}, to compare two predictions, got "
            f"{labels.dtype} of shape {tuple(labels.shape)}. Regression needs a model with one output."
        )
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    both_ways = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1) / 2
    return both_ways[labels != IGNORED].mean()


class TwoForwardPasses(FineTuning):
    """The base class of methods that compare the predictions of two forward passes on a batch.

    Raises:
        InputError: if the provider needs a first pass over each batch.
    """

    #: name of the method in messages
    title: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: MaskProvider | AttachHandle | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        if provider is not None:
            self._check_one_pass(provider.provider if isinstance(provider, AttachHandle) else provider)
        super().__init__(model, optimizer, provider, **shared)

    def _check_one_pass(self, provider: MaskProvider) -> None:
        """Refuse providers that need a first pass over each batch: their masks hold for one forward pass, not two."""
        if looking := that_look_at_batches(provider):
            raise InputError(
                f"{self.title} does not work with {type(looking[0]).__name__}, which needs a first pass over each "
                "batch. Train with `attnreg.training.FineTuning` instead."
            )

    def _check_recomputation(self) -> None:
        """Refuse gradient checkpointing if it would recompute the first pass with the masks of the second."""
        recomputed = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        if self.handle is None or not recomputed:
            return
        for provider in self.handle.provider.modules():
            if isinstance(provider, MaskProvider) and draws_in_prepare(provider):
                raise InputError(
                    f"{self.title} with {type(provider).__name__} does not work under gradient checkpointing, which "
                    "would recompute the first pass with the masks of the second. Turn gradient checkpointing off."
                )

    def _pass(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, with the provider's penalty, and the logits of one pass."""
        output, logits = self._outputs(batch)
        return self._with_penalty(output, batch), logits

    def _outputs(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return the output of one pass, and its logits."""
        output: Any = self._network(**batch)
        logits = predictions_of(output)
        if logits is None:
            raise InputError(
                f"{self.title} needs `logits` in the output of {type(self.model).__name__}, but found none."
            )
        return output, logits
