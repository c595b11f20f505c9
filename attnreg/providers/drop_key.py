"""DropKey: dropout of scores with the key as its unit, at a rate that falls with depth."""

from __future__ import annotations

import torch
from typing_extensions import override

from attnreg.arguments import probability, true_or_false
from attnreg.masks import AttentionSite, Mask
from attnreg.provider.base import MaskProvider


class DropKey(MaskProvider):
    r"""Drop keys before the softmax, at a rate that may fall from the first layer to the last.

    .. math:: \tilde S_{bhqk} = -\infty \text{ if } M_{bhqk} = 0, \quad M_{bhqk} \sim \mathrm{Bernoulli}(1 - p_l), \quad
              p_l = p + (p_{end} - p) \frac{l}{L - 1}

    l is the index of the layer among the L of its stack; the rate is ``p`` where there is but one. As in the paper,
    each query of each head draws keys of its own, which is :class:`attnreg.AttentionDropout` with
    ``placement="scores"`` at a rate of the layer. With ``share_queries``, a dropped key is dropped for all queries;
    with ``share_heads``, for all heads.

    The paper's variant that drops whole blocks of neighbouring patches, which it advises against, is left out.

    Args:
        p: drop probability, in the first layer.
        end: drop probability in the last layer; ``p`` by default, the same in all layers.
        share_heads: one draw for all heads.
        share_queries: one draw for all queries.

    Shape:
        scores are ``(B, H, Q, K)``, with 1 for H or Q where they share a draw.

    Raises:
        ValueError: if ``p`` or ``end`` is outside ``[0, 1]``.

    Reference:
        DropKey for Vision Transformer (CVPR 2023, arXiv 2208.02646).

    Example:
        >>> provider = DropKey(1.0, end=0.0, share_queries=True)
        >>> [provider(AttentionSite(shape=(2, 4, 8, 8), layer=i, num_layers=2)).scores.sum() for i in range(2)]
        [tensor(0), tensor(64)]
    """

    def __init__(
        self, p: float = 0.1, end: float | None = None, share_heads: bool = False, share_queries: bool = False
    ) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.end = None if end is None else probability("end", end)
        self.share_heads = true_or_false("share_heads", share_heads)
        self.share_queries = true_or_false("share_queries", share_queries)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        batch, heads, queries, keys = site.shape
        shape = batch, 1 if self.share_heads else heads, 1 if self.share_queries else queries, keys
        return Mask(scores=torch.rand(shape, device=site.device) >= self.rate(site.layer, site.num_layers))

    def rate(self, layer: int, num_layers: int) -> float:
        """The drop probability of a layer.

        Args:
            layer: its index, from 0.
            num_layers: number of layers in its stack.
        """
        if self.end is None or num_layers == 1:
            return self.p
        depth = layer / (num_layers - 1)
        return (1 - depth) * self.p + depth * self.end
