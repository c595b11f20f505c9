"""AttendOut: a game between an Attacker, trained under a Generator's masks, and a Defender, trained without masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from attnreg.arguments import Count, Index, a_function, one_of, whole_number
from attnreg.attendout.credit import Reinforce, Teacher
from attnreg.attendout.gnet import GNetProvider
from attnreg.attendout.rewards import Referee, Rewards, Score, ScoreName, Winner, WinnerName
from attnreg.errors import InputError
from attnreg.outputs import LossFunction
from attnreg.regularizer.base import Compose, Regularizer
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import Batch, StepResult, TrainingMethod, Updater, add_learned

Returned = Literal["attacker", "defender"]


@dataclass(frozen=True)
class Rounds:
    """The course of a game: how long a round is, who wins it, and in which steps it is played.

    Args:
        steps: steps per round (T in the paper).
        winner: "evidence" (a network wins with the probability that it is better), "greedy" (the better score wins),
            "proportional" (drawn in proportion to the scores, of any sign), "none" (no network is copied) or a function
            of both networks' scores, ``(n,)``, that returns the 0-d probability that the Attacker wins.
        warmup_steps: steps at the start in which only the Defender trains. Then the Attacker becomes a copy of it.
        game_steps: steps, with the warm-up, after which only the returned network trains. An Attacker keeps training
            under the Generator's masks; the Generator no longer learns. ``None`` plays until training ends.

    Raises:
        InputError: if a number is out of range, or no step remains between ``warmup_steps`` and ``game_steps``.

    Example:
        >>> Rounds(steps=4, warmup_steps=100).winner
        'evidence'
    """

    steps: Count = 8
    winner: WinnerName | Winner = "evidence"
    warmup_steps: Index = 0
    game_steps: int | None = None

    def __post_init__(self) -> None:
        whole_number("steps", self.steps)
        warmup, end = whole_number("warmup_steps", self.warmup_steps, least=0), self.game_steps
        if end is not None and whole_number("game_steps", end, least=warmup) == warmup:
            raise InputError(
                f"No step is left for the game between `warmup_steps` {warmup} and `game_steps` {end}, so the "
                "Generator would not learn. Lower `warmup_steps` or raise `game_steps`."
            )


class AttackerDefender(TrainingMethod):
    r"""AttendOut's game (Algorithm 1), by default in this project's variant; ``paper`` makes the paper's.

    The Defender and the Attacker start with the same weights and train on the same batches. The Generator's masks apply
    only to the Attacker. After a round of T steps, both networks are scored on reward data, and the Generator learns
    from the difference. Then a winner is chosen, and its weights and optimizer state replace the loser's. Read the
    trained network from ``model``: by default it is the Attacker, not the ``model`` you pass in.

    Args:
        model: becomes the Defender; the Attacker is a copy.
        generator: provider that draws the masks; it is attached to the Attacker. In a composition such as
            ``GNetProvider(...) & AdversarialAttention(...)``, the other providers act on the Attacker, and its loss
            trains their parameters. ``None``: no masks, a game of selection alone. Another Generator needs the
            ``sample`` of :class:`attnreg.GNetProvider`, and ``log_prob`` and ``keep`` for rewards per sample or step.
        optimizer_factory: makes the optimizer of a network; called once per network.
        provider_lr: learning rate of the other providers' parameters in a composition (default: the optimizer's).
        credit: how the Generator learns.
        rewards: the rows that both networks are scored on, and the score.
        rounds: how long a round and the game are, and who wins a round.
        returns: network to keep after training, "attacker" or "defender".
        scheduler_factory: makes the learning-rate schedule of an optimizer; called once per network.
        max_grad_norm: clip the gradients of a network to this norm; ``None`` does not clip.
        on_round: called after every round; its numbers are logged.
        accelerator: handles devices, precision and processes.
        loss_function: computes the training loss of both networks, as in :class:`FineTuning`, but not their scores.

    Raises:
        InputError: if an argument is unknown or out of range, or two arguments are at odds.

    Reference:
        AttendOut (arXiv 2104.04692), Algorithm 1 and Eq. 5.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from attnreg import GNetProvider
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> game = AttackerDefender(
        ...     model,
        ...     GNetProvider.for_model(model),
        ...     lambda network: torch.optim.AdamW(network.parameters(), lr=1e-3),
        ...     credit=Reinforce(per="sample"),
        ...     rounds=Rounds(steps=2),
        ... )
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}
        >>> [sorted(game.step(batch).events) for _ in range(2)]
        [[], ['winner']]
    """

    def __init__(
        self,
        model: nn.Module,
        generator: Regularizer | None,
        optimizer_factory: Callable[[nn.Module], Optimizer],
        *,
        credit: Reinforce | None = None,
        rewards: Rewards | None = None,
        rounds: Rounds | None = None,
        returns: Returned = "attacker",
        scheduler_factory: Callable[[Optimizer], LRScheduler] | None = None,
        provider_lr: float | None = None,
        max_grad_norm: float | None = 1.0,
        on_round: Callable[[], Mapping[str, float]] | None = None,
        accelerator: Accelerator | None = None,
        loss_function: LossFunction | None = None,
    ) -> None:
        a_function("optimizer_factory", optimizer_factory, "a network, such as `lambda network: adamw(network, 1e-3)`")
        self.course = rounds or Rounds()
        self.returns = one_of("returns", returns, get_args(Returned))
        if generator is None and credit is not None:
            raise InputError("`credit` has no effect without a Generator: leave it out.")
        credit, rewards = credit or Reinforce(), rewards or Rewards()
        if generator is not None:
            credit.check(generator, rewards)
        self._updater = Updater(max_grad_norm, accelerator)
        self._referee = Referee(self._updater, rewards, self.course.winner)
        self.accelerator = accelerator
        self.max_grad_norm = max_grad_norm
        self.loss_function = loss_function
        self.provider = generator
        self.on_round = on_round
        self.generator = generator_in(generator)

        def learner(network: nn.Module, provider: Regularizer | None) -> FineTuning:
            optimizer = optimizer_factory(network)
            if generator is not None:  # in both, so that groups and schedules match; the Defender has no gradients
                add_learned(optimizer, generator, provider_lr)
            scheduler = None if scheduler_factory is None else scheduler_factory(optimizer)
            shared: Any = {"max_grad_norm": max_grad_norm, "accelerator": accelerator, "loss_function": loss_function}
            return FineTuning(network, optimizer, provider, scheduler=scheduler, **shared)

        self.attacker = learner(copy.deepcopy(model), generator)
        self.defender = learner(model, None)
        self._teacher: Teacher | None = None
        if generator is not None:
            self._updater.share(generator)
            self._teacher = Teacher(credit, self.generator, self._updater, max_grad_norm)
        self._parts: dict[str, Any] = {"defender": self.defender, "attacker": self.attacker}
        self._parts |= {} if self._teacher is None else {"teacher": self._teacher}
        self._round_steps = self.steps = 0  # steps of the round, of training
        #: Number of rounds that a network has won; with winner ``"none"``, in which it was better.
        self.wins = {"attacker": 0, "defender": 0}

    @classmethod
    def paper(
        cls,
        model: nn.Module,
        batches: Callable[[int], Sequence[Batch]],
        optimizer_factory: Callable[[nn.Module], Optimizer],
        *,
        steps: Count = 8,
        score: ScoreName | Score = "loss",
        generator_optimizer_factory: Callable[[nn.Module], Optimizer] | None = None,
        **options: Any,
    ) -> AttackerDefender:
        """Make the game as the paper states it, from the first step of training to the last.

        The keep logits are the G-Net's attention scores and nothing else, with one mask per layer for all heads. The
        gap on the t-th of T rows rewards the t-th step of a round, less a moving average. The winner is drawn in
        proportion to the scores. The pairing of rows with steps and the formula of the proportion are our reading.

        Args:
            model: as in the class.
            batches: returns the reward rows of a round, numbered from 0, in batches: T rows, drawn at random from the
                development set per round, which biases scores on it.
            optimizer_factory: as in the class.
            steps: T; the paper's main text does not state it, nor the next two.
            score: as in :class:`Rewards`.
            generator_optimizer_factory: makes the Generator's optimizer (default: as in :class:`Reinforce`).
            options: further arguments of the class, such as ``returns`` or ``accelerator``.
        """
        return cls(
            model,
            GNetProvider.for_model(model, initial_keep=None),
            optimizer_factory,
            credit=Reinforce(reward="gap", per="step", optimizer_factory=generator_optimizer_factory),
            rewards=Rewards(a_function("batches", batches, "the number of a round"), score),
            rounds=Rounds(steps, "proportional"),
            **options,
        )

    @property
    def rounds(self) -> int:
        """Number of rounds played so far."""
        return sum(self.wins.values())

    @property
    @override
    def model(self) -> nn.Module:
        return self.networks[self.returns]

    @property
    @override
    def networks(self) -> dict[str, nn.Module]:
        if self._is_over:
            return {self.returns: self._parts[self.returns].model}
        # The networks are equal until the warm-up ends.
        attacker = self.defender if self.steps < self.course.warmup_steps else self.attacker
        return {"defender": self.defender.model, "attacker": attacker.model}

    @property
    @override
    def returned_name(self) -> str:
        return self.returns

    @property
    @override
    def learners(self) -> list[nn.Module]:
        return [self.defender.model, self.attacker.model]

    @property
    def _is_over(self) -> bool:
        return self.course.game_steps is not None and self.steps > self.course.game_steps

    @override
    def on_epoch(self, epoch: int) -> None:
        self.attacker.on_epoch(epoch)

    @override
    def drop_rates(self) -> dict[str, Tensor]:
        return {} if self._is_over and self.returns == "defender" else self.attacker.drop_rates()

    @override
    def step(self, batch: Batch) -> StepResult:
        self.steps += 1
        if self._is_over:
            loss = self._parts[self.returns].step(batch).loss
            return StepResult(loss, {f"{self.returns}_loss": loss})
        defender = self.defender.step(batch)
        if self.steps <= self.course.warmup_steps:
            if self.provider is not None:
                self.provider.step()  # schedules follow all of training
            if self.steps == self.course.warmup_steps:
                copy_learner(self.defender, self.attacker)
            return StepResult(defender.loss, {"defender_loss": defender.loss})
        if self._updater.processes > 1 and not getattr(self.generator, "calibrated", True):
            self.generator.calibrate(batch)
            self._updater.share(self.generator)  # all processes begin the game with the same Generator
        if self._teacher is not None:
            self._teacher.draw(batch)
        attacker = self.attacker.step(batch)
        if self._teacher is not None:
            self._teacher.check_drawn()
        self._round_steps += 1
        self._referee.record(batch)
        logs: dict[str, Tensor | float] = {"defender_loss": defender.loss, "attacker_loss": attacker.loss}
        ends = self._round_steps == self.course.steps or self.steps == self.course.game_steps
        events = {"winner": self._finish_round(logs)} if ends else {}
        return StepResult(attacker.loss if self.returns == "attacker" else defender.loss, logs, events)

    def _finish_round(self, logs: dict[str, Tensor | float]) -> str:
        verdict = self._referee.judge(self.defender.model, self.attacker.model)
        winner = "attacker" if verdict.attacker_wins else "defender"
        reward = float(verdict.gaps.mean()) if self._teacher is None else self._teacher.update(verdict.gaps)
        if self._teacher is not None and self._teacher.credit.baseline == "moving":
            logs["baseline"] = self._teacher.baseline
        if self._referee.copies:
            copy_learner(self._parts[winner], self.defender if verdict.attacker_wins else self.attacker)
        self._round_steps = 0
        self.wins[winner] += 1
        logs.update(
            attacker_score=verdict.attacker,
            defender_score=verdict.defender,
            reward=reward,
            attacker_chance=verdict.chance,
            **({} if self.on_round is None else self.on_round()),
        )
        return winner

    @override
    def state_dict(self) -> dict[str, Any]:
        counts = {"moves": self._round_steps, "steps": self.steps, "wins": dict(self.wins)}
        parts = {name: part.state_dict() for name, part in self._parts.items()}  # the Generator is in the Attacker's
        return {**parts, "referee": self._referee.state_dict(), **counts}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._referee.load_state_dict(state["referee"], next(self.defender.model.parameters()).device)
        self._round_steps, self.steps, self.wins = state["moves"], state["steps"], dict(state["wins"])


def generator_in(provider: Regularizer | None) -> Any:
    """Return the Generator: the provider itself, or the Generator in a composition ``a & b``."""
    if provider is None:
        return None
    parts = provider.inner() if isinstance(provider, Compose) else [provider]
    generators = [part for part in parts if hasattr(part, "sample")]
    if len(generators) != 1:
        count = f"{len(generators)} in {type(provider).__name__}"
        raise InputError(f"Expected one Generator, such as a GNetProvider, alone or in a composition, got {count}.")
    return generators[0]


def copy_learner(source: FineTuning, target: FineTuning) -> None:
    """Copy weights, optimizer state and schedule, so that the two share no tensor."""
    target.model.load_state_dict(source.model.state_dict())
    held = {parameter for group in source.optimizer.param_groups for parameter in group["params"]}
    # A provider's parameters are in both optimizers; the target keeps the state that it has of them.
    provider_state = {parameter: state for parameter, state in target.optimizer.state.items() if parameter in held}
    target.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    for parameter in held:
        target.optimizer.state.pop(parameter, None)
    target.optimizer.state.update(provider_state)
    if source.scheduler is not None and target.scheduler is not None:
        target.scheduler.load_state_dict(source.scheduler.state_dict())
