"""The contract of training methods, and the update that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from attnreg.errors import InputError
from attnreg.provider.base import MaskProvider

Batch = Mapping[str, Tensor]
IGNORED = -100  # a label that does not count, as in torch's losses


@dataclass(frozen=True)
class StepResult:
    """What one training step did.

    Args:
        loss: 0-d, detached: the training loss of the network that the method returns.
        logs: further numbers to show and write down, by name; 0-d tensors or floats.
        events: further facts to show and write down, by name, such as who won a round.
    """

    loss: Tensor
    logs: Mapping[str, Tensor | float] = field(default_factory=dict)
    events: Mapping[str, str] = field(default_factory=dict)


class TrainingMethod(ABC):
    """A way of training a model: something that is given batches, and has a model to show for it.

    Methods run in the library's own loop and in any other::

        for epoch in range(epochs):
            method.on_epoch(epoch)
            for batch in batches:
                method.step(batch)
    """

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The network to evaluate and keep."""

    @property
    def networks(self) -> dict[str, nn.Module]:
        """All networks in training that are worth evaluating, by name."""
        return {"model": self.model}

    @property
    def returned_name(self) -> str:
        """The name of :attr:`model` among :attr:`networks`."""
        return next(name for name, network in self.networks.items() if network is self.model)

    @property
    def learners(self) -> list[nn.Module]:
        """All networks in training, to count what passes through them."""
        return list(self.networks.values())

    @abstractmethod
    def step(self, batch: Batch) -> StepResult:
        """One optimizer step (of each network) on a batch: keyword arguments of the model, ``labels`` among them."""

    def on_epoch(self, epoch: int) -> None:
        """An epoch begins; counted from 0."""

    @property
    def provider(self) -> MaskProvider | None:
        """The provider in use, to be saved beside the model; ``None`` where there is none."""
        return None

    @property
    def accelerator(self) -> Accelerator | None:
        """What takes care of devices, precision and processes; ``None`` where the loop does so itself.

        :func:`attnreg.experiments.fit` does not: except on one process on a CPU in float32, it wants
        its run's here.
        """
        return None

    @abstractmethod
    def drop_rates(self, *, by_head: bool = False) -> dict[str, Tensor]:
        """Drop rate per attention site in the latest step; empty where nothing is attached.

        Args:
            by_head: ``(H,)`` where the masks differ by head, instead of 0-d.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs, as nested dicts and lists of tensors and plain values.

        Where several processes train one model, all of them must call this at the same time.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""


class Shared(TypedDict, total=False):
    """The arguments that every method passes on to its :class:`Updater`, and how learning rates change.

    Args:
        scheduler: advanced after each optimizer step.
        max_grad_norm: the model's gradients are scaled down to this norm, the provider's are left; ``None`` leaves all.
        accelerator: takes care of devices and processes.
    """

    scheduler: LRScheduler | None
    max_grad_norm: float | None
    accelerator: Accelerator | None


class Updater:
    """How a loss becomes an update: backward, clip, step, schedule.

    Args:
        max_grad_norm: gradients are scaled down to this norm; ``None`` leaves them.
        accelerator: takes care of devices and processes; ``None`` in a loop that does so itself.
    """

    def __init__(self, max_grad_norm: float | None = 1.0, accelerator: Accelerator | None = None) -> None:
        self.max_grad_norm = max_grad_norm
        self.accelerator = accelerator

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Place a model and its optimizer as the accelerator wants them."""
        if self.accelerator is None:
            return model, optimizer
        return self.accelerator.prepare(model, optimizer)

    @property
    def processes(self) -> int:
        """How many processes train the same model."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    def autocast(self) -> AbstractContextManager[None]:
        """Within the block, the precision is the accelerator's; but for float16, in which unscaled gradients vanish."""
        if self.accelerator is None or self.accelerator.mixed_precision == "fp16":
            return nullcontext()
        return self.accelerator.autocast()

    def mean(self, value: Tensor) -> Tensor:
        """The mean over processes."""
        if self.accelerator is None or self.processes == 1:
            return value
        return self.accelerator.reduce(value.to(self.accelerator.device), "mean")

    def share(self, module: nn.Module) -> None:
        """Give all processes the first one's weights of a module that has no wrapped forward pass to see to that."""
        if self.processes > 1:
            for tensor in module.state_dict().values():
                broadcast(tensor)

    def gathered(self, values: list[Any]) -> list[Any]:
        """The values of all processes, one process after the other."""
        return values if self.processes == 1 else gather_object(values)

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Take the mean over processes of gradients that did not come through a wrapped forward pass."""
        held = list(parameters)
        if self.processes == 1 or not held:
            return
        # A process may have skipped what others have not, and all must take part: none is zero where some have one.
        share = self.mean(torch.tensor([float(parameter.grad is not None) for parameter in held]))
        for parameter, anywhere in zip(held, share.tolist(), strict=True):
            if anywhere:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.mean(gradient)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model itself, without what the accelerator has put around it."""
        return model if self.accelerator is None else self.accelerator.unwrap_model(model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        if self.accelerator is None:
            loss.backward()
        else:
            self.accelerator.backward(loss)

    def step(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        """Use the gradients and clear them."""
        if self.max_grad_norm is not None:
            if self.accelerator is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
            else:
                self.accelerator.clip_grad_norm_(model.parameters(), self.max_grad_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)


def not_in(optimizer: Optimizer, provider: MaskProvider) -> list[nn.Parameter]:
    """What a provider learns by the model's loss and an optimizer does not hold."""
    learned = provider.learned_parameters()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} if learned else set()
    return [parameter for parameter in learned if id(parameter) not in held]


def check_learned(optimizer: Optimizer, provider: MaskProvider) -> None:
    """Raise if an optimizer does not hold what a provider learns by the model's loss.

    Raises:
        InputError: if so. It is not added here: a scheduler may have been made for the optimizer as it is.
    """
    if missing := not_in(optimizer, provider):
        raise InputError(
            f"The optimizer does not hold {len(missing)} parameters that {type(provider).__name__} learns: call "
            '`optimizer.add_param_group({"params": provider.learned_parameters(), "weight_decay": 0.0})` before you '
            "make a scheduler."
        )
