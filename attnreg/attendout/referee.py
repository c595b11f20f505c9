"""The referee of AttendOut's game: it scores both networks after a round, and draws the winner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from attnreg.arguments import Probability, probability, whole_number
from attnreg.attendout.rewards import SCORES, WINNERS, Score, ScoreName, Winner, WinnerName
from attnreg.errors import InputError
from attnreg.training.method import Batch, Updater

RewardBatches = Sequence[Batch] | Callable[[int], Sequence[Batch]]


@dataclass(frozen=True, eq=False)
class Rewards:
    """The rows that both networks are scored on after each round, and the score. Their gaps are the rewards.

    Args:
        batches: labelled batches, or a function that returns those of a round, numbered from 0; ``None`` uses the
            training batches of the round.
        score: ``"loss"`` (negative loss; higher is better), ``"accuracy"``, or a function of a model and a batch that
            returns ``(B,)``; higher is better. :class:`attnreg.training.MetricScore` scores all rows by one metric.
        batches_per_round: number of batches that each round uses, in turn (default: all).
        noise: share of tokens to replace by others of the same batch before scoring; only for the training batches
            of the round.
        special_tokens: token ids that noise leaves alone.

    Raises:
        InputError: if an argument is unknown or out of range, or two do not fit together.

    Example:
        >>> Rewards(noise=0.15, special_tokens=[101, 102]).score
        'loss'
    """

    batches: RewardBatches | None = None
    score: ScoreName | Score = "loss"
    batches_per_round: int | None = None
    noise: Probability = 0.0
    special_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        empty = self.batches is not None and not callable(self.batches) and not len(self.batches)
        if empty or isinstance(self.batches, Mapping):
            raise InputError("Expected `batches` of `rewards` to be a list of at least one batch.")
        whole_number("batches_per_round", 1 if self.batches_per_round is None else self.batches_per_round)
        if probability("noise", self.noise) and self.batches is not None:
            raise InputError("Expected `batches` None with `noise`, got batches.")
        _resolve("score", self.score, SCORES)


class Verdict(NamedTuple):
    """The outcome of a round.

    Mean scores of Attacker and Defender; for each Attacker, its scores minus the Defender's, ``(n,)``; the probability
    that the Attacker wins; and whether it won.
    """

    attacker: float
    defender: float
    gaps: list[Tensor]
    chance: float
    attacker_wins: bool


class Referee:
    """Scores networks on reward data at the end of a round."""

    def __init__(self, updater: Updater, rewards: Rewards, winner: WinnerName | Winner) -> None:
        self.rewards = rewards
        self.score: Score = _resolve("score", rewards.score, SCORES)
        self.copies = winner != "none"
        self.winner: Winner = _resolve("winner", winner, WINNERS)
        self._updater = updater
        self._played: list[Batch] = []  # the round's own batches, if it is scored on them
        self.number = 0  # of the round
        self._drawn: tuple[int, Sequence[Batch]] | None = None  # a round's number and reward batches

    def note(self, batch: Batch) -> None:
        """Take note of a training batch."""
        if self.rewards.batches is None:
            self._played.append(batch)

    def forget(self) -> None:
        """Forget the current round."""
        self._played = []

    def judge(self, defender: nn.Module, attackers: Sequence[nn.Module]) -> Verdict:
        """Score the networks in eval mode and draw the winner, which is never the second Attacker, a twin."""
        per_batch = [[self._scores(each, batch) for each in (defender, *attackers)] for batch in self._batches()]
        self.number += 1
        d, *a = (torch.cat(scores) for scores in zip(*self._updater.gathered(per_batch), strict=True))
        if (over := getattr(self.score, "over", None)) is not None:
            d, *a = (over(scores) for scores in (d, *a))
        chance = float(self.winner(a[0], d))
        wins = self._updater.gathered([float(torch.rand(()))])[0] < chance
        return Verdict(float(a[0].mean()), float(d.mean()), [each - d for each in a], chance, wins)

    @torch.no_grad()
    def _scores(self, network: nn.Module, batch: Batch) -> Tensor:
        network.eval()
        scores = self.score(network, batch).float().cpu()
        network.train()
        return scores

    def _batches(self) -> list[Batch]:
        if self.rewards.batches is None:
            noise, special = self.rewards.noise, self.rewards.special_tokens
            return [noisy_tokens(batch, noise, special) if noise else batch for batch in self._played]
        batches = self._of_round()
        size = min(self.rewards.batches_per_round or len(batches), len(batches))
        first = 0 if callable(self.rewards.batches) else self.number * size
        mine = range(self._updater.rank, size, self._updater.processes)
        return [batches[(first + i) % len(batches)] for i in mine]

    def _of_round(self) -> Sequence[Batch]:
        batches = self.rewards.batches
        assert batches is not None
        if not callable(batches):
            return batches
        if self._drawn is None or self._drawn[0] != self.number:
            self._drawn = self.number, batches(self.number)
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
        self._played = send_to_device(mine, device)


def noisy_tokens(batch: Batch, share: float, special_tokens: Sequence[int] = ()) -> Batch:
    """Replace a share of a batch's tokens by random other tokens of the batch.

    Special tokens and padding are neither replaced nor used.
    """
    ids = batch.get("input_ids")
    if ids is None:
        raise InputError(f"The batch {sorted(batch)} holds no `input_ids` to add noise to.")
    replaceable = torch.ones_like(ids, dtype=torch.bool)
    if "attention_mask" in batch:
        replaceable = batch["attention_mask"].bool()
    if special_tokens:
        replaceable = replaceable & ~torch.isin(ids, torch.tensor(list(special_tokens), device=ids.device))
    pool = ids[replaceable]
    if not len(pool):
        return batch
    drawn = pool[torch.randint(len(pool), ids.shape, device=ids.device)]
    replaced = replaceable & (torch.rand(ids.shape, device=ids.device) < share)
    return {**batch, "input_ids": torch.where(replaced, drawn, ids)}


def _resolve(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if callable(value):
        return value
    if value not in known:
        raise InputError(f"Expected `{name}` to be a function or one of {', '.join(known)}, got {value!r}.")
    return known[value]
