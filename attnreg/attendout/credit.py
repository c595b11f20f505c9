"""How AttendOut's Generator learns: by REINFORCE, whose settings a teacher applies in a game."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from attnreg.arguments import NotNegative, ProbabilityBelowOne, a_function, not_negative, one_of, probability
from attnreg.attendout.rewards import Rewards, standardized_gap
from attnreg.errors import InputError
from attnreg.masks import pack, unpack
from attnreg.outputs import rows_of
from attnreg.regularizer.base import Regularizer
from attnreg.training.method import Batch, Updater

_WIDTH = 64  # up to this width of a G-Net, Adam's usual learning rate moves logits by less than 0.1 per update


def generator_adam(generator: nn.Module, learning_rate: float | None = None, bias_learning_rate: float = 5e-2) -> Adam:
    r"""Make Adam for a G-Net, with a separate learning rate for the biases, which set the layers' drop rates.

    Args:
        generator: the G-Net.
        learning_rate: learning rate of the weights; by default 1e-3, times :math:`(64 / d)^2` for a width d above 64,
            because the number of weights that act together on a logit grows with the square of the width.
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
    weights = dict(generator.named_parameters())
    biases = [weights.pop(name) for name in ("network.bias",) if name in weights]
    groups: list[dict[str, Any]] = [{"params": [*weights.values()]}, {"params": biases, "lr": bias_learning_rate}]
    return Adam([group for group in groups if group["params"]], lr=learning_rate, fused=True)  # as in `adamw`


Reward = Literal["scaled", "gap", "standardized"]
RewardPer = Literal["round", "sample", "step"]
Baseline = Literal["moving", "leave-one-out"]


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    r"""Teach the Generator by REINFORCE: :math:`-\log P(a)\,(r - b)`, a mean over units, samples and steps of a round.

    A reward comes from the gaps: the Attacker's scores minus the Defender's on the same rows. Scaled rewards keep their
    scale from round to round; a standardized gap is as large for noise as for a difference. Rewards per sample and
    ``"leave-one-out"`` lower the variance, as do fewer ``decisions`` of the Generator.

    Args:
        reward: ``"scaled"`` (the mean gap, whose difference to the baseline is divided by its running deviation),
            ``"gap"`` or ``"standardized"`` (the gap over its standard error).
        per: one reward per ``"round"``, ``"step"`` or ``"sample"``. Per step, the gap on the t-th reward row is the
            reward of the t-th step, which is our reading of the paper; there must be as many rows as steps. Per sample,
            reward rows that are not the round's samples are paired with them in order, again from the first when they
            run out, which is not in the paper.
        baseline: what is subtracted from rewards: ``"moving"`` (a moving average, which the first round sets) or
            ``"leave-one-out"`` (the mean of the other samples' rewards).
        momentum: momentum of the moving average, and of the running deviation of ``"scaled"``.
        learning_rate: learning rate of the Generator, as in :func:`attnreg.training.generator_adam`.
        bias_learning_rate: learning rate of the biases, which set the layers' drop rates.
        optimizer_factory: makes the Generator's optimizer, instead of Adam with these learning rates.

    Raises:
        InputError: if an argument is unknown or out of range, or two arguments are at odds.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 5; Williams, 1992. Leave-one-out: Kool et al., 2019.

    Example:
        >>> gaps = torch.tensor([0.5, -0.1])
        >>> Reinforce(reward="gap").rewards(gaps), Reinforce(reward="gap", per="sample").rewards(gaps)
        (tensor(0.2000), tensor([ 0.5000, -0.1000]))
    """

    reward: Reward = "scaled"
    per: RewardPer = "round"
    baseline: Baseline = "moving"
    momentum: ProbabilityBelowOne = 0.9
    learning_rate: NotNegative | None = None
    bias_learning_rate: NotNegative = 5e-2
    optimizer_factory: Callable[[nn.Module], Optimizer] | None = None

    def __post_init__(self) -> None:
        not_negative("learning_rate", 0.0 if self.learning_rate is None else self.learning_rate)
        not_negative("bias_learning_rate", self.bias_learning_rate)
        if self.optimizer_factory is not None:
            a_function("optimizer_factory", self.optimizer_factory, "the G-Net, such as `generator_adam`")
        one_of("reward", self.reward, get_args(Reward))
        one_of("per", self.per, get_args(RewardPer))
        one_of("baseline", self.baseline, get_args(Baseline))
        probability("momentum", self.momentum, "[0, 1)")
        if self.reward == "standardized" and self.per != "round":
            raise InputError(f"Expected `per` 'round' with reward 'standardized', got {self.per!r}.")
        if self.baseline == "leave-one-out" and self.per != "sample":
            raise InputError(f"Expected `per` 'sample' with baseline 'leave-one-out', got {self.per!r}.")

    def rewards(self, gaps: Tensor) -> Tensor:
        """Return the reward, 0-d, or rewards, ``(n,)``, from gaps ``(n,)``."""
        if self.reward == "standardized":
            return standardized_gap(gaps)
        return gaps.mean() if self.per == "round" else gaps

    def check(self, provider: Regularizer, rewards: Rewards) -> None:
        """Refuse a provider, the Generator alone or in a composition, or rewards that do not fit these settings."""
        if names := [type(part).__name__ for part in provider.parts() if part.looks_alone]:
            raise InputError(f"{names[0]} makes training passes without the Generator's masks: remove it.")
        if self.per != "round" and hasattr(rewards.score, "over"):
            raise InputError(f"Expected `per` 'round' with a metric as score, got {self.per!r}.")
        if self.per == "step" and rewards.batches is None:
            raise InputError("Expected `batches` of `rewards` with `per` 'step': one row per step of a round.")


