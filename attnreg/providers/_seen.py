"""What providers that look at queries keep of a forward pass, for their penalty."""

from __future__ import annotations

from torch import Tensor

from attnreg.errors import InputError
from attnreg.masks import AttentionSite
from attnreg.providers._layers import hidden_queries


def queries_of(site: AttentionSite, size: int, provider: str, heads: int | None = None) -> tuple[Tensor, Tensor]:
    """A site's queries and keys, both ``(B, H, ..., D)``, as numbers: nothing is learned through them.

    Args:
        site: where.
        size: D that is expected.
        provider: who asks, for messages.
        heads: H that is expected, if that matters.

    Raises:
        InputError: if the model does not show them, or they are not of the size that was expected.
    """
    if site.query is None or site.key is None:
        raise hidden_queries(provider, site.name)
    got = site.query.shape[1], site.query.shape[-1]
    expected = got[0] if heads is None else heads, size
    if got != expected:
        raise InputError(
            f"Expected {expected[0]} heads of size {expected[1]}, for which this {provider} was made, got {got[0]} of "
            f"size {got[1]} at {site.name}: use `{provider}.for_model(model)`."
        )
    query, key = site.query.detach(), site.key.detach()
    if key.shape[1] != query.shape[1]:  # grouped-query attention
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query, key


def mean_over(values: Tensor, units: Tensor | None) -> Tensor:
    """The mean of the values that count, 0-d; 0 where none does.

    Args:
        values: any shape.
        units: bool, broadcastable to it; ``None`` means all.
    """
    if units is None:
        return values.mean()
    units = units.expand(values.shape)
    return values.masked_fill(~units, 0.0).sum() / units.sum().clamp(min=1)
