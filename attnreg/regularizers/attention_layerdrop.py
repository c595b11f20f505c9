"""AttentionLayerDrop: drop the attention scores of whole layers."""

from __future__ import annotations

from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider
from attnreg.arguments import Probability, probability


class AttentionLayerDrop(MaskProvider):
    r"""Make random layers attend uniformly, by dropping all their scores.

    .. math:: A_{ij} = 1 / n_{\text{valid}} \text{ in a dropped layer}

    Each forward pass drops each layer with probability p. If the model calls torch's fused attention or
    ``nn.MultiheadAttention``, a dropped layer does not compute :math:`QK^\top`; Q and K then get zero gradients, as
    distributed data parallel needs. :class:`attnreg.LayerDrop`, in contrast, skips whole blocks.

    Args:
        p: probability of dropping a layer's attention scores.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 4 and Section 7.1; LayerDrop (arXiv 1909.11556) for whole layers.

    Example:
        >>> AttentionLayerDrop(p=1.0)(AttentionSite(shape=(2, 4, 8, 8)))
        Mask(scores=tensor(False), weights=None)
    """

    schedulable = ("p",)
    decides_for_batch = True

    def __init__(self, p: Probability = 0.05) -> None:
        super().__init__()
        self.p = probability("p", p)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        # Draw on the CPU, where the injection layer can read the decision without waiting for the device.
        return Mask(scores=site.draws.keep((), self.p))