class Teacher:
    """Updates a Generator by REINFORCE in one game.

    With one reward per round, the gradient is that reward times a sum over steps, which is accumulated while masks are
    drawn, so that memory does not grow. With more rewards, batches and packed masks are kept until rewards are known.
    """

    def __init__(
        self, credit: Reinforce, generator: nn.Module, updater: Updater, max_grad_norm: float | None = 1.0
    ) -> None:
        if credit.baseline == "leave-one-out" and getattr(generator, "decides_for_batch", False):
            raise InputError("Baseline 'leave-one-out' needs decisions per sample: use decisions 'unit' or 'key'.")
        if credit.per != "round" and not hasattr(generator, "log_prob"):
            raise InputError(f"{type(generator).__name__} has no `log_prob`, which `per` {credit.per!r} needs.")
        self.credit = credit
        make, rates = credit.optimizer_factory, (credit.learning_rate, credit.bias_learning_rate)
        self.optimizer = generator_adam(generator, *rates) if make is None else make(generator)
        self.baseline = 0.0  # the first round sets it
        self.rounds = 0
        self._mean_square, self._num_squares = 0.0, 0  # running mean of squared advantages, and their number
        self._generator: Any = generator
        self._learned = [parameter for parameter in generator.parameters() if parameter.requires_grad]
        self._updater = updater
        self._generator_updater = Updater(max_grad_norm)  # no accelerator: fp16 does not scale these gradients
        self._gradients: list[Tensor | None] = []  # summed over the round's steps
        self._draws: list[list[Any]] = []  # pairs of a batch and its packed masks
        self._latest_masks: Tensor | None = None  # the masks of the latest draw
        self.steps = 0  # steps of the current round

    def draw(self, batch: Batch) -> None:
        """Draw the masks of the Attacker's training step on a batch."""
        self.steps += 1
        generator, is_cached = self._generator, self.credit.per != "round"
        with torch.set_grad_enabled(not is_cached), self._updater.autocast(), sparse_embeddings(generator):
            log_prob = generator.sample(batch)
        self._latest_masks = getattr(generator, "keep", None)
        if is_cached:
            self._draws.append([dict(batch), pack(generator.keep)])
        else:
            self._accumulate(log_prob, 1.0)

    def check_drawn(self) -> None:
        """Check that the Attacker trained under the masks drawn for it."""
        masks, self._latest_masks = self._latest_masks, None
        if getattr(self._generator, "keep", None) is not masks:
            raise InputError(
                "Another forward pass took the Generator's masks before the Attacker's training step, so they cannot "
                "be rewarded: train without the provider that makes this pass."
            )

    def _accumulate(self, log_prob: Tensor, advantage: Tensor | float) -> None:
        """Add the gradient of REINFORCE's loss to the sum, which is dense; a table's gradient may be sparse."""
        loss = reinforce_loss(log_prob, advantage)
        sums = self._gradients = self._gradients or [None] * len(self._learned)
        for number, gradient in enumerate(torch.autograd.grad(loss, self._learned, allow_unused=True)):
            if (total := sums[number]) is None:
                sums[number] = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
            elif gradient is not None:
                total.add_(gradient)

    def update(self, gaps: Tensor) -> float:
        """Learn at the end of a round from the gaps, ``(n,)``; return the mean reward."""
        if self.credit.per == "step":  # the last round may be shorter
            if len(gaps) < self.steps:
                raise InputError(
                    f"Expected a reward row per step with `per` 'step', got {len(gaps)} rows for {self.steps} steps."
                )
            gaps = gaps[: self.steps]
        rewards = self.credit.rewards(gaps)
        mean = float(rewards.mean())
        if not self.rounds:
            self.baseline = mean
        self.rounds += 1
        is_moving = self.credit.baseline == "moving"
        mean_of_others = (rewards.sum() - rewards) / max(1, rewards.numel() - 1)
        advantages = self._scaled(rewards - (self.baseline if is_moving else mean_of_others))
        if self.credit.per != "round":
            self._accumulate_draws(advantages)
        weight = float(advantages) if self.credit.per == "round" else 1.0
        for parameter, gradient in zip(self._learned, self._gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.mul_(weight / self.steps)
        self._updater.average_gradients(self._learned)
        self._generator_updater.step(self._generator, self.optimizer)
        self.baseline += (1 - self.credit.momentum) * (mean - self.baseline)
        self.steps, self._gradients, self._draws = 0, [], []
        return mean

    def _scaled(self, advantages: Tensor) -> Tensor:
        if self.credit.reward != "scaled":
            return advantages
        momentum, square = self.credit.momentum, float((advantages**2).mean())
        if square or self._num_squares:  # before the first difference, there is no scale
            self._num_squares += 1
            self._mean_square = momentum * self._mean_square + (1 - momentum) * square
        count = self._num_squares
        deviation = math.sqrt(self._mean_square / (1 - momentum**count)) if count else 0.0
        return advantages / deviation if deviation else torch.zeros_like(advantages)

    def _accumulate_draws(self, advantages: Tensor) -> None:
        sizes = self._updater.gathered([sum(rows_of(batch) for batch, _ in self._draws)])
        begin = sum(sizes[: self._updater.rank])  # the rewards of all processes are concatenated
        for step, (batch, masks) in enumerate(self._draws):
            with self._updater.autocast(), sparse_embeddings(self._generator):
                log_prob = self._generator.log_prob(batch, unpack(masks))
            log_prob = log_prob.view(rows_of(batch), -1).mean(1)  # the choices of a row share its reward
            rows = torch.arange(begin, begin + len(log_prob)) % len(advantages)
            advantage = advantages[step] if self.credit.per == "step" else advantages[rows]
            self._accumulate(log_prob, advantage.to(log_prob.device))
            begin += len(log_prob)

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "baseline": self.baseline,
            "rounds": self.rounds,
            "squares": [self._mean_square, self._num_squares],
            "steps": self.steps,
            # Every process has other gradients and draws of an unfinished round.
            "gradients": self._updater.gathered([send_to_device(self._gradients, "cpu")]),
            "draws": self._updater.gathered([send_to_device(self._draws, "cpu")]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`, which stays as it is."""
        state = copy.deepcopy(dict(state))
        self.optimizer.load_state_dict(state["optimizer"])
        self.baseline, self.steps = state["baseline"], state["steps"]
        self.rounds, (self._mean_square, self._num_squares) = state["rounds"], state["squares"]
        device = next(self._generator.parameters()).device
        self._gradients = send_to_device(state["gradients"][self._updater.rank], device)
        self._draws = send_to_device(state["draws"][self._updater.rank], device)


@contextmanager
def sparse_embeddings(module: nn.Module) -> Iterator[None]:
    """Let the gradients of embedding tables hold only the few rows that a forward pass within the block uses."""
    tables = [table for table in module.modules() if isinstance(table, nn.Embedding) and not table.scale_grad_by_freq]
    settings = [table.sparse for table in tables]
    for table in tables:
        table.sparse = True
    try:
        yield
    finally:
        for table, sparse in zip(tables, settings, strict=True):
            table.sparse = sparse


def reinforce_loss(log_prob: Tensor, advantage: Tensor | float) -> Tensor:
    """Return the loss whose gradient estimates that of minus the expected reward; the advantage is 0-d or ``(B,)``."""
    return -(log_prob * advantage).mean()
