"""DropAttention: attention weights dropped in windows or columns, rows that sum to 1 again."""

from __future__ import annotations

from typing import Literal, get_args

from typing_extensions import override

from attnreg import functional
from attnreg.arguments import one_of, probability, true_or_false, whole_number
from attnreg.masks import AttentionSite, Mask
from attnreg.provider.base import MaskProvider

Mode = Literal["element", "column"]

LARGEST_WINDOW = 4096  # each row draws that many seeds, besides one per key


class DropAttention(MaskProvider):
    r"""Drop attention weights, single ones or whole key columns, in windows of neighbouring keys; rescale the rest.

    .. math::
        A'_{ij} = \frac{A_{ij} M_{ij}}{\sum_k A_{ik} M_{ik}}, \qquad M_{ij} = 0 \text{ if any of }
        s_{i, j-w+1}, \dots, s_{ij} \text{ is } 1, \qquad s_{ij} \sim \mathrm{Bernoulli}(p / w)

    A seed s drops the w keys that begin with it, so that a key is dropped with probability
    :math:`1 - (1 - p/w)^w`: p for single keys, a little less for windows, which may overlap. Windows may begin before
    the first key, so that the first keys are dropped as often as all others. ``mode="column"`` draws one row of seeds
    for all queries of a head. A row of which everything is dropped becomes uniform over its valid keys.

    Args:
        p: drop probability.
        mode: ``"element"``, each row by itself, or ``"column"``, the same keys in all rows of a head.
        window: w, number of neighbouring keys that are dropped together.
        gradient_through_sum: let the gradient pass through the sum that rows are divided by, which is then the same as
            dropping scores before the softmax. By default the sum counts as a constant, which is how we read the paper.

    Shape:
        masks are ``(B, H, Q, K)``, or ``(B, H, 1, K)`` for columns; bool, ``True`` = kept.

    Raises:
        ValueError: if ``p`` is outside ``[0, 1]``, ``mode`` is neither of the two, or ``window`` is below 1.

    Reference:
        DropAttention (arXiv 1907.11065): DropAttention(e) and DropAttention(c), normalised rescaling.

    Example:
        >>> import torch
        >>> mask = DropAttention(0.3, mode="column", window=2)(AttentionSite(shape=(2, 4, 8, 8)))
        >>> mask.normalized.shape, mask.detach_sum
        (torch.Size([2, 4, 1, 8]), True)
    """

    schedulable = ("p",)

    def __init__(
        self, p: float, mode: Mode = "element", window: int = 1, *, gradient_through_sum: bool = False
    ) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.mode = one_of("mode", mode, get_args(Mode))
        self.window = whole_number("window", window, most=LARGEST_WINDOW)
        self.gradient_through_sum = true_or_false("gradient_through_sum", gradient_through_sum)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        batch, heads, queries, keys = site.shape
        rows = queries if self.mode == "element" else 1
        keep = functional.sample_windows((batch, heads, rows, keys), self.p, self.window, device=site.device)
        # Dropped scores have the same values and gradients as rescaled weights, in the fused kernel.
        return Mask(scores=keep) if self.gradient_through_sum else Mask(normalized=keep, detach_sum=True)
