"""Scores, rewards and winner rules of AttendOut, each a small function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.errors import InputError
from attnreg.training.method import IGNORED, Batch

ScoreName = Literal["loss", "accuracy"]
RewardName = Literal["gap", "sign", "standardized"]
WinnerName = Literal["evidence", "greedy", "proportional"]
Score = Callable[[nn.Module, Batch], Tensor]
Reward = Callable[[Tensor], Tensor]
Winner = Callable[[Tensor, Tensor], Tensor]


def negative_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-likelihood of the labels per sample, ``(B,)``; for regression, minus the squared error."""
    logits, labels = model(**batch).logits, batch["labels"]
    if not labels.is_floating_point():
        per_label = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        counted = (labels != IGNORED).view(len(labels), -1)
        return -per_label.view(counted.shape).sum(1) / counted.sum(1).clamp(min=1)
    return -F.mse_loss(logits.view(len(labels), -1), labels.view(len(labels), -1), reduction="none").mean(1)


def correctness(model: nn.Module, batch: Batch) -> Tensor:
    """Return the accuracy per sample, ``(B,)``.

    For words and tokens, it is the fraction of a sample's labels that are right. A generated text is scored token by
    token, each given the right tokens before it.

    Raises:
        InputError: for regression, where accuracy is not defined.
    """
    logits, labels = model(**batch).logits, batch["labels"]
    if labels.is_floating_point():
        raise InputError("Score 'accuracy' needs classes as labels, got numbers. Use score 'loss' for regression.")
    counted = (labels != IGNORED).view(len(labels), -1)
    right = (logits.argmax(-1) == labels).view(counted.shape) & counted
    return right.sum(1) / counted.sum(1).clamp(min=1)


SCORES: dict[str, Score] = {"loss": negative_loss, "accuracy": correctness}


def mean_gap(gaps: Tensor) -> Tensor:
    """Return the mean gap between the Attacker's and the Defender's scores, 0-d."""
    return gaps.mean()


def sign_of_gap(gaps: Tensor) -> Tensor:
    """Return the sign of the mean gap, 0-d."""
    return gaps.mean().sign()


def standardized_gap(gaps: Tensor) -> Tensor:
    """Return the mean gap over its standard error, clamped to ±3, 0-d; its scale is the same for all tasks.

    Example:
        >>> standardized_gap(torch.tensor([1.0, 2.0, 3.0, 2.0])), standardized_gap(torch.zeros(4))
        (tensor(3.), tensor(0.))
    """
    if len(gaps) < 2:
        return gaps.mean().sign()
    error = gaps.std() / len(gaps) ** 0.5
    return (gaps.mean() / error.clamp(min=torch.finfo(gaps.dtype).tiny)).clamp(-3.0, 3.0)


REWARDS: dict[str, Reward] = {"gap": mean_gap, "sign": sign_of_gap, "standardized": standardized_gap}


def by_evidence(attacker: Tensor, defender: Tensor) -> Tensor:
    """Return the probability, 0-d, that the Attacker is better, given the scores: Φ of the standardized gap."""
    return torch.special.ndtr(standardized_gap(attacker - defender))


def greedy(attacker: Tensor, defender: Tensor) -> Tensor:
    """Return 1 if the Attacker's mean score is higher, 0 if it is lower and 0.5 in a tie."""
    return 0.5 + 0.5 * (attacker - defender).mean().sign()


def proportional(attacker: Tensor, defender: Tensor) -> Tensor:
    """Return the Attacker's share of the sum of both mean scores; close to 0.5 for similar networks.

    Raises:
        InputError: if a mean score is negative, as log-likelihoods are.
    """
    a, d = attacker.mean(), defender.mean()
    if min(a, d) < 0:
        raise InputError(
            "Winner 'proportional' needs scores of 0 or more, but a mean score is negative. Use score 'accuracy', or "
            "winner 'evidence'."
        )
    return torch.where(a + d > 0, a / (a + d), torch.full_like(a, 0.5))


WINNERS: dict[str, Winner] = {"evidence": by_evidence, "greedy": greedy, "proportional": proportional}


def reinforce_loss(log_prob: Tensor, reward: Tensor | float, baseline: Tensor | float) -> Tensor:
    r"""Return the loss whose negative gradient is REINFORCE's estimate of the gradient of the expected reward.

    .. math:: -\frac{1}{B} \sum_b \log P(a_b)\, (r - b)

    Args:
        log_prob: log-probability of the actions of each sample, mean over units, ``(B,)``.
        reward: reward r, 0-d, or ``(B,)`` for one reward per sample.
        baseline: baseline b, the moving average of rewards.

    Returns:
        The loss, 0-d.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 5; Williams, 1992.

    Example:
        >>> reinforce_loss(torch.tensor([-0.5, -1.5]), torch.tensor(2.0), baseline=1.0)
        tensor(1.)
    """
    return -(log_prob * (reward - baseline)).mean()
