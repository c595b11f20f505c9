"""DropHead, at a constant or a scheduled rate."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from attnreg import functional
from attnreg.arguments import one_of, probability, whole_number
from attnreg.errors import InputError
from attnreg.masks import AttentionSite, Mask
from attnreg.provider.asleep import never_stepped
from attnreg.provider.base import MaskProvider

Schedule = Literal["constant", "v"]


class DropHead(MaskProvider):
    r"""Drop whole attention heads, each of a sample and layer with probability p, and scale up the others.

    .. math:: A_{bh} \leftarrow \xi_{bh} \frac{H}{\sum_{h'} \xi_{bh'}} A_{bh}, \quad
              \xi_{bh} \sim \mathrm{Bernoulli}(1 - p_t), \quad \xi_b \ne 0

    The factors of a sample sum up to H, and each is 1 on average. The paper leaves open what becomes of a sample whose
    heads are all drawn to be dropped (H / 0); here one of them, each as likely as the others, is kept.

    With ``schedule="v"`` the rate falls linearly from ``p`` to 0 at progress ``turn`` and rises linearly to ``end``:

    .. math:: p_t = p \,(1 - \tfrac{x}{c}) \text{ for } x \le c, \quad
              p_{end}\, \tfrac{x - c}{1 - c} \text{ for } x > c, \qquad x = \min(t / T, 1)

    where :meth:`step` advances t and c is ``turn``.

    Args:
        p: drop probability, with a schedule the one at its start.
        schedule: ``"constant"`` or ``"v"``.
        total_steps: T, the number of optimizer steps from progress 0 to 1; needed by ``"v"``.
        end: drop probability at the end of ``"v"``; ``p`` by default, as in the paper's experiments.
        turn: progress at which the rate of ``"v"`` is 0.

    Shape:
        weights are ``(B, H, 1, 1)``.

    Raises:
        ValueError: if an argument is out of range, or ``"v"`` has no ``total_steps``.

    Reference:
        Scheduled DropHead: A Regularization Method for Transformer Models (EMNLP Findings 2020, arXiv 2004.13342).

    Example:
        >>> provider = DropHead(0.2, schedule="v", total_steps=4)
        >>> for _ in range(4):
        ...     provider.step()
        ...     print(round(float(provider.rate), 2))
        0.1
        0.0
        0.1
        0.2
        >>> DropHead(1.0)(AttentionSite(shape=(2, 4, 8, 8))).weights.sum(1).flatten()
        tensor([4., 4.])
    """

    steps: Tensor
    rate: Tensor

    def __init__(
        self,
        p: float = 0.2,
        schedule: Schedule = "constant",
        total_steps: int | None = None,
        end: float | None = None,
        turn: float = 0.5,
    ) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.schedule = one_of("schedule", schedule, get_args(Schedule))
        if schedule == "v" and total_steps is None:
            raise InputError('Expected `total_steps` for `schedule="v"`, got None.')
        if not 0 < turn < 1:
            raise InputError(f"Expected `turn` to be a progress in (0, 1), got {turn!r}.")
        self.total_steps = None if total_steps is None else whole_number("total_steps", total_steps)
        self.end = None if end is None else probability("end", end)
        self.turn = turn
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("rate", torch.zeros(()))
        self._update()

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        keep = functional.sample_heads(self.rate.to(site.device), site.shape[:2], device=site.device)
        return Mask(weights=functional.rescaled_heads(keep)[..., None, None].to(site.dtype))

    def why_asleep(self, passes: int) -> str | None:
        """See :class:`attnreg.provider.asleep.MaySleep`."""
        moves = self.schedule != "constant"
        return never_stepped("DropHead", self.steps, passes) if moves else None

    @override
    def step(self) -> None:
        self.steps += 1
        self._update()

    def _update(self) -> None:
        if self.schedule == "constant":
            self.rate.fill_(self.p)
        else:
            assert self.total_steps is not None
            end = self.p if self.end is None else self.end
            progress = int(self.steps) / self.total_steps
            self.rate.fill_(float(np.interp(progress, [0.0, self.turn, 1.0], [self.p, 0.0, end])))
