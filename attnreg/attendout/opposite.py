"""The provider of antithetic masks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from typing_extensions import override

from attnreg.masks import Mask
from attnreg.regularizer.providers import MaskProvider
from attnreg.sites import AttentionSite


class DrawsOpposites(Protocol):
    """A Generator with masks and their opposites."""

    opposite_keep: Tensor | None

    def mask_of(self, site: AttentionSite, keep: Tensor | None) -> Mask | None:
        """Return the mask of a site from masks of all layers."""


class Opposite(MaskProvider):
    """Mask another model with the opposites of a G-Net's latest masks.

    The G-Net is not a submodule: its parameters are saved and learned with the model that it masks itself.

    Args:
        generator: the G-Net, on which ``sample_opposites`` is called before each forward pass.
    """

    def __init__(self, generator: DrawsOpposites) -> None:
        super().__init__()
        self._generator = (generator,)  # in a tuple, because as an attribute it would be a submodule

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        return self._generator[0].mask_of(site, self._generator[0].opposite_keep)
