"""Learned drop rates: one logit per layer, or per head of each layer."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attnreg.arguments import inner_probability, one_of, whole_number
from attnreg.errors import InputError
from attnreg.masks import AttentionSite
from attnreg.providers._layers import LayerIndex

Per = Literal["layer", "head"]

# Kept weights are divided by 1 - p. Half precision could not hold the result beyond this logit of p.
LARGEST_LOGIT = 8.0


def initial_logits(index: LayerIndex, p: float, per: Per, num_heads: int | None) -> nn.Parameter:
    """Make the logits of dropping: ``(layers, heads)``, or ``(layers, 1)`` for rates per layer.

    Raises:
        InputError: if an argument is out of range, or ``per="head"`` lacks ``num_heads``.
    """
    p = inner_probability("p", p)
    if one_of("per", per, get_args(Per)) == "head":
        if num_heads is None or num_heads < 1:
            raise InputError(f"Expected `num_heads` to be at least 1 for rates per head, got {num_heads}.")
        whole_number("num_heads", num_heads)
    return nn.Parameter(torch.full((len(index), num_heads or 1 if per == "head" else 1), math.log(p / (1 - p))))


def logits_at(logits: Tensor, index: LayerIndex, site: AttentionSite) -> Tensor:
    """Return the logits of one site, broadcastable to ``(B, H, Q, K)``.

    Raises:
        InputError: if the site has another number of heads than the logits.
    """
    if logits.shape[1] not in (1, site.shape[1]):
        raise InputError(
            f"This {index.provider} has drop rates for {logits.shape[1]} heads, but {site.name} has {site.shape[1]}: "
            f"use `{index.provider}.for_model(model)`."
        )
    return logits[index(site)].to(site.device).clamp(max=LARGEST_LOGIT).view(-1, 1, 1)
