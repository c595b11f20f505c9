"""Regularizers and objectives in the Hugging Face Trainer."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.modeling_utils import unwrap_model

from attnreg.errors import AsleepWarning, InputError
from attnreg.injection import AttachHandle
from attnreg.integrations.callback import AttnRegCallback, needs_of
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
    with_penalty,
)
from attnreg.training.objective import ForwardPass, ObjectiveFunction, check_objective, title_of

Method = Callable[..., Any]


class RegularizedTrainer(Trainer):
    """A :class:`transformers.Trainer` for every provider and every :class:`attnreg.training.Objective`.

    Before every training step, the provider may look at the batch (AD-DROP's first pass). The provider's ``penalty`` is
    added to the loss. Its learned parameters are trained by the Trainer's optimizer, without weight decay or gradient
    clipping, and are in the checkpoints. It adds an :class:`AttnRegCallback`. To combine it with another Trainer, such
    as TRL's, write ``class Both(RegularizedTrainer, SFTTrainer)``.

    A subclass, or the other Trainer, may override any method. ``compute_loss`` then is the loss of one pass, to which
    the penalty is added; ``training_step`` must call ``self.compute_loss``; the learned parameters are added to the
    optimizer that ``create_optimizer`` makes.

    With gradient accumulation, the loss is the mean of the micro-batches' means, because many models of transformers
    accept ``num_items_in_batch`` but ignore it. If your model uses it, set ``model.accepts_loss_kwargs = True``.

    Args:
        args: arguments of :class:`transformers.Trainer`.
        provider: the provider, attached to all self-attention; or a handle of :func:`attnreg.attach`, to choose layers
            and stacks. ``None``: no provider, or the provider of an :class:`AttnRegCallback` in ``callbacks``.
        objective: an objective such as ``RDropLoss()``, whose passes call the Trainer's ``compute_loss``; by default
            the loss of one pass.
        kwargs: keyword arguments of :class:`transformers.Trainer`. With ``model_init``, every new model gets a fresh
            copy of the provider. If you pass ``optimizers``, the optimizer must contain the provider's learned
            parameters, as the Trainer's does.

    Raises:
        InputError: if ``model_init`` comes with a handle, the optimizer lacks the provider's learned parameters,
            or the provider does not fit the objective or the loss.

    Warns:
        AsleepWarning: if there is neither a provider nor an objective.

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

    adds_all = True  # what a callback cannot add: `attribute`, `penalty`, learned parameters

    def __init__(
        self,
        *args: Any,
        provider: Regularizer | AttachHandle | None = None,
        objective: ObjectiveFunction | None = None,
        **kwargs: Any,
    ) -> None:
        for arg in (*args, *kwargs.values(), provider):
            if isinstance(arg, TrainingMethod):
                raise InputError(
                    f"A Trainer steps and saves one model with one optimizer, but {type(arg).__name__} does this "
                    "itself: call its `step(batch)` in your loop."
                )
        if any(isinstance(arg, Regularizer) for arg in (*args, *kwargs.values())):
            raise InputError("Pass the regularizer by its name: `RegularizedTrainer(model, args, provider=...)`.")
        self._objective: ObjectiveFunction | None = objective
        super().__init__(*args, **kwargs)
        assert self.model is not None
        if self.model_init is not None and isinstance(provider, AttachHandle):
            raise InputError(
                "`model_init` makes a new model for every training, but a handle belongs to one: pass the provider "
                "instead. To choose layers, pass `attnreg.OnLayers(provider, layers)`."
            )
        self._check(provider.provider if isinstance(provider, AttachHandle) else provider)
        if not hasattr(unwrap_model(self.model), "accepts_loss_kwargs"):
            self.model_accepts_loss_kwargs = False  # average the losses of micro-batches
        if provider is not None:
            AttnRegCallback(provider).add_to(self)
        elif objective is None and self._callback is None:
            text = "RegularizedTrainer has no regularizer and trains plain: pass `provider=...` or `objective=...`."
            warnings.warn(text, AsleepWarning, stacklevel=2)
        self._regularized = provider is not None
        self._is_computing = False  # the loss, so that inner calls do not regularize it again
        self._has_computed = False  # the loss of this training step
        self._has_checked_loss = False  # for providers that learn by the model's loss
        self._wrap_methods()

    @property
    def _callback(self) -> AttnRegCallback | None:
        return next(
            (callback for callback in self.callback_handler.callbacks if isinstance(callback, AttnRegCallback)), None
        )

    @property
    def handle(self) -> AttachHandle | None:
        """The handle of the provider; ``None`` if there is no provider."""
        return None if self._callback is None else self._callback.handle

    def _check(self, provider: Regularizer | None) -> None:
        """Refuse parts that do not fit together, before the provider is attached and before a training."""
        assert self.model is not None
        check_objective(self._objective, self.model, provider)
        if provider is None:
            return
        if self.optimizer is not None:
            check_learned(self.optimizer, provider)
        if self.compute_loss_func is not None or self.label_smoother is not None:
            check_own_loss(provider, "compute_loss_func" if self.compute_loss_func else "label_smoothing_factor")

    def _wrap_methods(self) -> None:
        """Wrap the methods that regularizers act through, even if a subclass or a user has replaced them."""
        wrappers: dict[str, Method] = {  # GRPOTrainer has a `_step` of its own
            "train": self._around_train,
            "training_step": self._around_step,
            "compute_loss": self._around_loss,
            "create_optimizer": self._around_optimizer,
        }
        for name, wrapper in wrappers.items():
            method = getattr(self, name)
            if getattr(method, "func", None) != wrapper:
                setattr(self, name, functools.partial(wrapper, method))

    def _around_train(self, train: Method, *args: Any, **kwargs: Any) -> Any:
        """Train; the provider resumes the same checkpoint as the model."""
        if self._callback is not None:
            checkpoint = args[0] if args else kwargs.get("resume_from_checkpoint")
            self._callback.resumed_from = Path(checkpoint) if isinstance(checkpoint, (str, Path)) else None
        return train(*args, **kwargs)

    def _around_step(self, step: Method, *args: Any, **kwargs: Any) -> Any:
        """Run a training step; refuse one whose loss was not regularized."""
        self._has_computed = False
        result = step(*args, **kwargs)
        handle = self.handle
        if not self._has_computed:
            needs = [title_of(self._objective)] if self._objective is not None else []
            if handle is not None and handle.attached:
                needs += [type(part).__name__ for part in handle.provider.parts() if needs_of(part)]
            if needs:
                raise InputError(
                    f"{type(self).__name__} computes its loss without {needs[0]}: call `self.compute_loss(...)` in "
                    "`training_step`; your `compute_loss` may return any loss of one pass."
                )
        # Not right before the optimizer step, so that all processes agree on whether fp16 gradients overflow.
        if handle is not None and self.accelerator.sync_gradients:
            Updater(accelerator=self.accelerator).average_gradients(handle.provider.learned_parameters())
        return result

    def _around_loss(self, compute: Method, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; in training after the provider's first pass, by the objective, with the penalty."""
        if self._is_computing or not (model.training and torch.is_grad_enabled()):
            return compute(model, inputs, *args, **kwargs)
        handle = self.handle
        if handle is None and self._regularized:
            raise InputError(
                f"{type(self).__name__} has lost its AttnRegCallback. To train without the regularizer, call "
                "`trainer.handle.detach()` instead of removing the callback."
            )
        self._is_computing = self._has_computed = True
        try:
            look_at(handle, model, inputs)
            if handle is not None and not self._has_checked_loss:
                compute = functools.partial(self._checked_loss, handle.provider, compute)
            options = {**dict(zip(("return_outputs", "num_items_in_batch"), args, strict=False)), **kwargs}
            return self._regularized_loss(handle, compute, model, inputs, options)
        finally:
            self._is_computing = False

    def _regularized_loss(
        self,
        handle: AttachHandle | None,
        compute: Method,
        model: nn.Module,
        inputs: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:
        parts, outputs = self._divisor(options.get("num_items_in_batch")), []
        if self._objective is None:
            result = compute(model, inputs, **options)
            if not isinstance(result, tuple):
                return with_penalty(result, handle, parts)
            return with_penalty(result[0], handle, parts), *result[1:]

        def run(batch: Batch) -> tuple[Tensor, Any]:
            # A copy, because a Trainer may take labels out of the inputs.
            loss, output = self._with_outputs(compute, model, own_caches(batch), options)
            outputs.append(output)
            return with_penalty(loss * parts, handle), output

        provider = None if handle is None else handle.provider
        forward = ForwardPass(unwrap_model(model), provider, run, title_of(self._objective))
        loss = self._objective(forward, inputs) / parts
        return (loss, outputs[0]) if options.get("return_outputs") else loss

    def _with_outputs(
        self, compute: Method, model: nn.Module, inputs: dict[str, Any], options: Mapping[str, Any]
    ) -> tuple[Tensor, Any]:
        """Compute the loss of one pass and return the outputs, too, as an objective needs them."""
        try:
            result = compute(model, inputs, **{**options, "return_outputs": True})
        except TypeError as error:
            if "'return_outputs'" not in str(error):
                raise
            result = None
        if not isinstance(result, tuple):
            raise InputError(f"Let `compute_loss` of {type(self).__name__} return outputs if `return_outputs`.")
        return result[0], result[1]

    def _checked_loss(
        self, provider: Regularizer, compute: Method, model: nn.Module, inputs: dict[str, Any], **options: Any
    ) -> Any:
        """Compute the loss of one pass; refuse a provider that does not fit it."""
        outputs: list[Any] = []  # of passes with gradients, so not of a reference model
        with model.register_forward_hook(lambda *call: outputs.extend(call[-1:] if torch.is_grad_enabled() else ())):
            result = compute(model, inputs, **options)
        for part in provider.parts() if len(outputs) > 1 else ():
            if type(part).penalty is not Regularizer.penalty and type(part).prepare is not Regularizer.prepare:
                raise InputError(
                    f"The penalty of {type(part).__name__} is that of one pass, but the loss of {type(self).__name__} "
                    f"is of {len(outputs)} passes, such as one per text column: use a regularizer without a penalty."
                )
        loss = result[0] if isinstance(result, tuple) else result
        losses = [output.get("loss") for output in outputs if isinstance(output, Mapping)]
        if not any(model_loss is not None and torch.equal(model_loss, loss) for model_loss in losses):
            check_own_loss(provider, f"{type(self).__name__}.compute_loss")
        self._has_checked_loss = True
        return result

    def _divisor(self, num_items_in_batch: Tensor | int | None) -> int:
        """Return by how much the Trainer divides the loss of a micro-batch before it adds the losses of a step."""
        divided = getattr(self, "loss_is_scaled_for_ga", None)  # not in transformers 5.0
        if divided is None:
            per_item = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            divided = per_item or self.compute_loss_func is not None
        return getattr(self, "current_gradient_accumulation_steps", 1) if divided else 1  # unset before training

    def _around_optimizer(self, create: Method, *args: Any, **kwargs: Any) -> Optimizer | None:
        """Create the optimizer, with the provider's learned parameters in a group, without weight decay."""
        assert self.model is not None
        self._wrap_methods()  # methods that were set on the trainer since it was created
        if (callback := self._callback) is not None:
            callback.follow(self.model)
        handle = self.handle
        self._check(None if handle is None else handle.provider)
        if handle is not None:
            handle.provider.to(self.args.device)  # before the optimizer's state is moved to its device
        result: Optimizer | None = create(*args, **kwargs)
        optimizer = self.optimizer if result is None else result  # a subclass may only set the attribute
        if handle is not None and optimizer is not None:
            if self.lr_scheduler is None:
                add_learned(optimizer, handle.provider)
            else:  # the scheduler knows the present groups only
                check_learned(optimizer, handle.provider)
        return optimizer
