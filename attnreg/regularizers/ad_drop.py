"""AD-DROP as its paper has it: attribution-driven dropout in every other epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnreg.arguments import Count, Index, Probability
from attnreg.attribution import Attributions
from attnreg.regularizer.containers import CrossTuning
from attnreg.regularizers.attribution import AttributionProvider


class ADDrop(CrossTuning):
    r"""Fine-tune with AD-DROP: plain epochs alternate with epochs of attribution-driven dropout (cross-tuning).

    It is ``CrossTuning(AttributionProvider(p, q, layers=layers), every, offset)``, the method of the paper under one
    name. Write this long form to schedule p or q, or to compose the masks with another regularizer within an epoch.
    Call ``on_epoch`` at the start of every epoch (training methods and ``AttnRegCallback`` do).

    Args:
        p: share of the valid keys of a query that are candidates.
        q: probability of dropping a candidate.
        layers: layer indices; negative ones count from the last layer (default: all attached layers).
        every: act in one of every N epochs.
        offset: which of these epochs, from 0; by default the first epoch is plain.
        options: further arguments of :class:`attnreg.AttributionProvider`, such as ``method="integrated_gradients"``.

    Raises:
        InputError: if an argument is out of range.

    Reference:
        AD-DROP: Attribution-Driven Dropout for Robust Language Model Fine-Tuning (NeurIPS 2022, arXiv 2210.05883).

    Example:
        >>> regularizer = ADDrop(p=0.3, q=0.5, layers=[0])
        >>> for epoch in range(4):
        ...     regularizer.on_epoch(epoch)
        ...     print(epoch, regularizer.active)
        0 False
        1 True
        2 False
        3 True
    """

    provider: AttributionProvider

    def __init__(
        self,
        p: Probability = 0.3,
        q: Probability = 0.1,
        layers: Sequence[int] | None = None,
        every: Count = 2,
        offset: Index = 1,
        **options: Any,
    ) -> None:
        super().__init__(AttributionProvider(p, q, layers=layers, **options), every, offset)
        self.p, self.q, self.layers = self.provider.p, self.provider.q, self.provider.layers
        self.options = options

    @property
    def attributions(self) -> Attributions:
        """Attributions ``(B, H, Q, K)`` of the latest batch, by ``"<stack>.<layer>"``."""
        return self.provider.attributions
