"""Whole layers dropped: Transformer blocks (LayerDrop), or their attention scores (AttentionLayerDrop)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo
from attnreg.arguments import Probability, probability
from attnreg.draws import Draws
from attnreg.errors import InputError


class LayerDrop(MaskProvider):
    r"""Skip whole Transformer blocks, each with probability p in each forward pass.

    .. math:: x_{l+1} = x_l \text{ with probability } p, \qquad x_{l+1} = \mathrm{block}_l(x_l) \text{ otherwise}

    One decision holds for the whole batch, and nothing is rescaled. A skipped block is not computed, unless it returns
    more than hidden states (such as T5's position bias) or torch compiles the model. Its parameters get zero gradients,
    as distributed data parallel needs, and its attention counts as dropped. :class:`attnreg.AttentionLayerDrop`, in
    contrast, drops only the attention scores of a layer.

    Args:
        p: probability of skipping a block.

    Reference:
        LayerDrop (Fan, Grave, Joulin, ICLR 2020, arXiv 1909.11556); a baseline of AttendOut (arXiv 2104.04692).

    Example:
        >>> import attnreg, torch
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> x = torch.randn(4, 3, 8)
        >>> with attnreg.attach(model, LayerDrop(p=1.0)):
        ...     torch.equal(model(x), x)
        True
    """

    schedulable = ("p",)
    decides_for_batch = True

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.p = probability("p", p)

    def forward(self, site: AttentionSite) -> Mask | None:
        """Return ``None``: a block that is not skipped runs unchanged."""
        return None

    @override
    def skips_block(self, site: SiteInfo, draws: Draws) -> Tensor | None:
        # Draw on the CPU, where the injection layer can read the decision without waiting for the device.
        return ~draws.keep((), self.p)

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if all(site.stack == "cross" for site in sites):
            raise InputError("LayerDrop needs self-attention, but all sites are cross-attention: choose `stacks`.")


class AttentionLayerDrop(MaskProvider):
    r"""Make random layers attend uniformly, by dropping all their scores.

    .. math:: A_{ij} = 1 / n_{\text{valid}} \text{ in a dropped layer}

    A forward pass drops every layer with probability p. If the model calls torch's fused attention or
    ``nn.MultiheadAttention``, a dropped layer without sinks does not compute :math:`QK^\top`; Q and K then get zero
    gradients, as distributed data parallel needs. :class:`attnreg.LayerDrop`, in contrast, skips whole blocks.

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
