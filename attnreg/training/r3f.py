"""R3F: predictions must agree with those on embeddings with a little noise."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from attnreg.arguments import NotNegative, not_negative, one_of
from attnreg.injection import AttachHandle
from attnreg.regularizer.base import Regularizer
from attnreg.training.embeddings import EmbeddingObjective, Tokens, changed_embeddings, check_tokens
from attnreg.training.fine_tuning import FineTuning, Shared
from attnreg.training.method import Batch
from attnreg.training.objective import ForwardPass

NoiseKind = Literal["uniform", "normal"]


class R3FLoss(EmbeddingObjective):
    r"""The loss of a forward pass, and of the difference between its predictions and those with noise on embeddings.

    .. math:: \mathcal L = \mathcal L(x) + \lambda \big( \mathrm{KL}(P_x \| P_{x + z}) +
        \mathrm{KL}(P_{x + z} \| P_x) \big), \qquad z \sim \mathcal U(-\epsilon, \epsilon)
        \text{ or } \mathcal N(0, \epsilon^2)

    z is added to the token embeddings of all real positions; padding stays as it is. For a model with one output
    (regression), the mean squared difference of the two scores replaces the two KL terms. A step costs two forward and
    two backward passes. The loss and the penalty of a provider are those of the pass without noise.

    Each pass draws its own dropout and masks, as in the authors' code. With the paper's :math:`\epsilon = 10^{-5}`, the
    two predictions therefore differ mostly by dropout, as in :class:`RDropLoss`; set the model's dropout to 0 to see
    the noise alone.

    The model needs ``get_input_embeddings()``, which looks up the ``input_ids`` of the batch.

    Args:
        weight: weight of the difference between the two predictions (lambda in the paper).
        eps: size of the noise: bound of "uniform", standard deviation of "normal".
        noise: distribution of the noise, "uniform" or "normal".

    Raises:
        InputError: if an argument is out of range, the model has no input embeddings, or the provider needs a first
            pass over each batch. In a step: if there are no logits, the labels do not fit them, the embeddings do not
            look up the batch's ``input_ids``, or gradient checkpointing is on and the provider draws its masks once per
            forward pass.

    Warns:
        UserWarning: if most of the noise is lost, because the embeddings are in half precision.

    Reference:
        R3F (Aghajanyan et al., ICLR 2021, arXiv 2008.03156), Section 3, without R4F's spectral normalization. SMART
        (Jiang et al., ACL 2020, arXiv 1911.03437) has the same term with the worst noise instead of random noise, and a
        Bregman proximal term; neither is here. The authors' code also adds the noise at padding, and
        leaves regression without the term.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
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
        check_tokens(batch, self.title)
        loss, logits = forward.predict(batch)
        with self._noised(forward.model, batch):
            _, other = forward.predict(batch)
        directions = 1 if logits.shape[-1] == 1 else 2  # `disagreement` is the mean of both
        return loss + self.weight * directions * forward.disagreement(batch, logits, other)

    def _noised(self, model: nn.Module, batch: Batch) -> AbstractContextManager[None]:
        """Add noise to the embeddings of the batch's tokens within the block."""

        def add(embedded: Tensor, tokens: Tokens) -> Tensor:
            return self._rounding.add(embedded, self._drawn(embedded).masked_fill(~tokens.real[..., None], 0.0))

        return changed_embeddings(model, batch, add, self.title)

    def _drawn(self, embedded: Tensor) -> Tensor:
        if self.noise == "normal":
            return self.eps * torch.randn_like(embedded)
        return self.eps * (2 * torch.rand_like(embedded) - 1)


class R3F(FineTuning):
    """Fine-tune with the objective :class:`R3FLoss`: predictions must agree with those on embeddings with noise.

    Args:
        model: as in :class:`FineTuning`, with ``get_input_embeddings()``.
        optimizer: as in :class:`FineTuning`.
        provider: as in :class:`FineTuning`.
        weight, eps, noise: as in :class:`R3FLoss`.
        shared: ``scheduler``, ``max_grad_norm``, ``accelerator``, ``loss_function`` and ``micro_batches``, see
            :class:`FineTuning`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: Regularizer | AttachHandle | None = None,
        *,
        weight: NotNegative = 1.0,
        eps: NotNegative = 1e-5,
        noise: NoiseKind = "uniform",
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(model, optimizer, provider, objective=R3FLoss(weight, eps, noise), **shared)
