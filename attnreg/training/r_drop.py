"""R-Drop: two passes under different dropout must agree."""

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


def disagreement(logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    r"""How far two predictions are from each other: symmetric KL of classes, mean squared distance of scores.

    .. math:: \tfrac12 \big( \mathrm{KL}(P_1 \| P_2) + \mathrm{KL}(P_2 \| P_1) \big)
        = \tfrac12 \sum_c (P_{1c} - P_{2c}) (\log P_{1c} - \log P_{2c})

    Args:
        logits: ``(..., C)``; C = 1 is a score (regression).
        other: the same of the other pass.
        labels: ``(...)``; positions labelled -100 do not count.

    Returns:
        0-d, the mean over rows (or labelled positions).

    Raises:
        InputError: if the labels are not one class per row or position.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> disagreement(*logits, torch.tensor([1]))
        tensor(0.1155)
    """
    a, b = logits.float(), other.float()
    if logits.dtype == torch.float64:
        a, b = logits, other
    if logits.shape[-1] == 1:
        return (a - b).square().mean()
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise InputError(
            f"Expected labels of R-Drop to be classes of shape {tuple(logits.shape[:-1])}, or scores for one output, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    both_ways = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1) / 2
    return both_ways[labels != IGNORED].mean()


class RDrop(FineTuning):
    r"""Fine-tuning in which each batch goes forward twice, and the two predictions are drawn together.

    .. math:: \mathcal L = \tfrac12 \Big( \mathcal L_1 + \mathcal L_2 + \alpha \cdot
        \tfrac12 \big( \mathrm{KL}(P_1 \| P_2) + \mathrm{KL}(P_2 \| P_1) \big) \Big)

    which is half of the paper's loss, so that learning rate and gradient clipping mean what they mean without it. The
    passes differ in all dropout: the model's own, and the provider's masks, drawn anew for the second. A penalty of the
    provider counts with the mean of the two.

    Args:
        model: a model whose output has ``loss`` and ``logits`` when it is given ``labels``.
        optimizer: over the model's parameters, and the provider's if it learns by the same loss.
        provider: attached to every self-attention of the model; to choose layers, attach it yourself and pass the
            handle instead.
        alpha: weight of the agreement.
        shared: ``scheduler``, ``max_grad_norm`` and ``accelerator``, as :class:`FineTuning` takes them.

    Raises:
        ValueError: if ``alpha`` is negative, or the provider looks at batches before they are trained on; in a step,
            if there are no logits, their labels are not classes, or gradient checkpointing is on under a provider that
            draws its masks once per forward pass.

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
        super().__init__(model, optimizer, provider, **shared)

    def _loss(self, batch: Batch) -> Tensor:
        self._check_recomputation()
        (first, logits), (second, other) = (self._pass(batch) for _ in range(2))
        return (first + second + self.alpha * disagreement(logits, other, batch["labels"])) / 2

    def _check_recomputation(self) -> None:
        """Refuse what would go wrong silently: the first pass, computed again with what the second one drew."""
        recomputed = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        if self.handle is None or not recomputed:
            return
        providers = (module for module in self.handle.provider.modules() if isinstance(module, MaskProvider))
        for provider in providers:
            if draws_in_prepare(provider):
                raise InputError(
                    f"Expected no gradient checkpointing under R-Drop with {type(provider).__name__}, whose masks are "
                    "drawn once per forward pass: those of the first would be lost when it is computed again."
                )

    def _pass(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss, with what the provider adds to it, and logits."""
        output: Any = self._network(**batch)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(f"Expected `logits` in the output of {type(self.model).__name__}, got none.")
        return self._with_penalty(output.loss), logits


def _check_one_pass(provider: MaskProvider) -> None:
    """Refuse masks that hold for one forward pass after a first look: R-Drop takes no such look, and makes two."""
    if looking := that_look_at_batches(provider):
        raise InputError(
            f"Expected a provider under R-Drop that draws its masks as the batch goes forward, got "
            f"{type(looking[0]).__name__}, which looks at the batch before: train with `attnreg.training.TwoPass`."
        )
