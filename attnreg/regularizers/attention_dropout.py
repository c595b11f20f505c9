"""Plain attention dropout, on the weights or on the scores."""

from __future__ import annotations

from typing import Literal, get_args

from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider
from attnreg.arguments import Probability, one_of, probability, true_or_false

Placement = Literal["weights", "scores"]


class AttentionDropout(MaskProvider):
    r"""Drop each attention weight or score independently, with a constant probability.

    :class:`attnreg.DropAttention`, in contrast, drops windows or whole keys and renormalizes.

    .. math:: \begin{aligned} & \text{weights: } A = \mathrm{softmax}(S) \odot M / (1 - p), \\
        & \text{scores: } A = \mathrm{softmax}(S \text{ where } M \text{ else} -\infty), \\
        & M_{bhqk} \sim \mathrm{Bernoulli}(1 - p) \end{aligned}

    Args:
        p: drop probability.
        placement: what to drop: ``"weights"`` (after the softmax, as most models do) or ``"scores"`` (before it).
        rescale: divide kept weights by :math:`1 - p`; ignored for scores.

    Reference:
        AttendOut (arXiv 2104.04692), Eq. 2 (there without the factor) and Eq. 3.

    Example:
        >>> AttentionDropout(0.1, placement="everywhere")
        Traceback (most recent call last):
            ...
        attnreg.errors.InputError: Expected `placement` to be one of weights, scores, got 'everywhere'.
    """

    schedulable = ("p",)

    def __init__(self, p: Probability = 0.1, placement: Placement = "weights", rescale: bool = True) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.placement = one_of("placement", placement, get_args(Placement))
        self.rescale = true_or_false("rescale", rescale)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        if self.placement == "scores":
            return site.dropping(self.p)
        return site.dropping_weights(self.p, rescale=self.rescale)
