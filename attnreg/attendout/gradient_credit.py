"""Credit by gradient: teach a Generator how the Attacker's update under its masks changes the reward loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from attnreg import functional
from attnreg.arguments import InnerProbability, NotNegative, ProbabilityBelowOne, not_negative, probability
from attnreg.attendout.credit import Credit, Teacher
from attnreg.attendout.rewards import Rewards
from attnreg.errors import InputError
from attnreg.outputs import LossFunction, loss_of
from attnreg.regularizer.abilities import that_look_at_batches
from attnreg.regularizer.base import Regularizer
from attnreg.training.method import Batch, Updater, draws_repeated, put_back

MOMENTUM = 0.9  # of the running deviation of credit
STEP = 0.01  # length of the finite difference in the space of parameters, as in DARTS (arXiv 1806.09055)


@dataclass(frozen=True, kw_only=True)
class GradientCredit(Credit):
    r"""Teach a G-Net by how the Attacker's next update changes the reward loss R, to first order.

    With the training gradient :math:`g(M) = \nabla_\theta L(\theta; M)` under masks M and the gradient v of R, of unit
    length, the Generator ascends the expected cosine

    .. math:: c(M) = v^\top \hat g(M), \quad \hat g = g / \lVert g \rVert, \qquad
              \nabla_M c = \frac{\nabla_M\, u^\top g(M)}{\lVert g \rVert}, \quad u = v - c\, \hat g, \quad
              u^\top g(M) \approx \frac{L(\theta + \epsilon u; M) - L(\theta - \epsilon u; M)}{2 \epsilon}

    The gradient reaches it through a random share of the decisions, whose values are drawn evenly from [0, 1]: the mean
    slope over [0, 1] is the difference between keeping and dropping. No score and no winner is needed. The credit of
    the units is divided by its running deviation.

    Args:
        share: probability that a decision is replaced by a value drawn evenly from [0, 1].
        price: weight of the mean Kullback-Leibler divergence of the decisions from ``initial_keep``, which is
            subtracted.
        averaging: decay of the moving average of the G-Net's weights that draws the masks, because one batch says
            little; the credit is that of the latest weights.
        learning_rate, bias_learning_rate, optimizer_factory: as in :class:`Credit`.

    Raises:
        InputError: if an argument is out of range.

    Reference:
        This project's own; the finite difference is that of DARTS (arXiv 1806.09055), Eq. 8.

    Example:
        >>> GradientCredit(price=0.1).averaging
        0.98
    """

    share: InnerProbability = 0.25
    price: NotNegative = 0.03
    averaging: ProbabilityBelowOne = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        probability("share", self.share, "(0, 1)")
        not_negative("price", self.price)
        probability("averaging", self.averaging, "[0, 1)")

    @override
    def check(self, provider: Regularizer, rewards: Rewards) -> None:
        if rewards.batches is None:
            raise InputError("Expected `batches` of `rewards` with GradientCredit, got None.")
        if others := that_look_at_batches(provider):
            raise InputError(
                f"{type(others[0]).__name__} cannot be used with GradientCredit, which makes passes of its own."
            )

    @override
    def teacher(self, generator: nn.Module, updater: Updater, **game: Any) -> GradientTeacher:
        return GradientTeacher(self, generator, updater, **game)


class GradientTeacher(Teacher):
    """Updates a G-Net by gradient; the arguments are those of :meth:`Credit.teacher`."""

    def __init__(
        self,
        credit: GradientCredit,
        generator: nn.Module,
        updater: Updater,
        *,
        attacker: nn.Module,
        reward_batch: Callable[[int], Batch],
        max_grad_norm: float | None = 1.0,
        loss_function: LossFunction | None = None,
    ) -> None:
        if not hasattr(generator, "relaxed"):
            raise InputError(f"{type(generator).__name__} cannot be taught by gradient: it has no `relaxed` masks.")
        if updater.accelerator is not None and updater.accelerator.mixed_precision == "fp16":
            raise InputError("GradientCredit needs float32 or bfloat16: float16 rounds small gradients to zero.")
        self.credit = credit
        self.optimizer = credit.optimizer(generator)
        self.attacker = attacker
        self.reward_batch = reward_batch
        self._loss_function = loss_function
        self._generator: Any = generator
        self._updater = updater
        self._own_updater = Updater(max_grad_norm)
        self._square, self._updates = 0.0, 0
        self._latest: list[Tensor] = []  # the weights that learn, while the G-Net holds their average

    @override
    def draw(self, batch: Batch) -> None:
        if not getattr(self._generator, "calibrated", True):
            self._generator.calibrate(batch)  # the average begins with the calibrated weights
        with self._latest_weights():
            self._learn(batch)

    def _learn(self, batch: Batch) -> None:
        direction = self._direction(self.reward_batch(self._updates))
        with self._generator.relaxed(batch, self.credit.share) as relaxed:
            direction, length = self._across(batch, direction)
            ups, downs = (self._slopes(batch, relaxed.masks, direction, sign) for sign in (1, -1))
        of_logits = relaxed.gradient([(up - down) * (length / 2) for up, down in zip(ups, downs, strict=True)])
        count = max(1, int(relaxed.valid.sum()))
        self._updates += 1
        square = self._updater.mean(of_logits.double().square().sum() / count)  # the same in all processes
        self._square = MOMENTUM * self._square + (1 - MOMENTUM) * float(square)
        deviation = math.sqrt(self._square / (1 - MOMENTUM**self._updates)) or 1.0
        keep = 0.5 if self._generator.initial_keep is None else self._generator.initial_keep
        divergence = functional.bernoulli_kl(relaxed.logits, keep)[relaxed.valid].mean()
        losses = [relaxed.logits, self.credit.price * divergence]
        torch.autograd.backward(losses, [-of_logits / (deviation * count), None])
        self._updater.average_gradients(self._generator.parameters())
        self._own_updater.step(self._generator, self.optimizer)

    @contextmanager
    def _latest_weights(self) -> Iterator[None]:
        """Let the G-Net hold its latest weights within the block, and their moving average again after it."""
        if not self.credit.averaging:
            yield
            return
        trained = [each for group in self.optimizer.param_groups for each in group["params"]]
        averages = [each.detach().clone() for each in trained]
        _copy(self._latest or averages, trained)
        try:
            yield
        finally:
            self._latest = [each.detach().clone() for each in trained]
            get_ema_multi_avg_fn(self.credit.averaging)(averages, self._latest, None)
            _copy(averages, trained)

    def _direction(self, batch: Batch) -> dict[str, Tensor]:
        """Return v, the gradient of the reward loss, by parameter, with length :data:`STEP`."""
        self.attacker.eval()
        held = self._gradients(batch, {n: p for n, p in self.attacker.named_parameters() if p.requires_grad})
        self.attacker.train()
        factor = STEP / (_length(held) or 1.0)
        return {name: each * factor for name, each in held.items()}

    def _gradients(self, batch: Batch, of: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return the gradients of the loss by the keys of tensors, without tensors that it does not depend on."""
        with self._updater.autocast():
            loss = loss_of(self.attacker(**batch), batch, self._loss_function)
        found = torch.autograd.grad(loss, list(of.values()), allow_unused=True)
        return {key: each for key, each in zip(of, found, strict=True) if each is not None}

    def _across(self, batch: Batch, direction: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """Return u, with length :data:`STEP`, and what its slopes are multiplied by to be those of the cosine."""
        trained = dict(self.attacker.named_parameters())
        with draws_repeated(self.attacker):  # no pass may differ from the next by the model's own dropout
            gradients = self._gradients(batch, {name: trained[name] for name in direction})
        length = _length(gradients) or 1.0
        along = sum(float((direction[name] * each).sum()) for name, each in gradients.items()) / length**2
        across = {**direction, **{name: direction[name] - along * each for name, each in gradients.items()}}
        rest = _length(across) or 1.0
        return {name: each * (STEP / rest) for name, each in across.items()}, rest / (STEP * length)

    def _slopes(
        self, batch: Batch, masks: Sequence[Tensor], direction: Mapping[str, Tensor], sign: int
    ) -> list[Tensor]:
        """Return the gradient of the training loss with respect to the masks, at shifted parameters."""
        parameters = dict(self.attacker.named_parameters())
        with draws_repeated(self.attacker), put_back([parameters[name] for name in direction]):
            with torch.no_grad():
                for name, each in direction.items():
                    parameters[name].add_(each, alpha=sign)
            found = self._gradients(batch, dict(enumerate(masks)))
        return [found.get(number, torch.zeros_like(mask)) for number, mask in enumerate(masks)]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "squares": [self._square, self._updates],
            "latest": list(self._latest),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._square, self._updates = state["squares"]
        device = next(self._generator.parameters()).device
        self._latest = [each.to(device) for each in state["latest"]]


def _length(gradients: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float((each**2).sum()) for each in gradients.values()))


@torch.no_grad()
def _copy(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
