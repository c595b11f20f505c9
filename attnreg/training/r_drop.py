"""R-Drop: make two forward passes under different dropout agree."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from attnreg.arguments import NotNegative, not_negative
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import Batch
from attnreg.training.objective import ForwardPass, Objective


class RDropLoss(Objective):
    r"""The loss of two forward passes under different dropout, and of the difference between their predictions.

    .. math:: \mathcal L = \tfrac12 \Big( \mathcal L_1 + \mathcal L_2 + \alpha \cdot
        \tfrac12 \big( \mathrm{KL}(P_1 \| P_2) + \mathrm{KL}(P_2 \| P_1) \big) \Big)

    This is half of the paper's loss, so that learning rate and gradient clipping keep their meaning without R-Drop. The
    two passes differ in the model's own dropout and in the provider's masks. A penalty of the provider is averaged over
    the two passes.

    Args:
        alpha: weight of the difference between the two predictions (alpha in the paper).

    Raises:
        InputError: if an argument is out of range, or the provider does not allow two passes (:class:`ForwardPass`). In
            a step: if there are no logits, or the labels do not fit them.

    Reference:
        R-Drop (NeurIPS 2021, arXiv 2106.14448), Eq. 1 to 4 and Algorithm 1.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from attnreg import AttentionDropout
        >>> from attnreg.training import SAM
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> method = SAM(model, optimizer, AttentionDropout(0.1), objective=RDropLoss(alpha=0.5))
        >>> method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}).loss.shape
        torch.Size([])
    """

    title = "R-Drop"
    passes = 2

    def __init__(self, alpha: NotNegative = 1.0) -> None:
        self.alpha = not_negative("alpha", alpha)

    @override
    def __call__(self, forward: ForwardPass, batch: Batch) -> Tensor:
        (first, logits), (second, other) = (forward.predict(batch) for _ in range(2))
        return (first + second + self.alpha * forward.disagreement(batch, logits, other)) / 2


class RDrop(FineTuning):
    """Fine-tune by :class:`RDropLoss` (two passes under different dropout must agree), with the arguments of both."""

    def __init__(self, *args: Any, alpha: NotNegative = 1.0, **more: Any) -> None:
        super().__init__(*args, objective=RDropLoss(alpha), **more)
