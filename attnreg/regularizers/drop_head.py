"""DropHead."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo, functional
from attnreg.arguments import Probability, probability
from attnreg.regularizers._parts.keys import check_shared_keys


class DropHead(MaskProvider):
    r"""Drop whole attention heads of a sample with probability p and scale up the others.

    .. math:: A_{bh} \leftarrow \xi_{bh} \frac{H}{\sum_{h'} \xi_{bh'}} A_{bh}, \quad
              \xi_{bh} \sim \mathrm{Bernoulli}(1 - p), \quad \xi_b \ne 0

    The factors of a sample sum to H, and each is 1 on average. If all heads of a sample would be dropped, one of them,
    chosen uniformly, is kept; the paper leaves this case open (H / 0). Its schedule, a rate that falls to 0 and rises
    again, is ``Scheduled(DropHead(), total_steps=T, p=[(0, 0.2), (0.5, 0), (1, 0.2)])``.

    Args:
        p: probability of dropping a head.

    Shape:
        weights are ``(B, H, 1, 1)``.

    Reference:
        Scheduled DropHead: A Regularization Method for Transformer Models (EMNLP Findings 2020, arXiv 2004.13342).

    Example:
        >>> DropHead(1.0)(AttentionSite(shape=(2, 4, 8, 8))).weights.sum(1).flatten()
        tensor([4., 4.])
    """

    schedulable = ("p",)

    def __init__(self, p: Probability = 0.2) -> None:
        super().__init__()
        self.p = probability("p", p)

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        check_shared_keys("DropHead drops a head for all queries of a sample", sites, in_parts=True)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        shape = site.shape[:2]
        keep = functional.sample_heads(self.p, shape, uniform=site.uniform(shape))
        return Mask(weights=functional.rescaled_heads(keep)[..., None, None].to(site.dtype))
