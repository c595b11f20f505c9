"""Relaxed attention: mix attention weights with the uniform distribution."""

from __future__ import annotations

import torch
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider
from attnreg.arguments import Probability, probability


class RelaxedAttention(MaskProvider):
    r"""Spread a share of each row's attention weights evenly over its valid keys.

    .. math:: A' = (1 - \gamma) A + \gamma U, \qquad U_{ij} = m_{ij} / \textstyle\sum_k m_{ik}

    m is 1 for the keys that the model allows and, composed with a regularizer that drops scores, that are kept. Nothing
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
        return Mask(relaxed=torch.as_tensor(self.gamma, dtype=site.dtype, device=site.device))
