"""Restriction of a regularizer to some layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from attnreg.regularizer.base import Container, Regularizer, a_regularizer
from attnreg.sites import Site, SiteInfo, layer_indices, on_layers


class OnLayers(Container):
    """Let a regularizer act on some layers only, in every stack that it is attached to.

    Args:
        provider: the regularizer to restrict.
        layers: layer indices; negative ones count from the last layer.

    Example:
        >>> from attnreg import AttentionLayerDrop, AttentionSite
        >>> first = OnLayers(AttentionLayerDrop(p=1.0), [0])
        >>> [first(AttentionSite(shape=(1, 1, 2, 2), layer=i, num_layers=2)) for i in range(2)]
        [Mask(scores=tensor(False), weights=None), None]
    """

    def __init__(self, provider: Regularizer, layers: Sequence[int]) -> None:
        super().__init__()
        self.provider = a_regularizer(provider, "OnLayers")
        self.layers = layer_indices(layers, "OnLayers")
        self._is_inside = False  # another OnLayers, which may leave some of its layers out
        for each in provider.parts():
            if isinstance(each, OnLayers):
                each._is_inside = True

    @override
    def inner(self, site: Site | None = None) -> list[Regularizer]:
        return super().inner() if site is None or site.is_among(self.layers) else []

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        layers = self.layers
        if self._is_inside and any(site.is_among(layers) for site in sites):
            depth = max(site.num_layers for site in sites)
            layers = [i for i in layers if not -depth <= i < depth or any(site.is_among([i]) for site in sites)]
        self.provider.check(on_layers(sites, layers, "OnLayers"), model)
