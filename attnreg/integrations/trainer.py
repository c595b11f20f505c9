"""Regularizers and objectives in the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.modeling_utils import unwrap_model

from attnreg.errors import InputError
from attnreg.injection import AttachHandle
from attnreg.integrations.callback import AttnRegCallback, attach_in_trainer
from attnreg.outputs import own_caches
from attnreg.regularizer.base import Regularizer
from attnreg.training.method import (
    Batch,
    TrainingMethod,
    Updater,
    add_learned,
    check_learned,
    check_own_loss,
    look_at,
    penalty_of,
)
from attnreg.training.objective import ForwardPass, ObjectiveFunction, check_objective, title_of


class RegularizedTrainer(Trainer):
    """A :class:`transformers.Trainer` for every provider and every :class:`attnreg.training.Objective`.

    Before each training step, the provider may look at the batch (AD-DROP's first pass). The provider's ``penalty`` is
    added to the loss. Its learned parameters are trained by the Trainer's optimizer, without weight decay or gradient
    clipping, and are in the checkpoints. It adds an :class:`AttnRegCallback`. To combine it with another Trainer, such
    as TRL's, write ``class Both(RegularizedTrainer, SFTTrainer)``.

    With gradient accumulation, the loss is the mean of the micro-batches' means, because many models of transformers
    accept ``num_items_in_batch`` but ignore it. If your model uses it, set ``model.accepts_loss_kwargs = True``.

    Args:
        args: arguments of :class:`transformers.Trainer`.
        provider: the provider, attached to all self-attention; or a handle of :func:`attnreg.attach`, to choose layers
            and stacks. ``None``: no provider, or one that an :class:`AttnRegCallback` attaches.
        objective: an objective such as ``RDropLoss()``, whose passes are those of the Trainer's ``compute_loss``; by
            default the loss of one pass.
        kwargs: keyword arguments of :class:`transformers.Trainer`; with a provider, no ``model_init``. If you pass
            ``optimizers``, the optimizer must contain the provider's learned parameters, as the Trainer's own does.

    Raises:
        InputError: if ``model_init`` is given with a provider, the optimizer lacks the provider's learned parameters,
            or the provider does not fit the objective or the loss.

    Example:
        >>> import attnreg
        >>> from attnreg.training import RDropLoss
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        >>> arguments = TrainingArguments("runs", report_to="none", use_cpu=True)
        >>> provider = attnreg.AttentionEntropy(0.1)
        >>> trainer = RegularizedTrainer(model, arguments, provider=provider, objective=RDropLoss(alpha=0.5))
        >>> [site.label for site in trainer.handle.sites]
        ['encoder.0']
    """

    def __init__(
        self,
        *args: Any,
        provider: Regularizer | AttachHandle | None = None,
        objective: ObjectiveFunction | None = None,
        **kwargs: Any,
    ) -> None:
        for each in (*args, *kwargs.values(), provider):
            if isinstance(each, TrainingMethod):
                raise InputError(
                    f"A Trainer steps and saves one model with one optimizer, but {type(each).__name__} does this "
                    "itself: call its `step(batch)` in a loop of your own."
                )
        if any(isinstance(each, Regularizer) for each in (*args, *kwargs.values())):
            raise InputError("Pass the regularizer by its name: `RegularizedTrainer(model, args, provider=...)`.")
        if provider is not None and kwargs.get("model_init") is not None:
            raise InputError(
                "`model_init` is not supported, because a provider is attached to one model. Pass a `model` instead."
            )
        self.objective: ObjectiveFunction | None = objective
        #: the handle of ``provider``; ``None`` if there is none
        self.handle: AttachHandle | None = None
        super().__init__(*args, **kwargs)
        assert self.model is not None
        regularizer = provider.provider if isinstance(provider, AttachHandle) else provider
        check_objective(objective, self.model, regularizer)
        if not hasattr(unwrap_model(self.model), "accepts_loss_kwargs"):
            self.model_accepts_loss_kwargs = False  # average the losses of micro-batches
        if provider is not None and regularizer is not None:
            if self.optimizer is not None:
                check_learned(self.optimizer, regularizer)
            if self.compute_loss_func is not None or self.label_smoother is not None:
                check_own_loss(regularizer, "compute_loss_func" if self.compute_loss_func else "label_smoothing_factor")
            self.handle = provider if isinstance(provider, AttachHandle) else attach_in_trainer(self.model, provider)
            AttnRegCallback(self.handle).add_to(self)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> torch.Tensor:
        """Run all forward passes and the backward pass; a batch that is looked at first must be keyword arguments."""
        if self.handle is None:
            return super().training_step(model, inputs, num_items_in_batch)
        inputs = self._prepare_inputs(inputs)
        for each in (model, self.optimizer):  # as the step itself, since the first pass is one of training
            getattr(each, "train", lambda: None)()
        with self.compute_loss_context_manager():
            look_at(self.handle, model, inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        # Not right before the optimizer step, so that all processes agree on whether fp16 gradients overflow.
        if self.accelerator.sync_gradients:
            Updater(accelerator=self.accelerator).average_gradients(self.handle.provider.learned_parameters())
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss; in training by the objective, with the provider's penalty."""
        of_one_pass = super().compute_loss
        if not model.training:
            return of_one_pass(model, inputs, return_outputs, num_items_in_batch)
        parts, outputs = self._divisor(num_items_in_batch), []
        if self.objective is None:
            result = of_one_pass(model, inputs, return_outputs, num_items_in_batch)
            if (penalty := penalty_of(self.handle)) is None:
                return result
            penalty = penalty / parts
            return (result[0] + penalty, *result[1:]) if isinstance(result, tuple) else result + penalty

        def run(batch: Batch) -> tuple[Tensor, Any]:
            # A copy, because a Trainer may take labels out of the inputs.
            loss, output = of_one_pass(model, own_caches(batch), True, num_items_in_batch)
            outputs.append(output)
            penalty = penalty_of(self.handle)
            return (loss * parts if penalty is None else loss * parts + penalty), output

        callbacks = (each for each in self.callback_handler.callbacks if isinstance(each, AttnRegCallback))
        provider = next((each.handle.provider for each in callbacks), None)  # also if a callback attached it
        forward = ForwardPass(unwrap_model(model), provider, run, title_of(self.objective))
        loss = self.objective(forward, inputs) / parts
        return (loss, outputs[0]) if return_outputs else loss

    def _divisor(self, num_items_in_batch: Tensor | int | None) -> int:
        """By how much the loss of a micro-batch is divided before the Trainer adds it to those of the same step."""
        divided = getattr(self, "loss_is_scaled_for_ga", None)  # not in transformers 5.0
        if divided is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            divided = counted or self.compute_loss_func is not None
        return getattr(self, "current_gradient_accumulation_steps", 1) if divided else 1  # it has none before training

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Create the optimizer, with the provider's learned parameters in their own group, without weight decay."""
        made_elsewhere = self.optimizer is not None
        if self.handle is None:
            return super().create_optimizer(*args, **kwargs)
        self.handle.provider.to(self.args.device)  # before optimizer state is moved to its device
        optimizer = super().create_optimizer(*args, **kwargs)
        if made_elsewhere:
            check_learned(optimizer, self.handle.provider)
        add_learned(optimizer, self.handle.provider)
        return optimizer
