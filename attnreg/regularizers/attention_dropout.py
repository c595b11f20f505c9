"""Dropout of attention: of single weights or scores, also by a schedule, of windows, or of whole keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo, functional
from attnreg.arguments import Probability, one_of, probability, true_or_false, whole_number
from attnreg.errors import InputError
from attnreg.functional.seeded import on_device
from attnreg.regularizer.abilities import never_stepped
from attnreg.regularizer.containers import Knots, Line
from attnreg.sites import check_shared_keys

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


Mode = Literal["element", "column"]

LARGEST_WINDOW = 4096  # a row draws window - 1 more seeds than it has keys


class DropAttention(MaskProvider):
    r"""Drop windows of attention weights or of whole keys, and renormalize each row to sum to 1.

    .. math:: \begin{aligned} & A'_{ij} = \frac{A_{ij} M_{ij}}{\sum_k A_{ik} M_{ik}}, \\ & M_{ij} = 0 \text{ if any of }
        s_{i, j-w+1}, \dots, s_{ij} \text{ is } 1, \\ & s_{ij} \sim \mathrm{Bernoulli}(p / w) \end{aligned}

    A key is dropped with probability :math:`1 - (1 - p/w)^w`, which is p for w = 1 and a little less for wider windows,
    because they may overlap. Windows may begin before the first key, so all keys have the same rate. A row whose valid
    keys are all dropped becomes uniform over them. No gradient passes through the sum that divides a row, which is our
    reading of the paper. :class:`attnreg.AttentionDropout`, in contrast, drops single weights or scores.

    Args:
        p: drop probability.
        mode: ``"element"`` (every row draws other keys) or ``"column"`` (all rows of a head drop the same keys).
        window: w, the number of neighbouring keys that a seed s drops, beginning with the key at the seed.

    Shape:
        masks are ``(B, H, Q, K)``, or ``(B, H, 1, K)`` for columns; bool, ``True`` = kept.

    Reference:
        DropAttention (arXiv 1907.11065): DropAttention(e) and DropAttention(c), normalised rescaling.

    Example:
        >>> mask = DropAttention(0.3, mode="column", window=2)(AttentionSite(shape=(2, 4, 8, 8)))
        >>> mask.normalized.shape, mask.detach_sum
        (torch.Size([2, 4, 1, 8]), True)
    """

    schedulable = ("p",)

    def __init__(self, p: float, mode: Mode = "element", window: int = 1) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.mode = one_of("mode", mode, get_args(Mode))
        self.window = whole_number("window", window, most=LARGEST_WINDOW)

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if self.mode == "column":
            check_shared_keys("DropAttention(mode='column') drops a key for all queries", sites)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        batch, heads, queries, keys = site.shape
        by_query = self.mode == "element"
        shape = batch, heads, queries if by_query else 1, keys
        uniform = site.uniform((*shape[:-1], keys + self.window - 1), by_query=by_query)
        keep = functional.sample_windows(uniform, self.p, self.window)
        return Mask(normalized=keep, detach_sum=True)


class DropKey(MaskProvider):
    r"""Drop attention scores, or whole keys for all queries or heads, before the softmax.

    .. math:: \tilde S_{bhqk} = -\infty \text{ if } M_{bhqk} = 0, \quad M_{bhqk} \sim \mathrm{Bernoulli}(1 - p)

    As in the paper, every query of every head draws other keys, which equals :class:`attnreg.AttentionDropout` with
    ``placement="scores"``. With ``share_queries``, a key is dropped for all queries at once; with ``share_heads``,
    for all heads. The paper's rate that falls with depth is
    ``Scheduled(DropKey(), over="depth", p=[(0, 0.3), (1, 0)])``; its blocks of neighbouring patches are not included.

    Args:
        p: drop probability.
        share_heads: whether all heads share one draw.
        share_queries: whether all queries share one draw.

    Shape:
        scores are ``(B, H, Q, K)``, with 1 for H or Q where they share a draw.

    Reference:
        DropKey for Vision Transformer (CVPR 2023, arXiv 2208.02646).

    Example:
        >>> DropKey(0.5, share_queries=True)(AttentionSite(shape=(2, 4, 8, 8))).scores.shape
        torch.Size([2, 4, 1, 8])
    """

    schedulable = ("p",)

    def __init__(self, p: Probability = 0.1, share_heads: bool = False, share_queries: bool = False) -> None:
        super().__init__()
        self.p = probability("p", p)
        self.share_heads = true_or_false("share_heads", share_heads)
        self.share_queries = true_or_false("share_queries", share_queries)

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if self.share_queries:
            check_shared_keys("DropKey(share_queries=True) drops a key for all queries", sites)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        batch, heads, queries, keys = site.shape
        shape = batch, 1 if self.share_heads else heads, 1 if self.share_queries else queries, keys
        return site.dropping(self.p, shape, by_query=not self.share_queries)


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
            raise InputError(f"Expected one schedule, or one per layer ({layers}), got {len(self._lines)}.")

    @override
    def why_asleep(self, passes: int) -> str | None:
        return never_stepped(self, self.steps, passes) if any(line.moves for line in self._lines) else None

    @override
    def step(self) -> None:
        self.steps += 1
        self._update()

    def _update(self) -> None:
        progress = int(self.steps) / self.total_steps
        self.rates.copy_(on_device([line(progress) for line in self._lines], self.rates.device))


def _per_layer(schedule: Knots | Sequence[Knots]) -> list[Knots]:
    try:
        single = isinstance(schedule[0][0], (int, float))
    except (TypeError, IndexError, KeyError):
        raise InputError(f"Expected `schedule` to be a list of (progress, p) knots, got {schedule!r}.") from None
    return [schedule] if single else list(schedule)  # type: ignore[list-item, arg-type]
