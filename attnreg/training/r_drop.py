"""R-Drop: make two forward passes under different dropout agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from attnreg.arguments import NotNegative, not_negative
from attnreg.errors import InputError
from attnreg.injection import AttachHandle
from attnreg.provider.base import MaskProvider
from attnreg.provider.protocols import draws_in_prepare, that_look_at_batches
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import IGNORED, Batch, Shared
from attnreg.training.micro_batches import shifts_labels


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
            f"Expected labels of R-Drop to be classes of shape {tuple(logits.shape[:-1])}, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}. Regression needs a model with one output."
        )
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    both_ways = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1) / 2
    return both_ways[labels != IGNORED].mean()


class RDrop(FineTuning):
    r"""Fine-tune with two forward passes per batch and a loss on the difference between their predictions.

    .. math:: \mathcal L = \tfrac12 \Big( \mathcal L_1 + \mathcal L_2 + \alpha \cdot
        \tfrac12 \big( \mathrm{KL}(P_1 \| P_2) + \mathrm{KL}(P_2 \| P_1) \big) \Big)

    This is half of the paper's loss, so that learning rate and gradient clipping keep their meaning without R-Drop. The
    two passes differ in the model's own dropout and in the provider's masks. A penalty of the provider is averaged over
    the two passes.

    Args:
        model: a model whose output has ``loss`` and ``logits`` when it is given ``labels``.
        optimizer: as in :class:`FineTuning`.
        provider: as in :class:`FineTuning`.
        alpha: weight of the difference between the two predictions (alpha in the paper).
        shared: ``scheduler``, ``max_grad_norm``, ``accelerator``, ``loss_function`` (of each pass) and
            ``micro_batches`` (not for causal language models), see :class:`FineTuning`.

    Raises:
        ValueError: if ``alpha`` is negative or the provider needs a first pass over each batch. In a step: if there are
            no logits, if the labels do not fit them, or if gradient checkpointing is on and the provider draws its
            masks once per forward pass.

    Reference:
        R-Drop (NeurIPS 2021, arXiv 2106.14448), Eq. 1 to 4 and Algorithm 1.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from attnreg import AttentionDropout
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> method = RDrop(model, torch.optim.SGD(model.parameters(), lr=0.1), AttentionDropout(0.1), alpha=0.5)
        >>> result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        >>> list(method.drop_rates())
        ['encoder.0']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: MaskProvider | AttachHandle | None = None,
        *,
        alpha: NotNegative = 1.0,
        **shared: Unpack[Shared],
    ) -> None:
        self.alpha = not_negative("alpha", alpha)
        if provider is not None:
            _check_one_pass(provider.provider if isinstance(provider, AttachHandle) else provider)
        if shared.get("micro_batches", 1) > 1 and shifts_labels(model):
            raise InputError(
                "R-Drop cannot split batches of a causal language model, whose two losses are means over different "
                "positions: train on whole batches, without gradient accumulation."
            )
        super().__init__(model, optimizer, provider, **shared)

    def _loss(self, batch: Batch) -> Tensor:
        self._check_recomputation()
        (first, logits), (second, other) = (self._pass(batch) for _ in range(2))
        return (first + second + self.alpha * disagreement(logits, other, batch["labels"])) / 2

    def _check_recomputation(self) -> None:
        """Refuse gradient checkpointing if it would recompute the first pass with the masks of the second."""
        recomputed = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        if self.handle is None or not recomputed:
            return
        for provider in self.handle.provider.modules():
            if isinstance(provider, MaskProvider) and draws_in_prepare(provider):
                raise InputError(
                    f"R-Drop with {type(provider).__name__} does not work under gradient checkpointing, which would "
                    "recompute the first pass with the masks of the second. Turn gradient checkpointing off."
                )

    def _pass(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, with the provider's penalty, and the logits of one pass."""
        output: Any = self._network(**batch)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(f"R-Drop needs `logits` in the output of {type(self.model).__name__}, but found none.")
        return self._with_penalty(output, batch), logits


def _check_one_pass(provider: MaskProvider) -> None:
    """Refuse providers that need a first pass over each batch: their masks hold for one forward pass, not two."""
    if looking := that_look_at_batches(provider):
        raise InputError(
            f"R-Drop does not work with {type(looking[0]).__name__}, which needs a first pass over each batch. Train "
            "with `attnreg.training.FineTuning` instead."
        )
