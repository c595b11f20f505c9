"""Training in two passes a step: look at the batch first, then train on it."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from attnreg.injection import AttachHandle
from attnreg.provider import MaskProvider
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import Batch, StepResult


class TwoPass(FineTuning):
    """Fine-tuning under a provider that looks at each batch before it is trained on, as AD-DROP does.

    Pass 1 is the provider's :meth:`~attnreg.MaskProvider.attribute` and updates nothing; it is left out while the
    provider is not active (:class:`attnreg.CrossTuning`). Pass 2 is an ordinary training step under its masks.

    Args:
        model: a model whose output has a ``loss`` when it is given ``labels``.
        optimizer: over the model's parameters.
        provider: attached to every self-attention of the model; to choose layers, attach it yourself and pass the
            handle instead.
        scheduler: advanced after each optimizer step.
        max_grad_norm: the model's gradients are scaled down to this norm, the provider's are left; ``None`` leaves all.
        accelerator: takes care of devices and processes.

    Reference:
        AD-DROP (NeurIPS 2022, arXiv 2210.05883), Algorithm 1.

    Example:
        >>> import attnreg, torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> provider = attnreg.CrossTuning(attnreg.AttributionProvider(p=0.5, q=0.5))
        >>> method = TwoPass(model, torch.optim.SGD(model.parameters(), lr=0.1), provider)
        >>> for epoch in range(2):
        ...     method.on_epoch(epoch)
        ...     result = method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])})
        ...     print(epoch, list(method.drop_rates()))
        0 []
        1 ['encoder.0', 'encoder.1']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        provider: MaskProvider | AttachHandle,
        *,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = 1.0,
        accelerator: Accelerator | None = None,
    ) -> None:
        super().__init__(
            model, optimizer, provider, scheduler=scheduler, max_grad_norm=max_grad_norm, accelerator=accelerator
        )

    def step(self, batch: Batch) -> StepResult:  # noqa: D102
        assert self.handle is not None
        self._network.train()
        if self.handle.active:
            self.handle.provider.attribute(self.model, batch)
        return super().step(batch)
