"""AD-DROP in the Hugging Face Trainer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Seq2SeqTrainer, Trainer
from transformers.modeling_utils import unwrap_model

from attnreg.errors import InputError
from attnreg.injection import AttachHandle, attach
from attnreg.integrations.callback import AttnRegCallback, TrainsProviders
from attnreg.provider.base import MaskProvider
from attnreg.provider.cross_tuning import CrossTuning
from attnreg.providers.attribution import AttributionProvider
from attnreg.training.method import Updater, check_learned, not_in


class ADDropTrainer(TrainsProviders, Trainer):
    """A :class:`transformers.Trainer` that trains in two passes a step, as :class:`attnreg.training.TwoPass` does.

    Any provider will do. What it adds to the loss (``penalty``) is added; the parameters that it learns by the loss are
    in the optimizer and in its checkpoints, without weight decay or gradient clipping. A G-Net makes its masks here and
    does not learn: that takes AttendOut's game.

    On top of another Trainer, such as TRL's: ``class Both(ADDropTrainer, SFTTrainer)``.

    Works with gradient accumulation, mixed precision, gradient checkpointing, label smoothing, resuming, and several
    processes (DistributedDataParallel), which learn the same provider. An :class:`AttnRegCallback` comes with it.

    Under gradient accumulation the loss is the mean of the micro-batches' means. Many heads of transformers take
    ``num_items_in_batch`` and ignore it, and the Trainer then multiplies loss and gradients by the number of
    micro-batches; set ``model.accepts_loss_kwargs = True`` if yours does not ignore it.

    Args:
        args: as :class:`transformers.Trainer` takes them.
        provider: the provider, attached to every self-attention; or the handle of :func:`attnreg.attach`, to choose
            layers and stacks. By default ``CrossTuning(AttributionProvider())``.
        kwargs: as :class:`transformers.Trainer` takes them, but ``model_init``. An optimizer in ``optimizers`` must
            hold what the provider learns; one that the Trainer makes is given it, with the model's learning rate.

    Raises:
        InputError: if there is a ``model_init``, or the optimizer does not hold what the provider learns.

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
                "Expected a `model`, got `model_init`: a provider is attached to one model, so make it first."
            )
        super().__init__(*args, **kwargs)
        assert self.model is not None
        if provider is None:
            provider = CrossTuning(AttributionProvider())
        regularizer = provider.provider if isinstance(provider, AttachHandle) else provider
        if self.optimizer is not None:
            check_learned(self.optimizer, regularizer)
        self.handle = provider if isinstance(provider, AttachHandle) else attach(self.model, provider)
        if not hasattr(unwrap_model(self.model), "accepts_loss_kwargs"):
            self.model_accepts_loss_kwargs = False
        AttnRegCallback(self.handle).add_to(self)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> torch.Tensor:
        """Both passes, and the backward pass.

        Raises:
            InputError: if the provider is to look at a batch that the model does not take as it is.
        """
        inputs = self._prepare_inputs(inputs)
        if self.handle.active:
            with self.compute_loss_context_manager():
                self._attribute(model, inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        # Here, and not right before the optimizer's step, so that processes agree on whether fp16 gradients overflow.
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
                    f"Expected batches that {type(bare).__name__} takes as they are, for "
                    f"{type(self.handle.provider).__name__} to look at them first, got {', '.join(sorted(inputs))} "
                    f"from {type(self).__name__}: train with a provider that does not look at batches."
                ) from error
            raise

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss, in training with what the provider adds to it."""
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        penalty = self.handle.provider.penalty() if model.training and self.handle.active else None
        if penalty is None:
            return result
        if self._sums_micro_batches(num_items_in_batch):
            penalty = penalty / self.current_gradient_accumulation_steps
        return (result[0] + penalty, *result[1:]) if isinstance(result, tuple) else result + penalty

    def _sums_micro_batches(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether the Trainer takes the losses of micro-batches for shares of one loss, and does not divide them."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # a subclass may say; transformers 5.0 does not ask
        if scaled is not None:
            return bool(scaled)
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return counted or self.compute_loss_func is not None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """The optimizer, with what the provider learns as a group of its own, without weight decay.

        Raises:
            InputError: if the optimizer was made elsewhere, without what the provider learns.
        """
        self.handle.provider.to(self.args.device)  # before a checkpoint's optimizer state is put where parameters are
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
        args: as :class:`transformers.Seq2SeqTrainer` takes them.
        provider: as :class:`ADDropTrainer` takes it.
        kwargs: as :class:`transformers.Seq2SeqTrainer` takes them, but ``model_init``.
    """
