"""AttendOut: a game between an Attacker, trained under a Generator's masks, and a Defender, trained without masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from attnreg.arguments import Count, Index, one_of, probability_below_one, whole_number
from attnreg.errors import InputError
from attnreg.provider.base import MaskProvider
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import Batch, StepResult, TrainingMethod, Updater
from attnreg.training.rewards import (
    REWARDS,
    SCORES,
    WINNERS,
    Reward,
    RewardName,
    Score,
    ScoreName,
    Winner,
    WinnerName,
    reinforce_loss,
)

Returned = Literal["attacker", "defender"]


class Generator(Protocol):
    """A provider that knows the probability of the masks it draws, such as :class:`attnreg.GNetProvider`."""

    def sample(self, inputs: Batch) -> Tensor:
        """Draw the masks of the next forward pass and return their log-probability, ``(B,)``, differentiable."""


class AttackerDefender(TrainingMethod):
    r"""AttendOut's game (Algorithm 1); what the paper leaves open is an option.

    The Defender and the Attacker start with the same weights and train on the same batches. The Generator's masks apply
    only to the Attacker. After each round of T steps, both networks are scored on reward data, and REINFORCE updates
    the Generator. Then a winner is chosen, and its weights and optimizer state replace the loser's.

    ``score``, ``reward`` and ``winner`` also take functions. ``score(model, batch)`` returns ``(B,)``; higher is
    better. ``reward(gaps)`` takes the differences ``(n,)`` of the scores, one per reward row, and returns the 0-d
    reward. ``winner(attacker, defender)`` takes both scores ``(n,)`` and returns the 0-d probability that the Attacker
    wins. Read the trained network from :attr:`model`: by default it is the Attacker, not the ``model`` you pass in.

    Args:
        model: becomes the Defender; the Attacker is a copy.
        generator: provider that draws the masks; it is attached to the Attacker.
        optimizer_factory: makes the optimizer of a network; called once for each.
        reward_batches: labelled batches on which the networks are scored; ``None`` uses the training batches of the
            round.
        batches_per_round: number of reward batches that each round uses, in turn (default: all).
        steps_per_round: steps per round (T in the paper).
        warmup_steps: steps at the start in which only the Defender trains. Then the Attacker becomes a copy of it.
        game_steps: steps, with the warm-up, after which only the returned network trains. An Attacker keeps training
            under the Generator's masks; the Generator no longer learns. ``None`` plays until training ends.
        score: "loss" (negative loss; higher is better) or "accuracy".
        reward: "gap" (Attacker's mean score minus Defender's), "sign" (of the gap) or "standardized" (gap over its
            standard error).
        winner: "evidence" (each network wins with the probability that it is better), "greedy" (the better score) or
            "proportional" (drawn in proportion to the scores; needs "accuracy").
        baseline_momentum: momentum of the reward baseline, a moving average that starts at 0.
        generator_optimizer_factory: makes the Generator's optimizer (default: Adam with learning rate 5e-5).
        scheduler_factory: makes the learning-rate schedule of an optimizer; called once for each network.
        returns: network to keep after training, "attacker" or "defender".
        max_grad_norm: clip the gradients of each network to this norm; ``None`` does not clip.
        accelerator: handles devices, precision and processes.

    Raises:
        ValueError: if an argument is unknown or out of range, the winner is "proportional" with the score "loss", or no
            round fits between ``warmup_steps`` and ``game_steps``.

    Reference:
        AttendOut (arXiv 2104.04692), Algorithm 1 and Eq. 5.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from attnreg import GNetProvider
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> game = AttackerDefender(
        ...     model,
        ...     GNetProvider.for_model(model),
        ...     lambda network: torch.optim.AdamW(network.parameters(), lr=1e-3),
        ...     steps_per_round=2,
        ... )
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}
        >>> [sorted(game.step(batch).events) for _ in range(2)]
        [[], ['winner']]
    """

    def __init__(
        self,
        model: nn.Module,
        generator: MaskProvider,
        optimizer_factory: Callable[[nn.Module], Optimizer],
        *,
        reward_batches: Sequence[Batch] | None = None,
        batches_per_round: int | None = None,
        steps_per_round: Count = 8,
        warmup_steps: Index = 0,
        game_steps: int | None = None,
        score: ScoreName | Score = "loss",
        reward: RewardName | Reward = "standardized",
        winner: WinnerName | Winner = "evidence",
        baseline_momentum: float = 0.9,
        generator_optimizer_factory: Callable[[nn.Module], Optimizer] | None = None,
        scheduler_factory: Callable[[Optimizer], LRScheduler] | None = None,
        returns: Returned = "attacker",
        max_grad_norm: float | None = 1.0,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.steps_per_round = whole_number("steps_per_round", steps_per_round)
        self.warmup_steps = whole_number("warmup_steps", warmup_steps, least=0)
        whole_number("batches_per_round", 1 if batches_per_round is None else batches_per_round)
        whole_number("game_steps", warmup_steps if game_steps is None else game_steps, least=warmup_steps)
        if game_steps is not None and game_steps - warmup_steps < steps_per_round:
            raise InputError(
                f"No round of {steps_per_round} steps fits between `warmup_steps` {warmup_steps} and `game_steps` "
                f"{game_steps}, so the Generator would not learn. Lower `steps_per_round` or raise `game_steps`."
            )
        self.baseline_momentum = probability_below_one("baseline_momentum", baseline_momentum)
        self.returns = one_of("returns", returns, get_args(Returned))
        if reward_batches is not None and not len(reward_batches):
            raise InputError("Expected at least one batch in `reward_batches`, got none.")
        if winner == "proportional" and score == "loss":
            raise InputError("Expected score 'accuracy' with winner 'proportional', got 'loss', which is negative.")
        self._score: Score = _resolve("score", score, SCORES)
        self._reward: Reward = _resolve("reward", reward, REWARDS)
        self._winner: Winner = _resolve("winner", winner, WINNERS)
        self.reward_batches = reward_batches
        self.batches_per_round = batches_per_round
        self.game_steps = game_steps

        def learner(network: nn.Module, provider: MaskProvider | None) -> FineTuning:
            optimizer = optimizer_factory(network)
            scheduler = None if scheduler_factory is None else scheduler_factory(optimizer)
            return FineTuning(
                network, optimizer, provider, scheduler=scheduler, max_grad_norm=max_grad_norm, accelerator=accelerator
            )

        self.attacker = learner(copy.deepcopy(model), generator)
        self.defender = learner(model, None)
        self._policy: Any = generator
        self._updater = Updater(max_grad_norm, accelerator)
        self._generator_updater = Updater(max_grad_norm)  # no accelerator: these gradients are not scaled, even in fp16
        make = generator_optimizer_factory or (lambda network: torch.optim.Adam(network.parameters(), lr=5e-5))
        self.generator: nn.Module = generator
        self._updater.share(generator)
        self._generator_optimizer = make(generator)
        self._batches: list[Batch] = []  # of the current round, if it is scored on its own batches
        self._moves = self.steps = self.rounds = 0
        self.baseline = 0.0

    @property
    @override
    def model(self) -> nn.Module:
        return self.networks[self.returns]

    @property
    @override
    def networks(self) -> dict[str, nn.Module]:
        if self._alone:
            return {self.returns: self._returned.model}
        attacker = self.defender if self.steps < self.warmup_steps else self.attacker  # they are equal until then
        return {"defender": self.defender.model, "attacker": attacker.model}

    @property
    @override
    def learners(self) -> list[nn.Module]:
        return [self.defender.model, self.attacker.model]

    @property
    def _alone(self) -> bool:
        return self.game_steps is not None and self.steps > self.game_steps

    @property
    def _returned(self) -> FineTuning:
        return self.attacker if self.returns == "attacker" else self.defender

    @property
    @override
    def provider(self) -> MaskProvider | None:
        return self.attacker.provider

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._updater.accelerator

    @override
    def on_epoch(self, epoch: int) -> None:
        self.attacker.on_epoch(epoch)

    @override
    def drop_rates(self, *, by_head: bool = False) -> dict[str, Tensor]:
        return {} if self._alone and self.returns == "defender" else self.attacker.drop_rates(by_head=by_head)

    @override
    def step(self, batch: Batch) -> StepResult:
        self.steps += 1
        if self._alone:
            self._forget_round()  # the end of the game may have cut one short
            loss = self._returned.step(batch).loss
            return StepResult(loss, {f"{self.returns}_loss": loss})
        defender = self.defender.step(batch)
        if self.steps <= self.warmup_steps:
            if self.steps == self.warmup_steps:
                _copy_learner(self.defender, self.attacker)
            return StepResult(defender.loss, {"defender_loss": defender.loss})
        # The Generator does not change within a round, so REINFORCE's gradient is a sum over steps times the reward. It
        # is accumulated while the masks are drawn and scaled when the reward is known, so memory does not grow with T.
        # Embeddings shared with the Attacker do change within a round: each draw's gradient is that of its time.
        with self._updater.autocast():
            log_prob = self._policy.sample(batch)
        (reinforce_loss(log_prob, 1.0, 0.0) / self.steps_per_round).backward()
        attacker = self.attacker.step(batch)
        self._moves += 1
        if self.reward_batches is None:
            self._batches.append(batch)
        logs: dict[str, Tensor | float] = {"defender_loss": defender.loss, "attacker_loss": attacker.loss}
        events: dict[str, str] = {}
        if self._moves == self.steps_per_round:
            events["winner"] = self._finish_round(logs)
        return StepResult(attacker.loss if self.returns == "attacker" else defender.loss, logs, events)

    def _finish_round(self, logs: dict[str, Tensor | float]) -> str:
        per_batch = [self._score_both(batch) for batch in self._scored_batches()]
        attacker, defender = (torch.cat(scores) for scores in zip(*self._updater.gathered(per_batch), strict=True))
        reward = self._reward(attacker - defender)
        self._update_generator(float(reward) - self.baseline)
        self.baseline += (1 - self.baseline_momentum) * (float(reward) - self.baseline)
        chance = float(self._winner(attacker, defender))
        attacker_wins = self._updater.gathered([float(torch.rand(()))])[0] < chance
        winner, loser = (self.attacker, self.defender) if attacker_wins else (self.defender, self.attacker)
        _copy_learner(winner, loser)
        self._forget_round()
        self.rounds += 1
        logs.update(
            attacker_score=float(attacker.mean()),
            defender_score=float(defender.mean()),
            reward=float(reward),
            baseline=self.baseline,
            attacker_chance=chance,
        )
        return "attacker" if attacker_wins else "defender"

    def _scored_batches(self) -> list[Batch]:
        if self.reward_batches is None:
            return self._batches
        total = len(self.reward_batches)
        size = min(self.batches_per_round or total, total)
        mine = range(self._updater.rank, size, self._updater.processes)
        return [self.reward_batches[(self.rounds * size + i) % total] for i in mine]

    @torch.no_grad()
    def _score_both(self, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = []
        for network in (self.attacker.model, self.defender.model):
            network.eval()
            scores.append(self._score(network, batch).float().cpu())
            network.train()
        return scores[0], scores[1]

    def _update_generator(self, advantage: float) -> None:
        for parameter in self.generator.parameters():
            if parameter.grad is not None:
                parameter.grad *= advantage
        self._updater.average_gradients(self.generator.parameters())
        self._generator_updater.step(self.generator, self._generator_optimizer)

    def _forget_round(self) -> None:
        self._batches, self._moves = [], 0
        self.generator.zero_grad(set_to_none=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        self._updater.average_gradients(self.generator.parameters())  # of an unfinished round: processes must agree
        return {
            "defender": self.defender.state_dict(),
            "attacker": self.attacker.state_dict(),  # the Generator is its provider
            "generator_optimizer": self._generator_optimizer.state_dict(),
            "generator_gradients": [parameter.grad for parameter in self.generator.parameters()],
            "batches": self._updater.gathered([[dict(batch) for batch in self._batches]]),  # each process has its own
            "moves": self._moves,
            "steps": self.steps,
            "rounds": self.rounds,
            "baseline": self.baseline,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.defender.load_state_dict(state["defender"])
        self.attacker.load_state_dict(state["attacker"])
        self._generator_optimizer.load_state_dict(state["generator_optimizer"])
        device = next(self.generator.parameters()).device
        for parameter, gradient in zip(self.generator.parameters(), state["generator_gradients"], strict=True):
            parameter.grad = None if gradient is None else gradient.to(device)
        batches = state["batches"][self._updater.rank]
        self._batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        self._moves = state["moves"]
        self.steps, self.rounds, self.baseline = state["steps"], state["rounds"], state["baseline"]


def _resolve(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if callable(value):
        return value
    if value not in known:
        raise InputError(f"Expected `{name}` to be a function or one of {', '.join(known)}, got {value!r}.")
    return known[value]


def _copy_learner(source: FineTuning, target: FineTuning) -> None:
    """Copy weights, optimizer state and schedule in place, so that the two share no tensor and no memory is added."""
    with torch.no_grad():
        for theirs, ours in zip(source.model.state_dict().values(), target.model.state_dict().values(), strict=True):
            ours.copy_(theirs)
        for theirs, ours in zip(_parameters(source), _parameters(target), strict=True):
            for name, value in source.optimizer.state[theirs].items():
                held = target.optimizer.state[ours].get(name)
                if isinstance(value, Tensor) and isinstance(held, Tensor):
                    held.copy_(value)
                else:
                    target.optimizer.state[ours][name] = copy.deepcopy(value)
    for their_group, our_group in zip(source.optimizer.param_groups, target.optimizer.param_groups, strict=True):
        our_group.update({name: value for name, value in their_group.items() if name != "params"})
    if source.scheduler is not None and target.scheduler is not None:
        target.scheduler.load_state_dict(source.scheduler.state_dict())


def _parameters(learner: FineTuning) -> list[Tensor]:
    return [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
