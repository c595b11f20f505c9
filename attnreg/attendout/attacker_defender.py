"""AttendOut: a game between an Attacker, trained under a Generator's masks, and a Defender, trained without masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from attnreg.arguments import Count, Index, NotNegative, Probability, ProbabilityBelowOne, one_of, whole_number
from attnreg.attendout.copying import copy_learner
from attnreg.attendout.game_options import CreditName, check_options, generator_in
from attnreg.attendout.gradient_credit import GradientCredit
from attnreg.attendout.referee import Referee, RewardBatches
from attnreg.attendout.reinforce import Baseline, Reinforce
from attnreg.attendout.rewards import Reward, RewardName, RewardPer, Score, ScoreName, Winner, WinnerName
from attnreg.attribution.outputs import LossFunction
from attnreg.errors import InputError
from attnreg.regularizer.base import Regularizer
from attnreg.training.fine_tuning import FineTuning
from attnreg.training.method import Batch, StepResult, TrainingMethod, Updater
from attnreg.training.optim import generator_adam

Returned = Literal["attacker", "defender"]


class AttackerDefender(TrainingMethod):
    r"""AttendOut's game (Algorithm 1); what the paper leaves open is an option.

    The Defender and the Attacker start with the same weights and train on the same batches. The Generator's masks apply
    only to the Attacker. After each round of T steps, both networks are scored on reward data, and REINFORCE updates
    the Generator. Then a winner is chosen, and its weights and optimizer state replace the loser's.

    ``score``, ``reward`` and ``winner`` also take functions. ``score(model, batch)`` returns ``(B,)``; higher is
    better. :class:`attnreg.attendout.rewards.MetricScore` scores all rows by one metric. ``reward(gaps)`` takes the
    differences ``(n,)`` of the scores, one per reward row, and returns the 0-d reward, or ``(n,)`` with
    ``reward_per="sample"``. ``winner(attacker, defender)`` takes both scores ``(n,)`` and returns the 0-d probability
    that the Attacker wins. Read the trained network from ``model``: by default it is the Attacker, not the
    ``model`` you pass in.

    Three options lower the variance of REINFORCE, beside fewer ``decisions`` of the Generator: one reward per sample,
    ``reward_baseline="leave-one-out"`` over them, and ``antithetic`` masks, for which a second Attacker begins each
    round with the first one's weights and trains under the opposite masks. It never wins.

    Args:
        model: becomes the Defender; the Attacker is a copy.
        generator: provider that draws the masks; it is attached to the Attacker. In a composition such as
            ``GNetProvider(...) & DropHead(0.1)``, the G-Net is the Generator. ``None`` trains the Attacker without
            masks: a game of selection alone.
        optimizer_factory: makes the optimizer of a network; called once for each.
        reward_batches: labelled batches on which the networks are scored, or a function that returns those of a round,
            numbered from 0; ``None`` uses the training batches of the round.
        batches_per_round: number of reward batches that each round uses, in turn (default: all).
        reward_noise: share of tokens to replace by others of the same batch before scoring; only for the training
            batches of the round.
        special_tokens: token ids that noise leaves alone.
        steps_per_round: steps per round (T in the paper).
        warmup_steps: steps at the start in which only the Defender trains. Then the Attacker becomes a copy of it.
        game_steps: steps, with the warm-up, after which only the returned network trains. An Attacker keeps training
            under the Generator's masks; the Generator no longer learns. ``None`` plays until training ends.
        score: "loss" (negative loss; higher is better) or "accuracy".
        reward: "gap" (Attacker's mean score minus Defender's), "scaled" (the gap, whose difference to the baseline is
            divided by its running deviation), "sign" (of the gap) or "standardized" (gap over its standard error).
        reward_per: one reward per "round" or per "sample". Rewards of other rows than the round's own are paired with
            its samples in their order.
        winner: "evidence" (each network wins with the probability that it is better), "greedy" (the better score),
            "proportional" (drawn in proportion to the scores; needs "accuracy") or "none" (no network is copied).
        reward_baseline: what is subtracted from rewards: "moving" (a moving average, which the first round sets) or
            "leave-one-out" (mean of the other samples' rewards).
        baseline_momentum: momentum of the moving average, and of the running deviation of "scaled".
        antithetic: train a second Attacker under the opposite masks.
        credit: how the Generator learns: by "reinforce" (from rewards, as in the paper) or "gradient" (from how the
            Attacker's update would change the reward loss; see
            :class:`attnreg.attendout.gradient_credit.GradientCredit`).
        price: with credit "gradient", the weight of the drop rates' divergence from the initial ones.
        averaging: with credit "gradient", the decay of the moving average of the Generator's weights, with which it
            draws the masks (0: none).
        generator_optimizer_factory: makes the Generator's optimizer (default: Adam; see
            :func:`attnreg.training.generator_adam`).
        scheduler_factory: makes the learning-rate schedule of an optimizer; called once for each network.
        returns: network to keep after training, "attacker" or "defender".
        max_grad_norm: clip the gradients of each network to this norm; ``None`` does not clip.
        on_round: called after each round; the numbers that it returns are logged.
        accelerator: handles devices, precision and processes.
        loss_function: computes the training loss of both networks, as in :class:`FineTuning`, but not their scores.

    Raises:
        ValueError: if an argument is unknown or out of range, two do not fit together, or no step remains between
            ``warmup_steps`` and ``game_steps``.

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
        ...     steps_per_round=2,
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
        reward_batches: RewardBatches | None = None,
        batches_per_round: int | None = None,
        reward_noise: Probability = 0.0,
        special_tokens: Sequence[int] = (),
        steps_per_round: Count = 8,
        warmup_steps: Index = 0,
        game_steps: int | None = None,
        score: ScoreName | Score = "loss",
        reward: RewardName | Reward = "scaled",
        reward_per: RewardPer = "round",
        winner: WinnerName | Winner = "evidence",
        reward_baseline: Baseline = "moving",
        antithetic: bool = False,
        credit: CreditName = "reinforce",
        price: NotNegative = 0.03,
        averaging: ProbabilityBelowOne = 0.98,
        baseline_momentum: float = 0.9,
        generator_optimizer_factory: Callable[[nn.Module], Optimizer] | None = None,
        scheduler_factory: Callable[[Optimizer], LRScheduler] | None = None,
        returns: Returned = "attacker",
        max_grad_norm: float | None = 1.0,
        on_round: Callable[[], Mapping[str, float]] | None = None,
        accelerator: Accelerator | None = None,
        loss_function: LossFunction | None = None,
    ) -> None:
        self.steps_per_round = whole_number("steps_per_round", steps_per_round)
        self.warmup_steps = whole_number("warmup_steps", warmup_steps, least=0)
        whole_number("game_steps", warmup_steps if game_steps is None else game_steps, least=warmup_steps)
        if game_steps == warmup_steps:
            raise InputError(
                f"No step is left for the game between `warmup_steps` {warmup_steps} and `game_steps` {game_steps}, so "
                "the Generator would not learn. Lower `warmup_steps` or raise `game_steps`."
            )
        self.returns = one_of("returns", returns, get_args(Returned))
        check_options(
            generator,
            {
                "reward_per": reward_per,
                "reward_baseline": reward_baseline,
                "antithetic": antithetic,
                "credit": credit,
                "price": price,
                "averaging": averaging,
                "reward_batches": reward_batches,
            },
        )
        self._updater = Updater(max_grad_norm, accelerator)
        self._referee = Referee(
            self._updater,
            reward_batches,
            batches_per_round,
            reward_noise,
            special_tokens,
            score,
            reward,
            reward_per,
            winner,
        )
        self.accelerator = accelerator
        self.loss_function = loss_function
        self.provider = generator
        self.game_steps = game_steps
        self.on_round = on_round
        policy = None if generator is None else generator_in(generator)

        def learner(network: nn.Module, provider: Regularizer | None) -> FineTuning:
            optimizer = optimizer_factory(network)
            scheduler = None if scheduler_factory is None else scheduler_factory(optimizer)
            return FineTuning(
                network,
                optimizer,
                provider,
                scheduler=scheduler,
                max_grad_norm=max_grad_norm,
                accelerator=accelerator,
                loss_function=loss_function,
            )

        self.attacker = learner(copy.deepcopy(model), generator)
        self.twin = learner(copy.deepcopy(model), policy.opposite()) if antithetic and policy is not None else None
        self.defender = learner(model, None)
        self.generator: Any = policy
        self._teacher: Reinforce | GradientCredit | None = None
        if generator is not None and policy is not None:
            self._updater.share(generator)
            optimizer = (generator_optimizer_factory or generator_adam)(policy)
            if credit == "gradient":
                self._teacher = GradientCredit(
                    policy,
                    optimizer,
                    self._updater,
                    attacker=self.attacker.model,
                    reward_batch=self._referee.next_batch,
                    price=price,
                    averaging=averaging,
                    max_grad_norm=max_grad_norm,
                    loss_function=loss_function,
                )
            else:
                self._teacher = Reinforce(
                    policy,
                    optimizer,
                    self._updater,
                    per=reward_per,
                    baseline=reward_baseline,
                    momentum=baseline_momentum,
                    scaled=self._referee.rule.is_scaled,
                    antithetic=antithetic,
                    max_grad_norm=max_grad_norm,
                )
        self._moves = self.steps = 0
        #: Number of rounds that each network has won; with ``winner="none"``, the better one.
        self.wins = {"attacker": 0, "defender": 0}

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
        if self._alone:
            return {self.returns: self._returned.model}
        attacker = self.defender if self.steps < self.warmup_steps else self.attacker  # they are equal until then
        return {"defender": self.defender.model, "attacker": attacker.model}

    @property
    @override
    def learners(self) -> list[nn.Module]:
        return [learner.model for learner in (self.defender, *self._attackers)]

    @property
    def _attackers(self) -> list[FineTuning]:
        return [self.attacker] if self.twin is None else [self.attacker, self.twin]

    @property
    def _alone(self) -> bool:
        return self.game_steps is not None and self.steps > self.game_steps

    @property
    def _returned(self) -> FineTuning:
        return self.attacker if self.returns == "attacker" else self.defender

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
            loss = self._returned.step(batch).loss
            return StepResult(loss, {f"{self.returns}_loss": loss})
        defender = self.defender.step(batch)
        if self.steps <= self.warmup_steps:
            if self.steps == self.warmup_steps:
                self._copy_to_others(self.defender)
            return StepResult(defender.loss, {"defender_loss": defender.loss})
        if self._teacher is not None:
            self._begin(batch)
            self._teacher.draw(batch)
        attacker, *_ = [each.step(batch) for each in self._attackers]
        if self._teacher is not None:
            self._teacher.check_drawn()
        self._moves += 1
        self._referee.note(batch)
        logs: dict[str, Tensor | float] = {"defender_loss": defender.loss, "attacker_loss": attacker.loss}
        events: dict[str, str] = {}
        if self._moves == self.steps_per_round or self.steps == self.game_steps:
            events["winner"] = self._finish_round(logs)
        return StepResult(attacker.loss if self.returns == "attacker" else defender.loss, logs, events)

    def _begin(self, batch: Batch) -> None:
        """Let all processes begin the game with the same Generator, which its first batch changes."""
        if self._updater.processes > 1 and not getattr(self.generator, "calibrated", True):
            self.generator.calibrate(batch)
            self._updater.share(self.generator)

    def _finish_round(self, logs: dict[str, Tensor | float]) -> str:
        attackers = [each.model for each in self._attackers]
        verdict = self._referee.judge(self.defender.model, attackers)
        if self._teacher is not None:
            self._teacher.update(verdict.rewards)
            if (baseline := self._teacher.used_baseline) is not None:
                logs["baseline"] = baseline
        if self._referee.copies:
            self._copy_to_others(self.attacker if verdict.attacker_wins else self.defender)
        elif self.twin is not None:
            copy_learner(self.attacker, self.twin)
        self._forget_round()
        self.wins[verdict.winner] += 1
        logs.update(
            attacker_score=verdict.attacker,
            defender_score=verdict.defender,
            reward=float(verdict.rewards[0].mean()),
            attacker_chance=verdict.chance,
            **({} if self.on_round is None else self.on_round()),
        )
        return verdict.winner

    def _copy_to_others(self, source: FineTuning) -> None:
        for each in (self.defender, *self._attackers):
            if each is not source:
                copy_learner(source, each)

    def _forget_round(self) -> None:
        self._moves = 0
        self._referee.forget()
        if self._teacher is not None:
            self._teacher.forget()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "defender": self.defender.state_dict(),
            "attacker": self.attacker.state_dict(),  # the Generator is its provider
            "twin": None if self.twin is None else self.twin.state_dict(),
            "teacher": None if self._teacher is None else self._teacher.state_dict(),
            "referee": self._referee.state_dict(),
            "moves": self._moves,
            "steps": self.steps,
            "wins": dict(self.wins),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.defender.load_state_dict(state["defender"])
        self.attacker.load_state_dict(state["attacker"])
        if self.twin is not None:
            self.twin.load_state_dict(state["twin"])
        if self._teacher is not None:
            self._teacher.load_state_dict(state["teacher"])
        self._referee.load_state_dict(state["referee"], next(self.defender.model.parameters()).device)
        self._moves, self.steps, self.wins = state["moves"], state["steps"], dict(state["wins"])
