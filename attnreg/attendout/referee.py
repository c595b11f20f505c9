"""The referee of AttendOut's game: it scores the networks, and says what a round's rewards are and who wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnreg.arguments import probability, whole_number
from attnreg.attendout.noise import noisy_tokens
from attnreg.attendout.rewards import (
    SCORES,
    WINNERS,
    Reward,
    RewardName,
    RewardPer,
    RewardRule,
    Score,
    ScoreName,
    Winner,
    WinnerName,
    greedy,
)
from attnreg.errors import InputError
from attnreg.training.method import Batch, Updater

RewardBatches = Sequence[Batch] | Callable[[int], Sequence[Batch]]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a round.

    Args:
        attacker: mean score of the Attacker.
        defender: mean score of the Defender.
        rewards: one for each Attacker, 0-d or ``(n,)``.
        chance: probability with which the Attacker wins.
        attacker_wins: whether it won.
    """

    attacker: float
    defender: float
    rewards: list[Tensor]
    chance: float
    attacker_wins: bool

    @property
    def winner(self) -> str:
        """The winner's name."""
        return "attacker" if self.attacker_wins else "defender"


class Referee:
    """Score networks on reward data at the end of a round.

    The arguments are those of :class:`attnreg.training.AttackerDefender`, and ``updater`` its processes.

    Raises:
        InputError: if an argument is unknown or out of range, or two do not fit together.
    """

    def __init__(
        self,
        updater: Updater,
        reward_batches: RewardBatches | None,
        batches_per_round: int | None,
        reward_noise: float,
        special_tokens: Sequence[int],
        score: ScoreName | Score,
        reward: RewardName | Reward,
        reward_per: RewardPer,
        winner: WinnerName | Winner,
    ) -> None:
        if reward_batches is not None and not callable(reward_batches) and not len(reward_batches):
            raise InputError("Expected at least one batch in `reward_batches`, got none.")
        whole_number("batches_per_round", 1 if batches_per_round is None else batches_per_round)
        if probability("reward_noise", reward_noise) and reward_batches is not None:
            raise InputError("Expected `reward_batches` None with `reward_noise`, got batches.")
        if winner == "proportional" and score == "loss":
            raise InputError("Expected score 'accuracy' with winner 'proportional', got 'loss', which is negative.")
        self.score: Score = _resolve("score", score, SCORES)
        if hasattr(self.score, "over") and reward_per == "sample":
            raise InputError("Expected `reward_per` 'round' with a metric as score, got 'sample'.")
        self.rule = RewardRule(reward, reward_per)
        self.copies = winner != "none"
        self.winner: Winner = _resolve("winner", winner, {**WINNERS, "none": greedy})
        self.batches_per_round = batches_per_round
        self._rows = reward_batches
        self._noise, self._special_tokens = reward_noise, list(special_tokens)
        self._updater = updater
        self._played: list[Batch] = []  # the round's own batches, if it is scored on them
        self.number = 0  # of the round
        self._drawn: tuple[int, Sequence[Batch]] | None = None  # a round's number and reward batches

    def note(self, batch: Batch) -> None:
        """Take note of a training batch."""
        if self._rows is None:
            self._played.append(batch)

    def forget(self) -> None:
        """Forget the current round."""
        self._played = []

    def judge(self, defender: nn.Module, attackers: Sequence[nn.Module]) -> Verdict:
        """Score the networks in eval mode and draw the winner.

        Args:
            defender: the Defender.
            attackers: the Attacker and, with antithetic masks, its twin, which never wins.
        """
        per_batch = [[self._scores(each, batch) for each in (defender, *attackers)] for batch in self._batches()]
        self.number += 1
        d, *a = (torch.cat(scores) for scores in zip(*self._updater.gathered(per_batch), strict=True))
        if (over := getattr(self.score, "over", None)) is not None:
            d, *a = (over(scores) for scores in (d, *a))
        chance = float(self.winner(a[0], d))
        wins = self._updater.gathered([float(torch.rand(()))])[0] < chance
        return Verdict(float(a[0].mean()), float(d.mean()), [self.rule(each - d) for each in a], chance, wins)

    @torch.no_grad()
    def _scores(self, network: nn.Module, batch: Batch) -> Tensor:
        network.eval()
        scores = self.score(network, batch).float().cpu()
        network.train()
        return scores

    def _batches(self) -> list[Batch]:
        if self._rows is None:
            noise = self._noise
            return [noisy_tokens(batch, noise, self._special_tokens) if noise else batch for batch in self._played]
        batches = self._of_round()
        size = min(self.batches_per_round or len(batches), len(batches))
        first = 0 if callable(self._rows) else self.number * size
        mine = range(self._updater.rank, size, self._updater.processes)
        return [batches[(first + i) % len(batches)] for i in mine]

    def _of_round(self) -> Sequence[Batch]:
        assert self._rows is not None
        if not callable(self._rows):
            return self._rows
        if self._drawn is None or self._drawn[0] != self.number:
            self._drawn = self.number, self._rows(self.number)
        return self._drawn[1]

    def next_batch(self, number: int) -> Batch:
        """Return one of the round's reward batches, another one for each number and process."""
        batches = self._of_round()
        return batches[(number * self._updater.processes + self._updater.rank) % len(batches)]

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume."""
        played = self._updater.gathered([[dict(batch) for batch in self._played]])  # each process has its own
        return {"played": played, "number": self.number}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.number, mine = state["number"], state["played"][self._updater.rank]
        self._played = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in mine]


def _resolve(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if callable(value):
        return value
    if value not in known:
        raise InputError(f"Expected `{name}` to be a function or one of {', '.join(known)}, got {value!r}.")
    return known[value]
