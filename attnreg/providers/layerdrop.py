"""LayerDrop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import probability
from attnreg.errors import InputError
from attnreg.masks import AttentionSite, Mask, SiteInfo
from attnreg.provider.base import MaskProvider


class LayerDrop(MaskProvider):
    r"""Skip whole Transformer blocks, each with probability p at each forward pass.

    .. math:: x_{l+1} = x_l \text{ with probability } p, \qquad x_{l+1} = \mathrm{block}_l(x_l) \text{ otherwise}

    One decision for the whole batch, nothing is rescaled, and in eval mode all blocks run. A skipped block is not
    computed, unless more than hidden states comes out of it (T5's position bias) or torch compiles. Its parameters get
    zero gradients, which distributed data parallel needs; its attention counts as dropped.

    Args:
        p: probability of skipping a block.

    Raises:
        ValueError: if ``p`` is outside ``[0, 1]``; or, when attached, if there is no self-attention among the sites or
            no block around one.

    Reference:
        LayerDrop (Fan, Grave, Joulin, ICLR 2020, arXiv 1909.11556); a baseline of AttendOut (arXiv 2104.04692).

    Example:
        >>> import attnreg
        >>> from torch import nn
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> x = torch.randn(4, 3, 8)
        >>> with attnreg.attach(model, LayerDrop(p=1.0)):
        ...     torch.equal(model(x), x)
        True
    """

    schedulable = ("p",)

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.p = probability("p", p)

    def forward(self, site: AttentionSite) -> Mask | None:
        """Nothing: what is not skipped runs as it is."""
        return None

    def skips_block(self, site: SiteInfo) -> Tensor | None:
        """See :class:`attnreg.provider.protocols.SkipsBlocks`."""
        # Drawn on the CPU, where the injection layer can look at it without waiting for the device.
        return torch.rand(()) < self.p

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if all(site.stack == "cross" for site in sites):
            raise InputError("Expected self-attention, whose block can be skipped, got cross-attention alone.")
