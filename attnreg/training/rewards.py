"""AttendOut's open choices, each a small function: what a network scores, what a round is worth, who wins it."""

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
    """Log-likelihood of the gold labels (minus the squared error, for regression), one per sample, ``(B,)``."""
    logits, labels = model(**batch).logits, batch["labels"]
    if not labels.is_floating_point():
        per_label = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        counted = (labels != IGNORED).view(len(labels), -1)
        return -per_label.view(counted.shape).sum(1) / counted.sum(1).clamp(min=1)
    return -F.mse_loss(logits.view(len(labels), -1), labels.view(len(labels), -1), reduction="none").mean(1)


def correctness(model: nn.Module, batch: Batch) -> Tensor:
    """1 where the prediction is right and 0 where it is wrong, ``(B,)``.

    Of words and tokens, the share of a sample's labels that are right; a text that is generated is scored token by
    token, given the right ones before.

    Raises:
        InputError: for regression, where nothing is right or wrong.
    """
    logits, labels = model(**batch).logits, batch["labels"]
    if labels.is_floating_point():
        raise InputError("Expected classes to be right or wrong, got numbers: use score 'loss' for regression.")
    counted = (labels != IGNORED).view(len(labels), -1)
    right = (logits.argmax(-1) == labels).view(counted.shape) & counted
    return right.sum(1) / counted.sum(1).clamp(min=1)


SCORES: dict[str, Score] = {"loss": negative_loss, "accuracy": correctness}


def mean_gap(gaps: Tensor) -> Tensor:
    """The mean gap between Attacker and Defender, 0-d."""
    return gaps.mean()


def sign_of_gap(gaps: Tensor) -> Tensor:
    """-1, 0 or 1, 0-d."""
    return gaps.mean().sign()


def standardized_gap(gaps: Tensor) -> Tensor:
    """The mean gap in units of its standard error, 0-d, within ±3: of one size for every task and stage of training.

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
    """The probability, given the paired scores, that the Attacker is the better one: Φ of the standardized gap.

    Args:
        attacker: ``(n,)``, its scores.
        defender: ``(n,)``, the other's, on the same samples.

    Returns:
        0-d probability of the Attacker winning.
    """
    return torch.special.ndtr(standardized_gap(attacker - defender))


def greedy(attacker: Tensor, defender: Tensor) -> Tensor:
    """The better one wins; 0.5 in a tie."""
    return 0.5 + 0.5 * (attacker - defender).mean().sign()


def proportional(attacker: Tensor, defender: Tensor) -> Tensor:
    """In proportion to the mean scores, which must not be negative: close to a fair coin between equals.

    Raises:
        InputError: if a mean score is negative, as log-likelihoods are.
    """
    a, d = attacker.mean(), defender.mean()
    if min(a, d) < 0:
        raise InputError(
            "Expected scores that are not negative for winner 'proportional', got log-likelihoods: use score "
            "'accuracy' with it, or winner 'evidence'."
        )
    return torch.where(a + d > 0, a / (a + d), torch.full_like(a, 0.5))


WINNERS: dict[str, Winner] = {"evidence": by_evidence, "greedy": greedy, "proportional": proportional}


def reinforce_loss(log_prob: Tensor, reward: Tensor | float, baseline: Tensor | float) -> Tensor:
    r"""The loss whose gradient is REINFORCE's estimate for the expected reward.

    .. math:: -\frac{1}{B} \sum_b \log P(a_b)\, (r - b)

    Args:
        log_prob: ``(B,)``, of the actions taken, mean over units.
        reward: 0-d, or ``(B,)`` for one reward per sample.
        baseline: b, the moving average of rewards.

    Returns:
        0-d.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 5; Williams, 1992.

    Example:
        >>> reinforce_loss(torch.tensor([-0.5, -1.5]), torch.tensor(2.0), baseline=1.0)
        tensor(1.)
    """
    return -(log_prob * (reward - baseline)).mean()
