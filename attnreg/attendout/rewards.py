"""Scores and winner rules of AttendOut, and the loss of REINFORCE, each a small function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.errors import InputError
from attnreg.outputs import IGNORED, aligned_labels, needed_labels_of, predictions_of
from attnreg.training.method import Batch

ScoreName = Literal["loss", "accuracy"]
WinnerName = Literal["evidence", "greedy", "proportional", "none"]
Score = Callable[[nn.Module, Batch], Tensor]
Winner = Callable[[Tensor, Tensor], Tensor]


def negative_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-likelihood of the labels per sample, ``(B,)``; for regression, minus the squared error."""
    logits, labels = _predicted(model, batch)
    if not labels.is_floating_point():
        per_label = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        counted = (labels != IGNORED).view(len(labels), -1)
        return -per_label.view(counted.shape).sum(1) / counted.sum(1).clamp(min=1)
    return -F.mse_loss(logits.view(len(labels), -1), labels.view(len(labels), -1), reduction="none").mean(1)


def _predicted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits, and labels at the positions whose logits predict them."""
    output: Any = model(**batch)
    logits = predictions_of(output)
    assert logits is not None, f"{type(model).__name__} returned no logits"
    return logits, aligned_labels(model, needed_labels_of(batch, logits))


def correctness(model: nn.Module, batch: Batch) -> Tensor:
    """Return the accuracy per sample, ``(B,)``: for words and tokens, the fraction of its labels that are right.

    A generated text is scored token by token, each given the right tokens before it.
    """
    logits, labels = _predicted(model, batch)
    if labels.is_floating_point():
        raise InputError("Score 'accuracy' needs classes as labels, got numbers. Use score 'loss' for regression.")
    counted = (labels != IGNORED).view(len(labels), -1)
    right = (logits.argmax(-1) == labels).view(counted.shape) & counted
    return right.sum(1) / counted.sum(1).clamp(min=1)


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
        """Return label and prediction of each row, ``(B, 2)``."""
        logits, labels = _predicted(model, batch)
        if labels.numel() != len(labels):
            raise InputError(f"A metric needs one label per row, got labels of shape {tuple(labels.shape)}.")
        answers = logits.flatten(1).argmax(1) if not labels.is_floating_point() else logits.flatten()
        return torch.stack([labels.flatten().double(), answers.double()], 1)

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
    """Return the probability, 0-d, that the Attacker is better, given the scores: Φ of the standardized gap.

    A single score has no standard error: the better one then wins.
    """
    if len(attacker) < 2:
        return greedy(attacker, defender)
    return torch.special.ndtr(standardized_gap(attacker - defender))


def greedy(attacker: Tensor, defender: Tensor) -> Tensor:
    """Return 1 if the Attacker's mean score is higher, 0 if it is lower and 0.5 in a tie."""
    return 0.5 + 0.5 * (attacker - defender).mean().sign()


def proportional(attacker: Tensor, defender: Tensor) -> Tensor:
    r"""Return the Attacker's share of both mean scores, for scores of any sign; close to 0.5 for similar networks.

    .. math:: P = \frac{\max(a, 0) + \max(-d, 0)}{|a| + |d|}

    Two positive scores give a / (a + d), our reading of AttendOut's Section 4.2, which has no formula. What is below
    zero counts for the other network: two negative ones, such as minus a loss, give |d| / (|a| + |d|), and a positive
    score wins against a negative one. The networks' probabilities add up to 1, a higher score never lowers its own, and
    the rule is continuous but where both scores are 0, which is a tie.

    Example:
        >>> score = torch.tensor
        >>> proportional(score([0.6]), score([0.2])), proportional(score([-1.0]), score([-3.0]))
        (tensor(0.7500), tensor(0.7500))
    """
    a, d = attacker.mean(), defender.mean()
    whole = a.abs() + d.abs()
    return torch.where(whole > 0, (a.clamp(min=0) + (-d).clamp(min=0)) / whole, torch.full_like(a, 0.5))


#: "none" copies nobody; the better network still counts as the winner
WINNERS: dict[str, Winner] = {"evidence": by_evidence, "greedy": greedy, "proportional": proportional, "none": greedy}


def reinforce_loss(log_prob: Tensor, advantage: Tensor | float) -> Tensor:
    """Return the loss whose negative gradient is REINFORCE's estimate of the gradient of the expected reward.

    The log-probability is that of each sample's actions, a mean over units, ``(B,)``; the advantage, reward minus
    baseline, is 0-d or ``(B,)``.
    """
    return -(log_prob * advantage).mean()
