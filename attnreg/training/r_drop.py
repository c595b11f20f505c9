"""R-Drop: make two forward passes under different dropout agree."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from attnreg.arguments import NotNegative, not_negative
from attnreg.attribution.outputs import needed_labels_of
from attnreg.injection import AttachHandle
from attnreg.regularizer.base import MaskProvider
from attnreg.training.method import Batch, Shared
from attnreg.training.micro_batches import aligned_labels
from attnreg.training.two_forward_passes import TwoForwardPasses, disagreement


class RDrop(TwoForwardPasses):
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
            ``micro_batches``, see :class:`FineTuning`.

    Raises:
        ValueError: if ``alpha`` is negative or the provider needs a first pass over each batch. In a step: if there are
            no logits, if the labels do not fit them, or if gradient checkpointing is on and the provider draws its
            masks once per forward pass.

    Reference:
        R-Drop (NeurIPS 2021, arXiv 2106.14448), Eq. 1 to 4 and Algorithm 1.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from attnreg import AttentionDropout
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> method = RDrop(model, torch.optim.SGD(model.parameters(), lr=0.1), AttentionDropout(0.1), alpha=0.5)
        >>> result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        >>> list(method.drop_rates())
        ['encoder.0']
    """

    title = "R-Drop"

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
        super().__init__(model, optimizer, provider, **shared)

    @override
    def _loss(self, batch: Batch) -> Tensor:
        self._check_recomputation()
        (first, logits), (second, other) = (self._pass(batch) for _ in range(2))
        labels = aligned_labels(self.model, needed_labels_of(batch, logits))
        return (first + second + self.alpha * disagreement(logits, other, labels)) / 2
