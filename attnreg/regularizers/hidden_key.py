"""HiddenKey: dropout of whole keys and of hidden states."""

from __future__ import annotations

from attnreg import DropKey, HiddenDropout
from attnreg.arguments import Probability, probability
from attnreg.regularizer.base import Container


class HiddenKey(Container):
    r"""Drop whole keys of attention, and single values of hidden states.

    .. math:: \text{HiddenKey} = \underbrace{\text{DropKey, the same keys for all queries}}_{\text{attention}} \;\&\;
        \underbrace{\text{HiddenDropout of elements}}_{\text{hidden states}}

    The paper adds a KL loss between two passes, :class:`attnreg.training.RDrop`; the recipe ``hiddenkey`` has both.

    Args:
        p: probability of dropping a key, and of dropping a value.

    Reference:
        LoRA Meets Dropout under a Unified Framework (ACL Findings 2024, arXiv 2403.00812). It drops the hidden states
        of the feed-forward part; here, they are those at the output of each block.

    Example:
        >>> HiddenKey(0.2).together.providers[0]
        DropKey(p=0.2, share_heads=False, share_queries=True)
    """

    def __init__(self, p: Probability = 0.1) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.together = DropKey(p, share_queries=True) & HiddenDropout(p)
