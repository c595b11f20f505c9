"""Regularizers around another: on some layers, in some epochs, or with arguments that follow a schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg.arguments import Count, Index, one_of, positive, whole_number
from attnreg.draws import Draws
from attnreg.errors import InputError, did_you_mean
from attnreg.regularizer.abilities import never_stepped
from attnreg.regularizer.base import Container, Regularizer, a_regularizer
from attnreg.sites import Site, SiteInfo, layer_indices, on_layers


class OnLayers(Container):
    """Let a regularizer act on some layers only, in every stack that it is attached to.

    Args:
        provider: the regularizer to restrict.
        layers: layer indices; negative ones count from the last layer.

    Example:
        >>> from attnreg import AttentionLayerDrop, AttentionSite
        >>> first = OnLayers(AttentionLayerDrop(p=1.0), [0])
        >>> [first(AttentionSite(shape=(1, 1, 2, 2), layer=i, num_layers=2)) for i in range(2)]
        [Mask(scores=tensor(False), weights=None), None]
    """

    def __init__(self, provider: Regularizer, layers: Sequence[int]) -> None:
        super().__init__()
        self.provider = a_regularizer(provider, "OnLayers")
        self.layers = layer_indices(layers, "OnLayers")

    @override
    def inner(self, site: Site | None = None) -> list[Regularizer]:
        return super().inner() if site is None or site.is_among(self.layers) else []

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        self.provider.check(on_layers(sites, self.layers, "OnLayers"), model)


class CrossTuning(Container):
    """Use a regularizer in only one of every N epochs.

    Args:
        provider: the regularizer to switch on and off.
        every: act in one of every N epochs; in all others, the attached model runs as the plain model.
        offset: which of these epochs, from 0.

    Reference:
        AD-DROP (NeurIPS 2022, arXiv 2210.05883), Section 1; its official code begins with a plain epoch.

    Example:
        >>> from attnreg import AttentionLayerDrop
        >>> provider = CrossTuning(AttentionLayerDrop(0.5))
        >>> for epoch in range(4):
        ...     provider.on_epoch(epoch)
        ...     print(epoch, provider.active)
        0 False
        1 True
        2 False
        3 True
    """

    current: Tensor

    def __init__(self, provider: Regularizer, every: Count = 2, offset: Index = 1) -> None:
        super().__init__()
        self.provider = a_regularizer(provider, "CrossTuning")
        self.every = whole_number("every", every)
        self.offset = whole_number("offset", offset, least=0)
        if offset >= every:
            raise InputError(f"Expected `offset` to be below `every`, {every}, got {offset}.")
        self.first_epoch = offset
        self.epoch = 0
        self._knows_epoch = False
        self.register_buffer("current", torch.zeros((), dtype=torch.long))  # the epoch, in checkpoints
        self.register_load_state_dict_post_hook(_read_epoch)

    @property
    def _is_on(self) -> bool:  # type: ignore[override]  # read-only
        return self.epoch % self.every == self.offset

    @override
    def why_asleep(self, passes: int) -> str | None:
        if self._knows_epoch or self.every == 1:
            return None
        return (
            f"{type(self).__name__} does not alternate, because it does not know the epoch: call "
            "`provider.on_epoch(epoch)` at the start of every epoch (training methods and AttnRegCallback do)."
        )

    @override
    def on_epoch(self, epoch: int) -> None:
        self.epoch = whole_number("epoch", epoch, least=0)
        self._knows_epoch = True
        self.current.fill_(epoch)
        super().on_epoch(epoch)


def _read_epoch(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, CrossTuning)
    module.epoch = int(module.current)
    module._knows_epoch = True


Knots = Sequence[tuple[float, float]]
Over = Literal["training", "depth"]


class Line:
    """A piecewise linear function through knots ``(progress, value)``, constant before the first and after the last."""

    def __init__(self, knots: Knots) -> None:
        try:
            progress, values = zip(*knots, strict=True)
        except (TypeError, ValueError):
            raise InputError(f"Expected knots (progress, value), such as [(0, 0.3), (1, 0)], got {knots!r}.") from None
        if wrong := [x for x in progress if isinstance(x, bool) or not isinstance(x, Real) or not 0 <= float(x) <= 1]:
            expected = "knots (progress, value), with progress as a share of all steps or of the depth, in [0, 1]"
            raise InputError(f"Expected {expected}, got {wrong[0]!r}.")
        if list(progress) != sorted(set(progress)):
            raise InputError(f"Expected knots in ascending order of progress, got {list(progress)}.")
        self.progress, self.values = list(progress), list(values)

    def __call__(self, progress: float) -> float:
        """Return the value at a progress."""
        if progress <= self.progress[0]:
            return float(self.values[0])
        for (x0, y0), (x1, y1) in itertools.pairwise(zip(self.progress, self.values, strict=True)):
            if progress < x1:
                return (y1 - y0) / (x1 - x0) * (progress - x0) + y0
        return float(self.values[-1])

    @property
    def moves(self) -> bool:
        """Whether the value changes at all."""
        return len(set(self.values)) > 1


class Scheduled(Container):
    r"""Change a regularizer's arguments linearly over training or over the depth of the model.

    .. math::
        \begin{aligned}
        & p(x) \text{ linear between the knots } (x_i, p_i), \\
        & x = t / T \;\text{ or }\; l / (L - 1), \\
        & p(x, t) = p(x) \, (1 - e^{-\gamma t / T}) \text{ with growth } \gamma
        \end{aligned}

    t counts the calls of ``step()``, one per optimizer step; l counts the L layers of a stack, from 0. Scheduled
    DropHead is ``Scheduled(DropHead(), total_steps=T, p=[(0, 0.2), (0.5, 0), (1, 0.2)])``; progressive layer dropping
    to a keep rate of 0.5 is ``Scheduled(LayerDrop(), T, "depth", growth=100, p=[(0, 0.5 / L), (1, 0.5)])``.

    Args:
        provider: the regularizer whose arguments change.
        total_steps: T, the number of optimizer steps from progress 0 to 1; required for ``over="training"`` and growth.
        over: ``"training"`` (progress t / T) or ``"depth"`` (progress from the first to the last layer).
        growth: :math:`\gamma`; values also rise from 0 over training, in T steps to :math:`1 - e^{-\gamma}` of them.
        schedules: one keyword per argument, such as ``p=[(0, 0.3), (1, 0)]``: knots ``(progress, value)``, ascending in
            progress; the value is constant before the first and after the last knot.

    Raises:
        InputError: if there is no argument to change, or only the constructor reads it.

    Reference:
        Scheduled DropHead (EMNLP Findings 2020, arXiv 2004.13342); AttendOut (arXiv 2104.04692), Section 7.2;
        progressive layer dropping (NeurIPS 2020, arXiv 2010.13369), whose :math:`\gamma` is ours over T.

    Example:
        >>> from attnreg import AttentionLayerDrop
        >>> provider = Scheduled(AttentionLayerDrop(), total_steps=4, p=[(0, 0.6), (1, 0.2)])
        >>> for _ in range(2):
        ...     provider.step()
        >>> provider.provider
        AttentionLayerDrop(p=0.4)
    """

    steps: Tensor

    def __init__(
        self,
        provider: Regularizer,
        total_steps: int | None = None,
        over: Over = "training",
        growth: float | None = None,
        **schedules: Knots,
    ) -> None:
        super().__init__()
        self.provider = a_regularizer(provider, "Scheduled")
        self.over = one_of("over", over, get_args(Over))
        self.growth = None if growth is None else positive("growth", growth)
        if (over == "training" or growth is not None) and total_steps is None:
            raise InputError("A schedule over training needs `total_steps`, the number of optimizer steps.")
        self.total_steps = None if total_steps is None else whole_number("total_steps", total_steps)
        self._lines = {name: Line(knots) for name, knots in schedules.items()}
        if repeated := provider._scheduled & schedules.keys():
            raise InputError(f"`{min(repeated)}` of this {type(provider).__name__} follows a schedule: make a new one.")
        _check(self.provider, self._lines, () if growth is None else (0.0,))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        # The share of the values that is reached; a tensor for the same reason as the arguments below.
        self._growth_share = 1.0 if growth is None else torch.zeros((), dtype=torch.float64)
        self.register_load_state_dict_post_hook(_advance)
        if over == "training":  # tensors, so that code is not compiled again for every value
            for name in schedules:
                vars(provider)[name] = torch.zeros((), dtype=torch.float64)
        provider._scheduled |= schedules.keys()
        self._set(0.0)

    @property
    @override
    def config(self) -> dict[str, Any]:
        values: dict[str, Any] = {"provider": self.provider, "total_steps": self.total_steps, "over": self.over}
        values |= {} if self.growth is None else {"growth": self.growth}
        knots = {name: zip(line.progress, line.values, strict=True) for name, line in self._lines.items()}
        return {**values, **{name: [*map(list, pairs)] for name, pairs in knots.items()}}

    @override
    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items() if name != "provider")

    @property
    @override
    def active(self) -> bool:
        return self.provider.active

    @override
    def forward(self, site: Any, states: Tensor | None = None) -> Any:
        try:
            return super().forward(site, states)
        finally:  # gradient checkpointing may end a recomputation inside `forward`
            self._set_at(None)

    @override
    def skip_at(self, site: SiteInfo, draws: Draws) -> Tensor | None:
        try:
            return super().skip_at(site, draws)
        finally:
            self._set_at(None)

    @override
    def inner(self, site: Site | None = None) -> list[Regularizer]:
        self._set_at(site)
        return super().inner()

    def _set_at(self, site: Site | None) -> None:
        """Over depth, set the values of a site; without one, the first layer's, so that code compiles once."""
        if self.over == "depth":
            self._set(0.0 if site is None else site.layer / max(site.num_layers - 1, 1))

    @override
    def step(self) -> None:
        self.steps += 1
        super().step()
        self._advance()

    @override
    def why_asleep(self, passes: int) -> str | None:
        moves = self.over == "training" and any(line.moves for line in self._lines.values())
        return never_stepped(self, self.steps, passes) if moves or self.growth is not None else None

    def _advance(self) -> None:
        progress = int(self.steps) / (self.total_steps or 1)
        if isinstance(self._growth_share, Tensor) and self.growth is not None:
            self._growth_share.fill_(-math.expm1(-self.growth * progress))
        self._set(progress if self.over == "training" else 0.0)

    def _set(self, progress: float) -> None:
        for name, line in self._lines.items():
            if self.over == "training":
                getattr(self.provider, name).fill_(line(progress) * self._growth_share)
            else:
                vars(self.provider)[name] = line(progress) * self._growth_share  # `_check` has checked it


def _advance(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, Scheduled)
    module._advance()


def _check(provider: Regularizer, lines: Mapping[str, Line], start: Sequence[float]) -> None:
    kind = type(provider).__name__
    if not lines:
        raise InputError(f"A schedule needs an argument of {kind} to change, such as p=[(0, 0.3), (1, 0)].")
    for name, line in lines.items():
        if name not in provider.schedulable:
            options = ", ".join(provider.schedulable) or "none"
            raise InputError(
                f"Expected an argument of {kind} that a schedule can change ({options}), got {name!r}."
                f"{did_you_mean(name, provider.schedulable)}"
            )
        for value in (*line.values, *start):
            provider._check_value(name, value)
