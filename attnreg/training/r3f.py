"""R3F: predictions must agree with those on embeddings with a little noise."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from attnreg.arguments import NotNegative, not_negative, one_of
from attnreg.training.embeddings import EmbeddingObjective, Tokens
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import Batch
from attnreg.training.objective import ForwardPass

NoiseKind = Literal["uniform", "normal"]


class R3FLoss(EmbeddingObjective):
    r"""The loss of a forward pass, and of the difference between its predictions and those with noise on embeddings.

    .. math:: \mathcal L = \mathcal L(x) + \lambda \big( \mathrm{KL}(P_x \| P_{x + z}) +
        \mathrm{KL}(P_{x + z} \| P_x) \big), \qquad z \sim \mathcal U(-\epsilon, \epsilon)
        \text{ or } \mathcal N(0, \epsilon^2)

    z is added to the token embeddings of all real positions. For a model with one output (regression), the mean squared
    difference of the two scores replaces the two KL terms. The loss and the penalty of a provider are those of the pass
    without noise. As in the authors' code, each pass draws its own dropout and masks: with the paper's
    :math:`\epsilon = 10^{-5}`, the two predictions differ mostly by dropout, as in :class:`RDropLoss`.

    Args:
        weight: weight of the difference between the two predictions (lambda in the paper).
        eps: size of the noise: bound of "uniform", standard deviation of "normal".
        noise: distribution of the noise, "uniform" or "normal".

    Raises:
        InputError: as :class:`RDropLoss`, or if the model does not look up the batch's ``input_ids`` in its
            ``get_input_embeddings()``.

    Warns:
        UserWarning: if most of the noise is lost, because the embeddings are in half precision.

    Reference:
        R3F (Aghajanyan et al., ICLR 2021, arXiv 2008.03156), Section 3, without R4F's spectral normalization. The
        authors' code also adds the noise at padding, and leaves regression without the term.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> method = FineTuning(model, optimizer, objective=R3FLoss(weight=0.5, eps=0.1, noise="normal"))
        >>> method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}).loss.shape
        torch.Size([])
    """

    title = "R3F"

    def __init__(self, weight: NotNegative = 1.0, eps: NotNegative = 1e-5, noise: NoiseKind = "uniform") -> None:
        self.weight = not_negative("weight", weight)
        self.eps = not_negative("eps", eps)
        self.noise = one_of("noise", noise, get_args(NoiseKind))
        super().__init__()

    @override
    def __call__(self, forward: ForwardPass, batch: Batch) -> Tensor:
        self.check_tokens(batch)
        loss, logits = forward.predict(batch)
        with self.noised(forward.model, batch, self._drawn):
            _, other = forward.predict(batch)
        directions = 1 if logits.shape[-1] == 1 else 2  # `disagreement` is the mean of both
        return loss + self.weight * directions * forward.disagreement(batch, logits, other)

    def _drawn(self, embedded: Tensor, tokens: Tokens) -> Tensor:
        noise = torch.randn_like(embedded) if self.noise == "normal" else 2 * torch.rand_like(embedded) - 1
        return (self.eps * noise).masked_fill(~tokens.real, 0.0)


class R3F(FineTuning):
    """Fine-tune with the objective :class:`R3FLoss`; the arguments are those of the two."""

    def __init__(
        self,
        *args: Any,
        weight: NotNegative = 1.0,
        eps: NotNegative = 1e-5,
        noise: NoiseKind = "uniform",
        **shared: Any,
    ) -> None:
        super().__init__(*args, objective=R3FLoss(weight, eps, noise), **shared)
