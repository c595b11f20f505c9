"""Restriction of a regularizer to some layers or epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import Count, Index, whole_number
from attnreg.errors import InputError
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


class CrossTuning(Container):
    """Use a regularizer in only one of every N epochs.

    Args:
        provider: the regularizer to switch on and off.
        every: act in one of every N epochs; in all others, the attached model runs as the plain model.
        offset: which of these epochs, from 0.

    Reference:
        AD-DROP (NeurIPS 2022, arXiv 2210.05883), Section 1; its official code begins with a plain epoch.

    Example:
        >>> from attnreg import AttentionLayerDrop
        >>> provider = CrossTuning(AttentionLayerDrop(0.5))
        >>> for epoch in range(4):
        ...     provider.on_epoch(epoch)
        ...     print(epoch, provider.active)
        0 False
        1 True
        2 False
        3 True
    """

    current: Tensor

    def __init__(self, provider: Regularizer, every: Count = 2, offset: Index = 1) -> None:
        super().__init__()
        self.provider = a_regularizer(provider, "CrossTuning")
        self.every = whole_number("every", every)
        self.offset = whole_number("offset", offset, least=0)
        if offset >= every:
            raise InputError(f"Expected `offset` to be below `every`, {every}, got {offset}.")
        self.epoch = 0
        self._told = False  # whether the epoch was ever set
        self.register_buffer("current", torch.zeros((), dtype=torch.long))  # the epoch, in checkpoints
        self.register_load_state_dict_post_hook(_read_epoch)

    @property
    @override
    def active(self) -> bool:
        return self.epoch % self.every == self.offset and self.provider.active

    @property
    @override
    def first_epoch(self) -> int:
        return self.offset

    @override
    def why_asleep(self, passes: int) -> str | None:
        if self._told:
            return None
        return (
            "CrossTuning does not alternate, because it was never told the epoch: call `provider.on_epoch(epoch)` at "
            "the start of each epoch (training methods and AttnRegCallback do)."
        )

    @override
    def on_epoch(self, epoch: int) -> None:
        self.epoch = whole_number("epoch", epoch, least=0)
        self._told = True
        self.current.fill_(epoch)
        super().on_epoch(epoch)


def _read_epoch(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, CrossTuning)
    module.epoch = int(module.current)
    module._told = True
