"""Sharpness-aware minimization: descend along the gradient at the worst weights nearby."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from attnreg.arguments import NotNegative, not_negative
from attnreg.errors import InputError
from attnreg.injection import draws_repeated, put_back
from attnreg.sharding import is_sharded
from attnreg.training.fine_tuning import FineTuning, Provided, Shared
from attnreg.training.method import Batch, StepResult, held_by

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class SAM(FineTuning):
    r"""Fine-tune by sharpness-aware minimization: update the weights along the gradient at the worst weights nearby.

    .. math:: \hat\epsilon = \rho\, \frac{\nabla \mathcal L(w)}{\lVert \nabla \mathcal L(w) \rVert_2}, \qquad
        g = \nabla \mathcal L(w + \hat\epsilon)

    Both gradients are of the whole batch, in all processes together, and over all model parameters in the optimizer.
    Both passes draw the same dropout and masks, and clipping applies to g only, as in the authors' code. A gradient
    that is zero or not finite perturbs nothing. The loss of a step is the loss at w; its ``logs`` have the loss at
    :math:`w + \hat\epsilon` as ``perturbed_loss``.

    Args:
        model, optimizer, provider: as in :class:`FineTuning`.
        rho: size of the perturbation: its L2 norm over all parameters.
        shared: further arguments of :class:`FineTuning`.

    Raises:
        InputError: if ``rho`` is out of range, or the model's parameters are sharded (FSDP, DeepSpeed).

    Reference:
        SAM (Foret et al., ICLR 2021, arXiv 2010.01412), Algorithm 1; for language models, arXiv 2110.08529.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> method = SAM(model, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
        >>> result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        >>> bool(result.logs["perturbed_loss"] > result.loss)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: Provided = None,
        *,
        rho: NotNegative = 0.05,
        **shared: Unpack[Shared],
    ) -> None:
        self.rho = not_negative("rho", rho)
        accelerator = shared.get("accelerator")
        sharded = accelerator is not None and accelerator.distributed_type in _SHARDED
        if sharded or is_sharded(model):
            raise InputError("SAM does not support sharded parameters (FSDP, DeepSpeed): use data parallelism.")
        super().__init__(model, optimizer, provider, **shared)
        self._weights = held_by(self.optimizer, self.model.parameters())

    @override
    def step(self, batch: Batch) -> StepResult:
        with draws_repeated(self.model):
            loss = self.accumulate(batch)
        with self._perturbed():
            worst = self.accumulate(batch)
        self.update()
        return StepResult(self.updater.mean(loss), {"perturbed_loss": self.updater.mean(worst)})

    @contextmanager
    def _perturbed(self) -> Iterator[None]:
        """Move the weights up the gradients, and clear the gradients; restore the same bits after the block."""
        pairs = [(weight, weight.grad) for weight in self._weights if weight.grad is not None]
        # Under float16, gradients are multiplied by the loss scale, which the direction does not depend on. If they
        # overflow, the optimizer skips its step.
        norm = nn.utils.get_total_norm([gradient for _, gradient in pairs])
        factor = torch.where(norm.isfinite() & (norm > 0), self.rho / norm, 0.0)
        # Running statistics would count the perturbed model, too.
        with put_back((*(weight for weight, _ in pairs), *self.model.buffers())):
            with torch.no_grad():
                for weight, gradient in pairs:
                    # `where`, because zero times an infinite gradient is NaN.
                    weight.add_(torch.where(factor.to(weight.device) > 0, gradient * factor.to(gradient), 0.0))
            self.optimizer.zero_grad(set_to_none=True)
            torch.clear_autocast_cache()  # under autocast around the step, it holds the weights before
            yield
