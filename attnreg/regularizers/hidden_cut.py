"""HiddenCut: drop spans of hidden states that begin at tokens with much attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, HiddenProvider, HiddenSite, Mask, MaskProvider, SiteInfo, functional
from attnreg.arguments import Probability, positive, probability
from attnreg.errors import InputError


class HiddenCut(HiddenProvider):
    r"""Drop a span of each block's output, which begins at a token that receives much attention in this block.

    .. math:: \begin{aligned} & r_{bj} = \operatorname*{mean}_{h, i} A_{bhij}, \\
        & s_b \sim U(\text{the } \lceil c\, n_b \rceil \text{ tokens of the highest } r_{bj}) \end{aligned}

    The span is one of :class:`attnreg.HiddenDropout`, with a share p of the :math:`n_b` tokens of sample b; it begins
    earlier than :math:`s_b` if it would not fit otherwise. A is the model's self-attention before masks and dropout,
    computed once more, without gradients; its mean is over heads and over queries that are not padding.

    Args:
        p: the share of tokens to drop.
        candidates: c, the share of tokens at which a span may begin.

    Raises:
        InputError: when attached, if attention is computed in parts; in a forward pass, if padding is unknown.

    Reference:
        HiddenCut (Chen et al., ACL 2021, arXiv 2106.00149), without its loss between a pass with and one without cuts.

    Example:
        >>> provider = HiddenCut(p=0.5, candidates=0.25)
        >>> scores = torch.tensor([0.0, 0.0, 9.0, 0.0]).expand(1, 1, 4, 4)
        >>> _ = provider.attention(AttentionSite(shape=(1, 1, 4, 4), written_scores=scores))
        >>> provider(HiddenSite(shape=(1, 4, 1)), torch.ones(1, 4, 1)).flatten()
        tensor([1., 1., 0., 0.])
    """

    where = "output"
    schedulable = ("p",)

    def __init__(self, p: Probability = 0.1, candidates: float = 0.4) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.candidates = positive("candidates", probability("candidates", candidates))
        self.attention = _Received()

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if in_parts := [site.name for site in sites if site.in_parts]:
            raise InputError(
                f"HiddenCut needs the whole attention at once, but {in_parts[0]} computes it in parts (per image or "
                "window). Leave it out with `modules=...` or `layers=...`, or use HiddenDropout(mode='span')."
            )

    @override
    def forward(self, site: HiddenSite, states: Tensor) -> Tensor | None:
        received = self.attention.received.pop(f"{site.stack}.{site.layer}", None)
        if received is None or received.shape != site.shape[:2]:
            raise InputError(
                f"HiddenCut saw no attention between the tokens of {site.name}: attach it to layers that have it, "
                "or use HiddenDropout(mode='span')."
            )
        tokens = site.tokens
        starts = functional.candidate_region(received, tokens, self.candidates)
        kept = functional.sample_spans(self.p, tokens, starts=starts, uniform=site.uniform((site.shape[0], 1)))
        return states * kept.unsqueeze(-1)


class _Received(MaskProvider):
    """Masks nothing, and keeps the attention that each key receives: the mean over heads and real queries."""

    draws_in_prepare = False  # `prepare` only forgets the latest pass

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, Tensor] = {}  # (B, K), by the label of the attention, until its block ends

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        self.received = {}

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        if site.stack != "cross":
            with torch.no_grad():
                weights = site.scores().softmax(-1).nan_to_num(0.0)  # a row without a valid key
                units = site.units
                if units is not None:
                    weights = weights * units.any(-1, keepdim=True)
                self.received[site.label] = weights.mean(1).sum(1)
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "received": {}}
