"""How AttendOut's Generator learns: a credit holds the settings, and its teacher applies them in one game."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from attnreg.arguments import NotNegative, not_negative
from attnreg.attendout.rewards import Rewards
from attnreg.errors import InputError
from attnreg.regularizer.base import Regularizer
from attnreg.training.method import Batch, Updater

_WIDTH = 64  # up to this width of a G-Net, Adam's usual learning rate moves logits by less than 0.1 per update


@dataclass(frozen=True, kw_only=True)
class Credit(ABC):
    """How the Generator of :class:`attnreg.training.AttackerDefender` learns.

    Args:
        learning_rate: learning rate of the Generator, as in :func:`attnreg.training.generator_adam`.
        bias_learning_rate: learning rate of its biases, which set the drop rate of each layer.
        optimizer_factory: makes the Generator's optimizer, instead of Adam with these learning rates.
    """

    learning_rate: NotNegative | None = None
    bias_learning_rate: NotNegative = 5e-2
    optimizer_factory: Callable[[nn.Module], Optimizer] | None = None
    #: whether a second Attacker trains under the opposite masks
    antithetic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        not_negative("learning_rate", 0.0 if self.learning_rate is None else self.learning_rate)
        not_negative("bias_learning_rate", self.bias_learning_rate)
        if self.optimizer_factory is not None and not callable(self.optimizer_factory):
            raise InputError(f"Expected `optimizer_factory` to be a function, got {self.optimizer_factory!r}.")

    def optimizer(self, generator: nn.Module) -> Optimizer:
        """Make the Generator's optimizer."""
        if self.optimizer_factory is not None:
            return self.optimizer_factory(generator)
        return generator_adam(generator, self.learning_rate, self.bias_learning_rate)

    def check(self, provider: Regularizer, rewards: Rewards) -> None:
        """Refuse what does not fit the credit: ``provider`` is the Generator, alone or in a composition."""

    @abstractmethod
    def teacher(self, generator: nn.Module, updater: Updater, **game: Any) -> Teacher:
        """Make the teacher of a Generator, or refuse a Generator that cannot be taught in this way.

        ``game`` are ``max_grad_norm``; ``attacker``, the model that the Generator masks; ``reward_batch``, which
        returns the reward batch of an update, numbered from 0; and the Attacker's ``loss_function``.
        """


class Teacher:
    """Teaches a Generator in one game; this base class is for games without one."""

    @property
    def used_baseline(self) -> float | None:
        """The moving average of rewards, if there is one."""
        return None

    def draw(self, batch: Batch) -> None:
        """Prepare the Attackers' training step on a batch, under masks of the Generator."""

    def check_drawn(self) -> None:
        """Check that the Attacker trained under the masks drawn for it."""

    def update(self, gaps: Sequence[Tensor]) -> float:
        """Learn at the end of a round from each Attacker's gaps, ``(n,)``; return the mean reward of the first."""
        return float(gaps[0].mean())

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""


def generator_adam(generator: nn.Module, learning_rate: float | None = None, bias_learning_rate: float = 5e-2) -> Adam:
    r"""Make Adam for a G-Net, with a learning rate of its own for the bias of each layer, which sets its drop rate.

    Adam moves every weight by about its learning rate, and the number of weights that act together on a logit grows
    with the square of the width: at the same rate, noise in the reward would decide the drop rates of a wide G-Net.

    Args:
        generator: the G-Net.
        learning_rate: learning rate of its weights; by default 1e-3, times :math:`(64 / d)^2` for a width d above 64.
        bias_learning_rate: learning rate of the biases.

    Example:
        >>> from attnreg import GNetProvider
        >>> [group["lr"] for group in generator_adam(GNetProvider(10, 4, num_layers=2)).param_groups]
        [0.001, 0.05]
        >>> [group["lr"] for group in generator_adam(GNetProvider(10, 128, num_layers=2)).param_groups]
        [0.00025, 0.05]
    """
    if learning_rate is None:
        learning_rate = 1e-3 * min(1.0, (_WIDTH / getattr(generator, "hidden_size", _WIDTH)) ** 2)
    others = dict(generator.named_parameters())
    biases = [others.pop(name) for name in ("network.bias",) if name in others]
    groups: list[dict[str, Any]] = [{"params": [*others.values()]}, {"params": biases, "lr": bias_learning_rate}]
    return Adam([group for group in groups if group["params"]], lr=learning_rate, fused=True)  # as in `adamw`
