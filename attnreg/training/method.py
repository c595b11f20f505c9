"""The base class of training methods, and the operations that their steps share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from attnreg.errors import InputError
from attnreg.injection import AttachHandle
from attnreg.outputs import LossFunction
from attnreg.regularizer.base import Regularizer

Batch = Mapping[str, Tensor]
Hook = Callable[[], None]
#: Keeps float16 gradients from vanishing where only a direction or a ranking of them counts.
LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class StepResult:
    """The result of one training step.

    Args:
        loss: training loss of the returned network, 0-d, detached.
        logs: further numbers to log, by name; 0-d tensors or floats.
        events: further facts to log, by name, such as the winner of a round.
    """

    loss: Tensor
    logs: Mapping[str, Tensor | float] = field(default_factory=dict)
    events: Mapping[str, str] = field(default_factory=dict)


class TrainingMethod(ABC):
    """A way to train a model, batch by batch.

    Methods run in the loop of the recipes and in any other::

        for epoch in range(epochs):
            method.on_epoch(epoch)
            for batch in batches:
                method.step(batch)

    To write one, subclass :class:`attnreg.training.FineTuning`, which has hooks. A method with another loop, such as
    two models, subclasses this class and writes its abstract methods.
    """

    #: the mask provider, which is saved beside the model; ``None`` if there is none
    provider: Regularizer | None = None
    #: computes the training loss from the model's output and the batch; ``None`` if the model does
    loss_function: LossFunction | None = None
    #: gradients are clipped to this norm; ``None`` does not clip
    max_grad_norm: float | None = 1.0
    #: number of parts into which a batch is split to save memory
    micro_batches: int = 1
    #: handles devices, precision and processes; ``None`` if the loop does. The loop of the recipes needs the
    #: run's accelerator here, except in one process on a CPU in float32.
    accelerator: Accelerator | None = None

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The network to evaluate and keep."""

    @property
    def networks(self) -> dict[str, nn.Module]:
        """All networks to evaluate, by name."""
        return {"model": self.model}

    @property
    def returned_name(self) -> str:
        """The name of :attr:`model` among :attr:`networks`."""
        return next(name for name, network in self.networks.items() if network is self.model)

    @property
    def learners(self) -> list[nn.Module]:
        """All networks in training, to count their forward and backward passes."""
        return list(self.networks.values())

    @abstractmethod
    def step(self, batch: Batch) -> StepResult:
        """Train all networks for one optimizer step on a batch: keyword arguments of the model, with ``labels``."""

    def on_epoch(self, epoch: int) -> None:
        """Prepare for an epoch, counted from 0; called at its start."""

    @abstractmethod
    def drop_rates(self) -> dict[str, Tensor]:
        """Return the drop rate per attention site in the latest step, 0-d; empty if nothing is attached."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, as nested dicts and lists of tensors and plain values.

        If several processes train the model, all of them must call this at the same time.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""


class Updater:
    """Turns a loss into an update: backward pass, clipping, optimizer step, schedule; alone or in several processes."""

    def __init__(self, max_grad_norm: float | None = 1.0, accelerator: Accelerator | None = None) -> None:
        self.max_grad_norm = max_grad_norm
        self.accelerator = accelerator

    @property
    def processes(self) -> int:
        """Number of processes that train the model."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Index of this process."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    def autocast(self) -> AbstractContextManager[None]:
        """Compute in the accelerator's precision within the block; not in float16, where unscaled gradients vanish."""
        if self.accelerator is None or self.accelerator.mixed_precision == "fp16":
            return nullcontext()
        return self.accelerator.autocast()

    def local(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients within the block without averaging over processes; a later pass averages all of them."""
        return nullcontext() if self.accelerator is None else self.accelerator.no_sync(model)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over processes."""
        if self.accelerator is None or self.processes == 1:
            return value
        return self.accelerator.reduce(value.to(self.accelerator.device), "mean")

    def share(self, module: nn.Module) -> None:
        """Copy the first process's weights to all processes, for a module that the accelerator does not wrap."""
        if self.processes > 1:
            for tensor in module.state_dict().values():
                broadcast(tensor)

    def gathered(self, values: list[Any]) -> list[Any]:
        """Concatenate the values of all processes."""
        return values if self.processes == 1 else gather_object(values)

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average gradients over processes, for parameters that the accelerator does not wrap."""
        parameters = list(parameters)
        if self.processes == 1 or not parameters:
            return
        # All processes must take part for all parameters: a process without a gradient adds zeros if another has one.
        share = self.mean(torch.tensor([float(parameter.grad is not None) for parameter in parameters]))
        for parameter, has_gradient in zip(parameters, share.tolist(), strict=True):
            if has_gradient:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.mean(gradient)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss."""
        if self.accelerator is None:
            loss.backward()
        elif self.accelerator.gradient_accumulation_steps == 1:  # or it would divide the loss of every step
            self.accelerator.backward(loss)
        else:
            raise InputError("Expected an Accelerator that accumulates no gradients: pass `micro_batches` instead.")

    def step(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None, before: Hook | None = None
    ) -> None:
        """Clip the gradients, call ``before``, update the parameters and the schedule, and clear the gradients.

        Gradients of the model's parameters that the optimizer does not hold do not count, and are cleared, too.
        """
        parameters = [*model.parameters()]  # once: a model takes a while to list them
        if self.max_grad_norm is not None:
            clip = nn.utils.clip_grad_norm_ if self.accelerator is None else self.accelerator.clip_grad_norm_
            clip(held_by(optimizer, parameters), self.max_grad_norm)
        elif before is not None and self.accelerator is not None:
            self.accelerator.unscale_gradients(optimizer)  # clipping has done it
        if before is not None:
            before()
        optimizer.step()
        torch.clear_autocast_cache()  # under autocast around the step, it holds the weights before
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        for parameter in parameters:
            parameter.grad = None


def look_at(handle: AttachHandle | None, model: nn.Module, batch: Batch) -> None:
    """Before a training step on a batch, let an attached provider that acts look at it."""
    if handle is not None and handle.active:
        handle.provider.attribute(model, batch)


def with_penalty(loss: Tensor, handle: AttachHandle | None, parts: int = 1) -> Tensor:
    """Add the penalty of an attached provider that acts, divided by parts, to the loss of the latest forward pass."""
    penalty = handle.provider.penalty() if handle is not None and handle.active else None
    return loss if penalty is None else loss + penalty.to(loss.device) / parts  # a model may be on several devices


def held_by(optimizer: Optimizer, parameters: Iterable[nn.Parameter], *, held: bool = True) -> list[nn.Parameter]:
    """Return the parameters that an optimizer holds, or, if not ``held``, the parameters that it does not hold."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in parameters if (id(parameter) in ids) is held]


def add_learned(optimizer: Optimizer, provider: Regularizer, learning_rate: float | None = None) -> None:
    """Add the parameters that a provider learns by the model's loss to an optimizer, without weight decay."""
    if missing := held_by(optimizer, provider.learned_parameters(), held=False):
        rate = {} if learning_rate is None else {"lr": learning_rate}
        optimizer.add_param_group({"params": missing, "weight_decay": 0.0, **rate})


def check_own_loss(provider: Regularizer, other: str) -> None:
    """Refuse a provider that learns by the model's own loss, because training has another loss, named ``other``."""
    if names := [type(part).__name__ for part in provider.parts() if part.uses_model_loss]:
        raise InputError(
            f"{names[0]} learns by the model's own loss, but training has `{other}`: give the provider the "
            "same loss, as its `loss`."
        )


def check_learned(optimizer: Optimizer, provider: Regularizer) -> None:
    """Refuse an optimizer without the parameters that a provider learns: a scheduler may exist, so none is added."""
    if missing := held_by(optimizer, provider.learned_parameters(), held=False):
        raise InputError(
            f"The optimizer does not hold {len(missing)} parameters that {type(provider).__name__} learns. Call "
            '`optimizer.add_param_group({"params": provider.learned_parameters(), "weight_decay": 0.0})` before you '
            "make a scheduler."
        )
