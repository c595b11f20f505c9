"""Attention spread over many keys: rewarded for its entropy, or mixed with the uniform distribution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider, functional
from attnreg.arguments import NotNegative, Probability, not_negative, probability
from attnreg.functional.validity import mean_over
from attnreg.injection.running.repetition import in_backward


class AttentionEntropy(MaskProvider):
    r"""Reward attention that is spread over many keys: the loss falls with its entropy.

    .. math:: \mathrm{penalty} = -\alpha \sum_l \operatorname*{mean}_{b, h, q} H(A^l_{bhq}), \qquad
        H(a) = -\textstyle\sum_k a_k \log a_k

    The mean is over heads and over query rows that are not padding. Nothing is masked. A is the model's attention
    before masks of other regularizers and dropout; its scores are computed once more, with gradients.

    Args:
        alpha: weight of the entropy.

    Raises:
        RuntimeError: in a forward pass with gradients, if attention has none (reentrant checkpointing).

    Reference:
        Entropy-based Attention Regularization (ACL Findings 2022, arXiv 2203.09192). Its official code averages
        attention over heads first, and takes a softmax of these averages before the entropy; this one does neither.

    Example:
        >>> provider = AttentionEntropy(alpha=1.0)
        >>> _ = provider(AttentionSite(shape=(1, 1, 1, 4), written_scores=torch.zeros(1, 1, 1, 4)))
        >>> provider.penalty()  # minus log(4)
        tensor(-1.3863)
    """

    schedulable = ("alpha",)
    effect = "rewards attention that is spread"
    draws_in_prepare = False  # `prepare` only forgets the latest pass

    def __init__(self, alpha: NotNegative = 0.01) -> None:
        super().__init__()
        self.alpha = not_negative("alpha", alpha)
        self._entropies: dict[str, list[Tensor]] = defaultdict(list)  # times alpha, by site: one per part of attention
        self._has_gradients = False  # whether the forward pass began with gradients

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        self._entropies.clear()
        self._has_gradients = torch.is_grad_enabled()

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        if self._has_gradients and not torch.is_grad_enabled():
            raise RuntimeError(
                f"AttentionEntropy cannot learn from {site.name}, whose attention is computed without gradients: "
                "use gradient checkpointing with `use_reentrant=False`."
            )
        rows = None if site.units is None else site.units.any(-1)
        entropy = mean_over(functional.attention_entropy(site.scores(), site.valid), rows)
        if not in_backward():  # gradient checkpointing computes it again
            self._entropies[site.label].append((self.alpha * entropy).to(entropy.dtype))  # alpha may be in float64
        return None

    @override
    def penalty(self) -> Tensor | None:
        """Return minus alpha times the entropy of the latest pass, once; ``None`` if there was no pass."""
        means = [torch.stack(parts).mean() for parts in self._entropies.values()]
        self._entropies.clear()
        return -torch.stack([mean.to(means[0].device) for mean in means]).sum() if means else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entropies": defaultdict(list)}  # tensors with a graph cannot be copied


class RelaxedAttention(MaskProvider):
    r"""Spread a share of each row's attention weights evenly over its valid keys.

    .. math:: A' = (1 - \gamma) A + \gamma U, \qquad U_{ij} = m_{ij} / \textstyle\sum_k m_{ik}

    m is 1 for the keys that the model allows and that a regularizer of scores, composed with this one, keeps. Nothing
    is drawn or dropped. If the model drops no weights itself, A is not computed:
    :math:`A' V = (1 - \gamma) A V + \gamma U V`.

    Args:
        gamma: the share that is spread; 0 changes nothing, 1 makes attention uniform.

    Reference:
        Relaxed Attention for Transformer Models (arXiv 2209.09735); its "matched inference" is not included.

    Example:
        >>> RelaxedAttention(0.1)(AttentionSite(shape=(1, 1, 2, 2))).relaxed
        tensor(0.1000)
    """

    schedulable = ("gamma",)
    effect = "spreads attention"

    def __init__(self, gamma: Probability = 0.1) -> None:
        super().__init__()
        self.gamma = probability("gamma", gamma)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        return Mask(relaxed=torch.full((), self.gamma, dtype=site.dtype, device=site.device))
