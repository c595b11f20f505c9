"""AD-DROP and learned providers in the Hugging Face Trainer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Seq2SeqTrainer, Trainer
from transformers.modeling_utils import unwrap_model

from attnreg.errors import InputError
from attnreg.injection import AttachHandle
from attnreg.integrations.accumulation import average_micro_batches, per_micro_batch
from attnreg.integrations.attaching import attach_in_trainer
from attnreg.integrations.callback import AttnRegCallback, TrainsProviders
from attnreg.regularizer.base import MaskProvider
from attnreg.regularizer.cross_tuning import CrossTuning
from attnreg.regularizers.attribution import AttributionProvider
from attnreg.training.method import Updater, check_learned, not_in


class ADDropTrainer(TrainsProviders, Trainer):
    """A :class:`transformers.Trainer` for AD-DROP and every other provider.

    Before each training step, the provider may look at the batch (AD-DROP's first pass). The provider's ``penalty`` is
    added to the loss. Its learned parameters are trained by the Trainer's optimizer, without weight decay or gradient
    clipping, and are in the checkpoints. A G-Net draws masks here but is not trained; AttendOut's game trains it.

    To combine it with another Trainer, such as TRL's, write ``class Both(ADDropTrainer, SFTTrainer)``.

    Works with gradient accumulation, mixed precision, gradient checkpointing, label smoothing, resuming, and several
    processes (DistributedDataParallel), which all train the same provider. It adds an :class:`AttnRegCallback`.

    With gradient accumulation, the loss is the mean of the micro-batches' means, because many models of transformers
    accept ``num_items_in_batch`` but ignore it (the stock Trainer then multiplies loss and gradients by the number of
    micro-batches). If your model uses it, set ``model.accepts_loss_kwargs = True``.

    Args:
        args: arguments of :class:`transformers.Trainer`.
        provider: the provider, attached to all self-attention; or a handle of :func:`attnreg.attach`, to choose layers
            and stacks. Default: ``CrossTuning(AttributionProvider())``.
        kwargs: keyword arguments of :class:`transformers.Trainer`, except ``model_init``. If you pass ``optimizers``,
            the optimizer must contain the provider's learned parameters. The Trainer's own optimizer contains them,
            with the model's learning rate.

    Raises:
        InputError: if ``model_init`` is given, or the optimizer lacks the provider's learned parameters.

    Reference:
        AD-DROP (NeurIPS 2022, arXiv 2210.05883), Algorithm 1.

    Example:
        >>> import attnreg
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        >>> trainer = ADDropTrainer(
        ...     model,
        ...     TrainingArguments("runs", report_to="none", use_cpu=True),
        ...     provider=attnreg.CrossTuning(attnreg.AttributionProvider(p=0.5, q=0.3)),
        ... )
        >>> trainer.handle.provider.every
        2
    """

    def __init__(self, *args: Any, provider: MaskProvider | AttachHandle | None = None, **kwargs: Any) -> None:
        if kwargs.get("model_init") is not None:
            raise InputError(
                "`model_init` is not supported, because a provider is attached to one model. Pass a `model` instead."
            )
        super().__init__(*args, **kwargs)
        assert self.model is not None
        provider = CrossTuning(AttributionProvider()) if provider is None else provider
        regularizer = provider.provider if isinstance(provider, AttachHandle) else provider
        if self.optimizer is not None:
            check_learned(self.optimizer, regularizer)
        self.handle = provider if isinstance(provider, AttachHandle) else attach_in_trainer(self.model, provider)
        average_micro_batches(self)
        AttnRegCallback(self.handle).add_to(self)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> torch.Tensor:
        """Run both forward passes and the backward pass.

        Raises:
            InputError: if the provider looks at batches, and the model does not accept them as keyword arguments.
        """
        inputs = self._prepare_inputs(inputs)
        if self.handle.active:
            with self.compute_loss_context_manager():
                self._attribute(model, inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        # Not right before the optimizer step, so that all processes agree on whether fp16 gradients overflow.
        if self.accelerator.sync_gradients:
            Updater(accelerator=self.accelerator).average_gradients(self.handle.provider.learned_parameters())
        return loss

    def _attribute(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        try:
            self.handle.provider.attribute(model, inputs)
        except TypeError as error:
            bare = unwrap_model(model)
            bare = getattr(bare, "_orig_mod", bare)  # torch.compile's
            try:
                inspect.signature(type(bare).forward).bind(bare, **inputs)
            except TypeError:
                raise InputError(
                    f"{type(self.handle.provider).__name__} looks at each batch first, but {type(bare).__name__} does "
                    f"not accept the batches of {type(self).__name__} as keyword arguments "
                    f"({', '.join(sorted(inputs))}). Use a provider that does not look at batches."
                ) from error
            raise

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss; in training, with the provider's penalty."""
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        penalty = self.handle.provider.penalty() if model.training and self.handle.active else None
        if penalty is None:
            return result
        penalty = per_micro_batch(self, penalty, num_items_in_batch)
        return (result[0] + penalty, *result[1:]) if isinstance(result, tuple) else result + penalty

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Create the optimizer, with the provider's learned parameters in their own group, without weight decay.

        Raises:
            InputError: if the optimizer was made elsewhere and lacks the provider's learned parameters.
        """
        self.handle.provider.to(self.args.device)  # before optimizer state is moved to its device
        made_elsewhere = self.optimizer is not None
        optimizer = super().create_optimizer(*args, **kwargs)
        if made_elsewhere:
            check_learned(optimizer, self.handle.provider)
        if missing := not_in(optimizer, self.handle.provider):
            optimizer.add_param_group({"params": missing, "weight_decay": 0.0})
        return optimizer


class Seq2SeqADDropTrainer(ADDropTrainer, Seq2SeqTrainer):
    """:class:`ADDropTrainer` for sequence-to-sequence models, on top of :class:`transformers.Seq2SeqTrainer`.

    Args:
        args: arguments of :class:`transformers.Seq2SeqTrainer`.
        provider: the provider or handle, as in :class:`ADDropTrainer`.
        kwargs: keyword arguments of :class:`transformers.Seq2SeqTrainer`, except ``model_init``.
    """
