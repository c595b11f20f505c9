"""REINFORCE: how AttendOut's Generator learns from rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attnreg.arguments import one_of, probability_below_one
from attnreg.attendout.rewards import RewardPer, reinforce_loss
from attnreg.attribution.outputs import rows_of
from attnreg.errors import InputError
from attnreg.regularizer.base import Regularizer
from attnreg.training.bits import pack, unpack
from attnreg.training.method import Batch, Updater

Baseline = Literal["moving", "leave-one-out"]


class Generator(Protocol):
    """A provider that knows the probability of the masks it draws, such as :class:`attnreg.GNetProvider`.

    Only :meth:`sample` is always needed: :meth:`log_prob` and :attr:`keep` for rewards per sample, the others for
    antithetic masks.
    """

    keep: Tensor | None
    opposite_keep: Tensor | None

    def sample(self, inputs: Batch) -> Tensor:
        """Draw the masks of the next forward pass and return their log-probability, ``(B,)``, differentiable."""

    def log_prob(self, inputs: Batch, keep: Tensor) -> Tensor:
        """Return the log-probability of masks, ``(B,)``, differentiable."""

    def sample_opposites(self, inputs: Batch) -> tuple[Tensor, Tensor]:
        """Draw masks and their opposites; return the log-probability of both, ``(B,)`` each."""

    def opposite(self) -> Regularizer:
        """Return a provider that masks another model with the opposite masks."""


class Reinforce:
    r"""Update a Generator by :math:`-\log P(a)\,(r - b)`, averaged over the units, samples and steps of a round.

    The Generator does not change within a round. With one reward per round, the gradient is therefore a sum over steps
    times that reward: it is accumulated while masks are drawn, so that memory does not grow with the round. With one
    reward per sample, batches and packed masks are kept until the rewards are known.

    Args:
        generator: the provider that draws the masks.
        optimizer: the Generator's optimizer.
        updater: averages gradients over processes.
        per: ``"round"`` (one reward, 0-d) or ``"sample"`` (rewards ``(n,)``).
        baseline: what is subtracted from rewards: ``"moving"`` (a moving average of them) or ``"leave-one-out"`` (the
            mean of the other samples' rewards).
        momentum: momentum of the moving average, and of the running deviation.
        scaled: divide the differences to the baseline by their running deviation.
        antithetic: draw masks in opposite pairs, for two Attackers.
        max_grad_norm: clip the gradient to this norm.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 5; Williams, 1992. Leave-one-out: Kool et al., 2019.
    """

    def __init__(
        self,
        generator: nn.Module,
        optimizer: Optimizer,
        updater: Updater,
        *,
        per: RewardPer = "round",
        baseline: Baseline = "moving",
        momentum: float = 0.9,
        scaled: bool = False,
        antithetic: bool = False,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        self.per = one_of("reward_per", per, get_args(RewardPer))
        self.kind = one_of("baseline", baseline, get_args(Baseline))
        self.momentum = probability_below_one("baseline_momentum", momentum)
        decisions = getattr(generator, "decisions", "unit")
        if baseline == "leave-one-out" and decisions == "batch":
            raise InputError("Baseline 'leave-one-out' needs decisions for each sample: use decisions 'unit' or 'key'.")
        if per == "sample" and getattr(generator, "shared_tables", None):
            raise InputError("Expected `reward_per` 'round' with shared embeddings, which change within a round.")
        if baseline == "leave-one-out" and per == "round":
            raise InputError("Expected `reward_per` 'sample' with baseline 'leave-one-out', got 'round'.")
        needed = ["sample"] + ["log_prob"] * (per == "sample") + ["sample_opposites", "opposite"] * antithetic
        if missing := [name for name in needed if not hasattr(generator, name)]:
            raise InputError(f"{type(generator).__name__} cannot be the Generator: it has no `{missing[0]}`.")
        self.antithetic = antithetic
        self.scaled = scaled
        self.optimizer = optimizer
        self.baseline = 0.0  # the first round sets it
        self.rounds = 0
        self._square, self._squares = 0.0, 0  # running mean of squared advantages, and how many are in it
        self._generator: Any = generator
        self._updater = updater
        self._own_updater = Updater(max_grad_norm)  # no accelerator: these gradients are not scaled, even in fp16
        self._gradients: list[list[Tensor | None]] = []  # one list per Attacker, summed over the round's steps
        self._draws: list[tuple[dict[str, Tensor], list[list[Tensor]]]] = []  # batches, and packed masks per Attacker
        self._drawn: Tensor | None = None  # the masks of the latest draw
        self.steps = 0  # of the current round

    @property
    def used_baseline(self) -> float | None:
        """The moving average of rewards, if that is the baseline."""
        return self.baseline if self.kind == "moving" else None

    def draw(self, batch: Batch) -> None:
        """Draw the masks of the Attackers' next forward passes."""
        self.steps += 1
        if self.per == "sample":
            with torch.no_grad(), self._updater.autocast():
                self._sample(batch)
            self._drawn = self._generator.keep
            masks = [self._generator.keep, *([self._generator.opposite_keep] if self.antithetic else [])]
            self._draws.append((dict(batch), [pack(mask) for mask in masks]))
            return
        with self._updater.autocast(), sparse_embeddings(self._generator):
            log_probs = self._sample(batch)
        self._drawn = getattr(self._generator, "keep", None)
        for attacker, log_prob in enumerate(log_probs):
            last = attacker + 1 == len(log_probs)
            self._accumulate(attacker, reinforce_loss(log_prob, 1.0, 0.0), keep_graph=not last)

    def check_drawn(self) -> None:
        """Check that the Attacker trained under the masks drawn for it.

        Raises:
            InputError: if another forward pass took them.
        """
        if getattr(self._generator, "keep", None) is not self._drawn:
            raise InputError(
                "Another forward pass took the Generator's masks before the Attacker's training step, so they cannot "
                "be rewarded: train without the provider that makes this pass."
            )

    def _sample(self, batch: Batch) -> list[Tensor]:
        return list(self._generator.sample_opposites(batch)) if self.antithetic else [self._generator.sample(batch)]

    def _accumulate(self, attacker: int, loss: Tensor, *, keep_graph: bool = False) -> None:
        parameters = list(self._generator.parameters())
        gradients = torch.autograd.grad(loss, parameters, retain_graph=keep_graph, allow_unused=True)
        if attacker == len(self._gradients):
            self._gradients.append([None] * len(parameters))
        self._gradients[attacker] = [
            _added(old, new) for old, new in zip(self._gradients[attacker], gradients, strict=True)
        ]

    def update(self, rewards: Sequence[Tensor]) -> None:
        """Update the Generator at the end of a round.

        Args:
            rewards: one for each Attacker: 0-d, or ``(n,)`` with one reward per sample. Rewards of other rows than the
                round's own are paired with its samples in their order, again from the first when they run out.
        """
        mean = sum(float(reward.mean()) for reward in rewards) / len(rewards)
        if not self.rounds:
            self.baseline = mean
        self.rounds += 1
        advantages = self._scaled([self._advantage(reward) for reward in rewards])
        if self.per == "sample":
            self._accumulate_samples(advantages)
        weights = [1.0] * len(rewards) if self.per == "sample" else [float(each) for each in advantages]
        for number, parameter in enumerate(self._generator.parameters()):
            parameter.grad = None
            for weight, gradients in zip(weights, self._gradients, strict=True):
                if (gradient := gradients[number]) is not None:
                    gradient.mul_(weight / (self.steps * len(rewards)))
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._updater.average_gradients(self._generator.parameters())
        self._own_updater.step(self._generator, self.optimizer)
        self.baseline += (1 - self.momentum) * (mean - self.baseline)

    def _advantage(self, reward: Tensor) -> Tensor:
        if self.kind == "leave-one-out":
            return reward - (reward.sum() - reward) / max(1, len(reward) - 1)
        return reward - self.baseline

    def _scaled(self, advantages: list[Tensor]) -> list[Tensor]:
        if not self.scaled:
            return advantages
        square = sum(float((each**2).mean()) for each in advantages) / len(advantages)
        if square or self._squares:  # before the first difference, there is no scale
            self._squares += 1
            self._square = self.momentum * self._square + (1 - self.momentum) * square
        deviation = math.sqrt(self._square / (1 - self.momentum**self._squares)) if self._squares else 0.0
        return [each / deviation if deviation else torch.zeros_like(each) for each in advantages]

    def _accumulate_samples(self, advantages: Sequence[Tensor]) -> None:
        sizes = self._updater.gathered([sum(rows_of(batch) for batch, _ in self._draws)])
        for attacker, each in enumerate(advantages):
            begin = sum(sizes[: self._updater.rank])  # the rewards of all processes follow each other
            for batch, masks in self._draws:
                with self._updater.autocast(), sparse_embeddings(self._generator):
                    log_prob = self._generator.log_prob(batch, unpack(masks[attacker]))
                log_prob = log_prob.view(rows_of(batch), -1).mean(1)  # the choices of a row share its reward
                rows = torch.arange(begin, begin + len(log_prob)) % len(each)
                self._accumulate(attacker, reinforce_loss(log_prob, each[rows].to(log_prob.device), 0.0))
                begin += len(log_prob)

    def forget(self) -> None:
        """Forget the current round."""
        self.steps, self._gradients, self._draws = 0, [], []

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed round needs."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "baseline": self.baseline,
            "rounds": self.rounds,
            "squares": [self._square, self._squares],
            "steps": self.steps,
            # Of an unfinished round, each process has its own.
            "gradients": self._updater.gathered([_moved(self._gradients, "cpu")]),
            "draws": self._updater.gathered([_moved(self._draws, "cpu")]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.baseline, self.steps = state["baseline"], state["steps"]
        self.rounds, (self._square, self._squares) = state["rounds"], state["squares"]
        device = next(self._generator.parameters()).device
        self._gradients = _moved(state["gradients"][self._updater.rank], device)
        self._draws = _moved(state["draws"][self._updater.rank], device)


@contextmanager
def sparse_embeddings(module: nn.Module) -> Iterator[None]:
    """Let the gradients of embedding tables hold only the rows that a forward pass within the block uses."""
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding) and not each.scale_grad_by_freq]
    before = [each.sparse for each in tables]
    try:
        for each in tables:
            each.sparse = True
        yield
    finally:
        for each, sparse in zip(tables, before, strict=True):
            each.sparse = sparse


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add a gradient to a sum, which is dense, in place: a table of embeddings is large, and a batch uses few rows."""
    if gradient is None:
        return total
    if total is None:
        return gradient.to_dense() if gradient.is_sparse else gradient
    return total.add_(gradient)


def _moved(value: Any, device: torch.device | str) -> Any:
    """Move the tensors in nested lists, tuples and dicts to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(each, device) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_moved(each, device) for each in value]
    return value
