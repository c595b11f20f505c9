"""Regularizers that read the queries of a forward pass, and keep them for their penalty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import LARGEST_SIZE, whole_number
from attnreg.errors import InputError
from attnreg.regularizers._parts.layers import Depth, LayerwiseProvider, misfit
from attnreg.sites import AttentionSite, SiteInfo


class SeesQueries(LayerwiseProvider):
    """A regularizer that reads queries, and keeps those of a forward pass, by layer, until the step ends."""

    draws_in_prepare = False  # `prepare` only forgets the latest pass

    def __init__(self, num_layers: Depth, head_size: int) -> None:
        super().__init__(num_layers)
        self.head_size = whole_number("head_size", head_size, most=LARGEST_SIZE)
        self._seen: dict[int, Any] = {}

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        super().check(sites, model)
        _check_queries(type(self).__name__, sites, self.head_size)

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
            raise _hidden_queries(provider, site.name)
        got = site.query.shape[1], site.query.shape[-1]
        expected = got[0] if heads is None else heads, self.head_size
        if got != expected:
            made = f"made for {expected[0]} heads of size {expected[1]}"
            raise misfit(provider, f"{made}, but {site.name} has {got[0]} of size {got[1]}")
        query, key = site.query.detach(), site.key.detach()
        if key.shape[1] != query.shape[1]:  # grouped-query attention
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return query, key


def head_size_of(found: Sequence[SiteInfo], provider: str) -> int:
    """Return D, the size of the query vectors of all sites, or raise if they differ or are not exposed."""
    _check_queries(provider, found)
    sizes = {site.head_size for site in found if site.head_size is not None}
    if len(sizes) > 1:
        raise InputError(f"The size of queries is not the same in all layers, but {sorted(sizes)}: choose `stacks`.")
    return sizes.pop()


def _check_queries(provider: str, sites: Iterable[SiteInfo], head_size: int | None = None) -> None:
    """Raise if a site exposes only scores, or its queries have another size than ``head_size`` (``None``: any)."""
    for site in sites:
        if not site.shows_queries:
            raise _hidden_queries(provider, site.name)
        if head_size not in (None, site.head_size):
            made = f"made for queries of size {head_size}"
            raise misfit(provider, f"{made}, but {site.name} has size {site.head_size}")


def _hidden_queries(provider: str, site: str) -> InputError:
    """Make the error for a model that computes its attention step by step, so that its queries cannot be read."""
    return InputError(
        f"{provider} needs queries, but {site} exposes only its scores: load the model with "
        "attn_implementation='sdpa', if it supports that."
    )
