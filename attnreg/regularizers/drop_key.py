"""DropKey: dropout of scores with the key as its unit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo
from attnreg.arguments import Probability, probability, true_or_false
from attnreg.regularizers._parts.keys import check_shared_keys


class DropKey(MaskProvider):
    r"""Drop attention scores, or whole keys for all queries or heads, before the softmax.

    .. math:: \tilde S_{bhqk} = -\infty \text{ if } M_{bhqk} = 0, \quad M_{bhqk} \sim \mathrm{Bernoulli}(1 - p)

    As in the paper, each query of each head draws its own keys, which equals :class:`attnreg.AttentionDropout` with
    ``placement="scores"``. With ``share_queries``, a dropped key is dropped for all queries; with ``share_heads``, for
    all heads. The paper's rate that falls with depth is
    ``Scheduled(DropKey(), over="depth", p=[(0, 0.3), (1, 0)])``; its blocks of neighbouring patches are not included.

    Args:
        p: drop probability.
        share_heads: whether all heads share one draw.
        share_queries: whether all queries share one draw.

    Shape:
        scores are ``(B, H, Q, K)``, with 1 for H or Q where they share a draw.

    Reference:
        DropKey for Vision Transformer (CVPR 2023, arXiv 2208.02646).

    Example:
        >>> DropKey(0.5, share_queries=True)(AttentionSite(shape=(2, 4, 8, 8))).scores.shape
        torch.Size([2, 4, 1, 8])
    """

    schedulable = ("p",)

    def __init__(self, p: Probability = 0.1, share_heads: bool = False, share_queries: bool = False) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.share_heads = true_or_false("share_heads", share_heads)
        self.share_queries = true_or_false("share_queries", share_queries)

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if self.share_queries:
            check_shared_keys("DropKey(share_queries=True) drops a key for all queries", sites)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        batch, heads, queries, keys = site.shape
        shape = batch, 1 if self.share_heads else heads, 1 if self.share_queries else queries, keys
        return site.dropping(self.p, shape, by_query=not self.share_queries)
