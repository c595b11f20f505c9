"""Helpers of providers that keep the queries of a forward pass for their penalty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import LARGEST_SIZE, whole_number
from attnreg.errors import InputError
from attnreg.regularizers._parts.layers import Depth, LayerwiseProvider, check_queries, hidden_queries
from attnreg.sites import AttentionSite, SiteInfo


class SeesQueries(LayerwiseProvider):
    """A provider that reads queries, and keeps those of a forward pass, by layer, until the step ends."""

    draws_in_prepare = False  # `prepare` only forgets the latest pass

    def __init__(self, num_layers: Depth, head_size: int) -> None:
        super().__init__(num_layers)
        self.head_size = whole_number("head_size", head_size, most=LARGEST_SIZE)
        self._seen: dict[int, Any] = {}

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        super().check(sites, model)
        check_queries(type(self).__name__, sites, self.head_size)

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        self._seen = {}

    @override
    def step(self) -> None:
        self._seen = {}

    def _queries_of(self, site: AttentionSite, heads: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a site's queries and keys, both ``(B, H, ..., D)``, without gradients; ``heads`` is the expected H."""
        provider = type(self).__name__
        if site.query is None or site.key is None:
            raise hidden_queries(provider, site.name)
        got = site.query.shape[1], site.query.shape[-1]
        expected = got[0] if heads is None else heads, self.head_size
        if got != expected:
            raise InputError(
                f"This {provider} was made for {expected[0]} heads of size {expected[1]}, but {site.name} has {got[0]} "
                f"of size {got[1]}: use `{provider}.for_model(model)`."
            )
        query, key = site.query.detach(), site.key.detach()
        if key.shape[1] != query.shape[1]:  # grouped-query attention
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return query, key


def mean_over(values: Tensor, units: Tensor | None) -> Tensor:
    """Return the mean of the values at valid units (``None`` means all), 0-d; 0 if there are none."""
    if units is None:
        return values.mean()
    units = units.expand(values.shape)
    return values.masked_fill(~units, 0.0).sum() / units.sum().clamp(min=1)
