"""Bernoulli dropout of attention scores at a scheduled rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo
from attnreg.arguments import probability, whole_number
from attnreg.errors import InputError
from attnreg.regularizer.abilities import never_stepped
from attnreg.regularizer.scheduled import Knots, Line


class BernoulliScheduleProvider(MaskProvider):
    r"""Drop each attention score independently, at a rate that a schedule changes over training.

    .. math:: \tilde S_{bhqk} = -\infty \text{ if } M_{bhqk} = 0, \quad M_{bhqk} \sim \mathrm{Bernoulli}(1 - p_l(t / T))

    The rate :math:`p_l` of layer l is piecewise linear in training progress :math:`t / T`, which ``step()`` advances.

    Args:
        schedule: knots ``(progress, p)``, as in :class:`attnreg.Scheduled`, for all layers; or one such list per layer.
        total_steps: T, the number of optimizer steps from progress 0 to 1.

    Reference:
        AttendOut (arXiv 2104.04692), Section 7.2.

    Example:
        >>> provider = BernoulliScheduleProvider([(0, 0.6), (1, 0.2)], total_steps=4)
        >>> provider.step()
        >>> provider.step()
        >>> provider.rates
        tensor([0.4000])
    """

    steps: Tensor
    rates: Tensor

    def __init__(self, schedule: Knots | Sequence[Knots], total_steps: int) -> None:
        super().__init__()
        self.schedule = schedule
        self.total_steps = whole_number("total_steps", total_steps)
        self._lines = [Line(knots) for knots in _per_layer(schedule)]
        for line in self._lines:
            for p in line.values:
                probability("p of a knot", p)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("rates", torch.zeros(len(self._lines)))
        self._update()

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        return site.dropping(self.rates[site.layer if len(self.rates) > 1 else 0])

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        layers = max(site.num_layers for site in sites)
        if len(self._lines) not in (1, layers):
            raise InputError(
                f"Expected one schedule, or one for each of the model's {layers} layers, got {len(self._lines)}."
            )

    @override
    def why_asleep(self, passes: int) -> str | None:
        return never_stepped(self, self.steps, passes) if any(line.moves for line in self._lines) else None

    @override
    def step(self) -> None:
        self.steps += 1
        self._update()

    def _update(self) -> None:
        progress = int(self.steps) / self.total_steps
        self.rates.copy_(torch.tensor([line(progress) for line in self._lines]))


def _per_layer(schedule: Knots | Sequence[Knots]) -> list[Knots]:
    try:
        single = isinstance(schedule[0][0], (int, float))
    except (TypeError, IndexError, KeyError):
        raise InputError(f"Expected `schedule` to be a list of (progress, p) knots, got {schedule!r}.") from None
    return [schedule] if single else list(schedule)  # type: ignore[list-item, arg-type]
