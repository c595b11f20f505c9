"""Attention LayerDrop."""

from __future__ import annotations

import torch

from attnreg.masks import AttentionSite, Mask
from attnreg.provider import MaskProvider
from attnreg.providers._arguments import probability


class AttentionLayerDrop(MaskProvider):
    r"""Drop all attention scores of a whole layer at once, each layer with probability p at each forward pass.

    .. math:: A_{ij} = 1 / n_{\text{valid}} \text{ in a dropped layer}

    so that its output is the mean of V over the valid keys. :math:`QK^\top` is not computed where the model calls
    torch's fused attention or ``nn.MultiheadAttention``. Q and K stay in the autograd graph with zero gradients, which
    distributed data parallel needs.

    Args:
        p: probability of dropping a layer.

    Raises:
        ValueError: if ``p`` is outside ``[0, 1]``.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 4; LayerDrop (arXiv 1909.11556) for whole layers.

    Example:
        >>> AttentionLayerDrop(p=1.0)(AttentionSite(shape=(2, 4, 8, 8)))
        Mask(scores=tensor(False), weights=None)
    """

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.p = probability("p", p)

    def forward(self, site: AttentionSite) -> Mask | None:  # noqa: D102
        # Drawn on the CPU, where the injection layer can look at it without waiting for the device.
        return Mask(scores=torch.rand(()) >= self.p)
