"""Learned drop rates: one logit per layer, or per head of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import inner_probability, one_of, whole_number
from attnreg.errors import InputError
from attnreg.regularizers._parts.layers import Depth, LayerwiseProvider, depth_of, heads_of
from attnreg.sites import AttentionSite, SiteInfo

Per = Literal["layer", "head"]

# Kept weights are divided by 1 - p. Half precision could not hold the result beyond this logit of p.
LARGEST_LOGIT = 8.0


class LearnedRates(LayerwiseProvider):
    """A provider with a learned drop rate per layer or head of each layer."""

    measured = ("num_layers", "num_heads")

    def __init__(self, num_layers: Depth, p: float, per: Per, num_heads: int | None) -> None:
        super().__init__(num_layers)
        p = inner_probability("p", p)
        if one_of("per", per, get_args(Per)) == "head":
            if num_heads is None or num_heads < 1:
                raise InputError(f"Expected `num_heads` to be at least 1 for rates per head, got {num_heads}.")
            whole_number("num_heads", num_heads)
        shape = len(self._index), num_heads or 1 if per == "head" else 1
        self.logits = nn.Parameter(torch.full(shape, math.log(p / (1 - p))))  # of dropping
        self.p = p
        self.per = per
        self.num_heads = num_heads

    @classmethod
    @override
    def measure(cls, sites: Sequence[SiteInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        return {"num_layers": depth_of(sites), "num_heads": heads_of(sites) if options.get("per") == "head" else None}

    @property
    def rates(self) -> Tensor:
        """The current drop rates, without gradients."""
        return self.logits.detach().sigmoid()

    def _logits_at(self, site: AttentionSite) -> Tensor:
        """Return the logits of one site, broadcastable to ``(B, H, Q, K)``."""
        if self.logits.shape[1] not in (1, site.shape[1]):
            name = type(self).__name__
            raise InputError(
                f"This {name} has drop rates for {self.logits.shape[1]} heads, but {site.name} has {site.shape[1]}: "
                f"use `{name}.for_model(model)`."
            )
        return self.logits[self._index(site)].to(site.device).clamp(max=LARGEST_LOGIT).view(-1, 1, 1)
