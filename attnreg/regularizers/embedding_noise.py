"""NEFTune: noise on embeddings."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from attnreg.arguments import NotNegative, not_negative
from attnreg.regularizer.providers import HiddenProvider
from attnreg.regularizers._parts.rounding import Rounding
from attnreg.sites import HiddenSite


class EmbeddingNoise(HiddenProvider):
    r"""Add uniform noise to the states that enter the first block (NEFTune).

    .. math:: h'_{btc} = h_{btc} + \frac{\alpha}{\sqrt{L_b C}} u_{btc}, \qquad u_{btc} \sim U(-1, 1)

    :math:`L_b` is the number of tokens of sample b without padding, and C the number of features. The Trainer's
    ``neftune_noise_alpha`` adds its noise to the output of the model's embedding module instead, before position
    embeddings, LayerNorm and dropout, and counts padding in L.

    Args:
        alpha: the size of the noise; 0 adds none.

    Raises:
        InputError: in a forward pass, if the padding of the states is unknown.

    Reference:
        NEFTune (ICLR 2024, arXiv 2310.05914), Algorithm 1.

    Example:
        >>> states = EmbeddingNoise(alpha=4.0)(HiddenSite(shape=(1, 4, 4)), torch.zeros(1, 4, 4))
        >>> bool((states.abs() <= 1.0).all())
        True
    """

    where = "embeddings"
    schedulable = ("alpha",)
    effect = "adds noise"

    def __init__(self, alpha: NotNegative = 5.0) -> None:
        super().__init__()
        self.alpha = not_negative("alpha", alpha)
        self._rounding = Rounding("EmbeddingNoise")

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        lengths = site.lengths.to(torch.promote_types(site.dtype, torch.float32))
        size = self.alpha / (lengths * site.shape[-1]).sqrt()
        noise = site.uniform(dtype=site.dtype) * 2 - 1
        return self._rounding.add(states, noise * size.to(site.dtype)[:, None, None])
