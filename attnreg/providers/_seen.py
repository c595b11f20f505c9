"""Helpers of providers that keep the queries of a forward pass for their penalty."""

from __future__ import annotations

from torch import Tensor

from attnreg.errors import InputError
from attnreg.masks import AttentionSite
from attnreg.providers._layers import hidden_queries


def queries_of(site: AttentionSite, size: int, provider: str, heads: int | None = None) -> tuple[Tensor, Tensor]:
    """Return a site's queries and keys, both ``(B, H, ..., D)``, without gradients.

    Args:
        site: the attention site.
        size: the expected D.
        provider: class name of the provider, for messages.
        heads: the expected H; ``None`` accepts any.

    Raises:
        InputError: if the model does not expose them, or H or D is not the expected one.
    """
    if site.query is None or site.key is None:
        raise hidden_queries(provider, site.name)
    got = site.query.shape[1], site.query.shape[-1]
    expected = got[0] if heads is None else heads, size
    if got != expected:
        raise InputError(
            f"This {provider} was made for {expected[0]} heads of size {expected[1]}, but {site.name} has {got[0]} of "
            f"size {got[1]}: use `{provider}.for_model(model)`."
        )
    query, key = site.query.detach(), site.key.detach()
    if key.shape[1] != query.shape[1]:  # grouped-query attention
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query, key


def mean_over(values: Tensor, units: Tensor | None) -> Tensor:
    """Return the mean of the values at valid units, 0-d; 0 if there are none.

    Args:
        values: any shape.
        units: bool, broadcastable to ``values``, ``True`` = valid; ``None`` means all.
    """
    if units is None:
        return values.mean()
    units = units.expand(values.shape)
    return values.masked_fill(~units, 0.0).sum() / units.sum().clamp(min=1)
