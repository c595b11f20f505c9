"""The rewards of AttendOut's game: the scores of the networks after a round, their rows, and the winner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import Tensor, nn

from attnreg.arguments import one_of, whole_number
from attnreg.errors import InputError
from attnreg.outputs import IGNORED, a_batch, aligned_labels, is_multi_label, needed_labels_of, predictions_of
from attnreg.training.method import Batch, Updater

ScoreName = Literal["loss", "accuracy"]
WinnerName = Literal["evidence", "greedy", "proportional", "none"]
Score = Callable[[nn.Module, Batch], Tensor]
Winner = Callable[[Tensor, Tensor], Tensor]
RewardBatches = Sequence[Batch] | Callable[[int], Sequence[Batch]]


def _predicted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits, and labels moved to the positions whose logits predict them."""
    logits = predictions_of(model(**a_batch(model, batch)))
    assert logits is not None, f"{type(model).__name__} returned no logits"
    return logits, aligned_labels(model, needed_labels_of(batch, logits), logits)


def _mean_of_rows(values: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the labels of a row, ``(B,)``, of values that are 0 where a label is ignored."""
    is_label = (labels != IGNORED).view(len(labels), -1)
    return values.view(is_label.shape).sum(1) / is_label.sum(1).clamp(min=1)


def negative_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-likelihood per sample, ``(B,)``, mean over its labels; for regression, minus the squared error."""
    logits, labels = _predicted(model, batch)
    if labels.is_floating_point():
        loss_of_values = F.binary_cross_entropy_with_logits if is_multi_label(model) else F.mse_loss
        return -loss_of_values(logits.view(len(labels), -1), labels.view(len(labels), -1), reduction="none").mean(1)
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -_mean_of_rows(losses, labels)


def correctness(model: nn.Module, batch: Batch) -> Tensor:
    """Return the accuracy per sample, ``(B,)``: for words and tokens, the fraction of its labels that are right.

    A generated text is scored token by token, after the right preceding tokens.
    """
    logits, labels = _predicted(model, batch)
    if labels.is_floating_point():
        raise InputError("Score 'accuracy' needs classes as labels, got numbers. Use score 'loss' for regression.")
    return _mean_of_rows(logits.argmax(-1) == labels, labels)  # an ignored label is no class


SCORES: dict[str, Score] = {"loss": negative_loss, "accuracy": correctness}


class MetricScore:
    """A metric of all scored rows together, such as Matthews' correlation or F1, for tasks with one label per row.

    A metric has no score per row, hence no standard error: the winner ``"evidence"`` then is ``"greedy"``.

    Args:
        metric: maps labels and predictions, as lists of numbers, to the metric; higher is better.

    Example:
        >>> score = MetricScore(lambda labels, predictions: sum(a == b for a, b in zip(labels, predictions)))
        >>> score.over(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
        tensor([1.])
    """

    def __init__(self, metric: Callable[[list[float], list[float]], float]) -> None:
        self.metric = metric

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return label and prediction per row, ``(B, 2)``."""
        logits, labels = _predicted(model, batch)
        if labels.numel() != len(labels):
            raise InputError(f"A metric needs one label per row, got labels of shape {tuple(labels.shape)}.")
        predictions = logits.flatten() if labels.is_floating_point() else logits.flatten(1).argmax(1)
        return torch.stack([labels.flatten().double(), predictions.double()], 1)

    def over(self, pairs: Tensor) -> Tensor:
        """Return the metric of all rows, ``(1,)``, from their labels and predictions ``(n, 2)``."""
        labels, predictions = pairs.t().tolist()
        return torch.tensor([float(self.metric(labels, predictions))])


def standardized_gap(gaps: Tensor) -> Tensor:
    """Return the mean gap over its standard error, clamped to ±3, 0-d; its scale is the same for all tasks."""
    if len(gaps) < 2:
        return gaps.mean().sign()
    error = gaps.std() / len(gaps) ** 0.5
    return (gaps.mean() / error.clamp(min=torch.finfo(gaps.dtype).tiny)).clamp(-3.0, 3.0)


def by_evidence(attacker: Tensor, defender: Tensor) -> Tensor:
    """Return the probability, 0-d, that the Attacker is better, from the scores: Φ of the standardized gap."""
    if len(attacker) < 2:  # a single score has no standard error
        return greedy(attacker, defender)
    return torch.special.ndtr(standardized_gap(attacker - defender))


def greedy(attacker: Tensor, defender: Tensor) -> Tensor:
    """Return 1 if the Attacker's mean score is higher, 0 if it is lower and 0.5 in a tie."""
    return 0.5 + 0.5 * (attacker - defender).mean().sign()


def proportional(attacker: Tensor, defender: Tensor) -> Tensor:
    r"""Return the Attacker's share of both mean scores, for scores of any sign; close to 0.5 for similar networks.

    .. math:: P = \frac{\max(a, 0) + \max(-d, 0)}{|a| + |d|}

    Two positive scores give a / (a + d), our reading of AttendOut's Section 4.2, which has no formula. A
    negative score counts for the other network, so that the better one always has the higher probability.
    """
    a, d = attacker.mean(), defender.mean()
    total = a.abs() + d.abs()
    return torch.where(total > 0, (a.clamp(min=0) + (-d).clamp(min=0)) / total, torch.full_like(a, 0.5))


#: "none" copies no network; the better network still counts as the winner
WINNERS: dict[str, Winner] = {"evidence": by_evidence, "greedy": greedy, "proportional": proportional, "none": greedy}


@dataclass(frozen=True, eq=False)
class Rewards:
    """The rows that both networks are scored on after every round, and the score, whose gaps are the rewards.

    Args:
        batches: labelled batches, or a function that returns the batches of a round, numbered from 0; ``None`` uses the
            training batches of the round.
        score: ``"loss"`` (negative loss; higher is better), ``"accuracy"``, or a function of a model and a batch that
            returns ``(B,)``; higher is better. :class:`attnreg.training.MetricScore` scores all rows by one metric.
        batches_per_round: number of batches that a round uses, in turn (default: all).

    Raises:
        InputError: if an argument is unknown or out of range, or two arguments are at odds.

    Example:
        >>> Rewards(batches_per_round=4).score
        'loss'
    """

    batches: RewardBatches | None = None
    score: ScoreName | Score = "loss"
    batches_per_round: int | None = None

    def __post_init__(self) -> None:
        rows = None if callable(self.batches) else self.batches
        if rows is not None and (isinstance(rows, Mapping) or not hasattr(rows, "__getitem__") or not len(rows)):
            raise InputError("Expected `batches` of `rewards` to be a list of at least one batch.")
        whole_number("batches_per_round", 1 if self.batches_per_round is None else self.batches_per_round)
        if not callable(self.score):
            one_of("score", self.score, get_args(ScoreName))


class Verdict(NamedTuple):
    """The outcome of a round."""

    attacker: float  # mean scores
    defender: float
    gaps: Tensor  # the Attacker's scores minus the Defender's, (n,)
    chance: float  # the probability that the Attacker wins
    attacker_wins: bool


class Referee:
    """Scores both networks on reward data after a round, and draws the winner."""

    def __init__(self, updater: Updater, rewards: Rewards, winner: WinnerName | Winner) -> None:
        self.rewards = rewards
        self.score: Score = rewards.score if callable(rewards.score) else SCORES[rewards.score]
        self.copies = winner != "none"
        self.winner = winner if callable(winner) else WINNERS[one_of("winner", winner, get_args(WinnerName))]
        self._updater = updater
        self.number = 0  # number of the round
        self._trained: list[Batch] = []  # training batches of the round, if they are scored

    def record(self, batch: Batch) -> None:
        """Record a training batch."""
        if self.rewards.batches is None:
            self._trained.append(batch)

    def judge(self, defender: nn.Module, attacker: nn.Module) -> Verdict:
        """Score the networks in eval mode and draw the winner."""
        per_batch = [[self._scores(network, batch) for network in (defender, attacker)] for batch in self._batches()]
        self.number, self._trained = self.number + 1, []
        d, a = (torch.cat(scores) for scores in zip(*self._updater.gathered(per_batch), strict=True))
        if (metric := getattr(self.score, "over", None)) is not None:
            d, a = metric(d), metric(a)
        chance = float(self.winner(a, d))
        wins = self._updater.gathered([float(torch.rand(()))])[0] < chance
        return Verdict(float(a.mean()), float(d.mean()), a - d, chance, wins)

    @torch.no_grad()
    def _scores(self, network: nn.Module, batch: Batch) -> Tensor:
        network.eval()
        scores = self.score(network, batch).float().cpu()
        network.train()
        return scores

    def _batches(self) -> list[Batch]:
        if (source := self.rewards.batches) is None:
            return self._trained
        batches = source(self.number) if callable(source) else source
        size = min(self.rewards.batches_per_round or len(batches), len(batches))
        first = 0 if callable(source) else self.number * size
        begin, end = (size * rank // self._updater.processes for rank in (self._updater.rank, self._updater.rank + 1))
        return [batches[(first + i) % len(batches)] for i in range(begin, end)]  # in the order of processes

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume."""
        batches = self._updater.gathered([[dict(batch) for batch in self._trained]])  # they differ by process
        return {"played": batches, "number": self.number}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.number, batches = state["number"], state["played"][self._updater.rank]
        self._trained = send_to_device(batches, device)
