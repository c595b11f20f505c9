"""Measured drop rates: of the latest pass, and on average."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnreg import functional
from attnreg.functional.seeded import is_traced, on_device, transformed
from attnreg.functional.validity import summed
from attnreg.masks import Mask
from attnreg.sites import AttentionSite, Site

POSITIONS = 2**22  # on which rates are measured, if decisions are not in memory
MOST_GROUPS = 8  # sets of sites whose sums are one tensor
Number = Tensor | int | float
Sums = dict[str, tuple[Tensor, int]]  # by site: the sum of its rates, and their number
Groups = dict[tuple[str, ...], tuple[Tensor, int]]  # the same for sites whose rates are added as one tensor


@dataclass(frozen=True, eq=False)
class Count:
    """The number of units at a site, and of dropped ones; units that ``kept`` drops are counted when a rate is read."""

    units: Number  # number of units, 0-d
    dropped: Number = 0  # number of units that are dropped, besides those that `kept` drops, 0-d
    kept: Tensor | None = None  # decisions that several units share: 0 where these units are dropped
    units_per_decision: Number = 1  # broadcastable to `kept`

    def __add__(self, other: Count) -> Count:
        """Count the units of two parts of one attention."""
        a, b = _dropped([self, other])
        return Count(self.units + other.units, a + b)


class DropRates:
    """The share of dropped units per site, by site label ``"<stack>.<layer>"``."""

    def __init__(self) -> None:
        self._sums: Groups = {}
        self._counters: tuple[Tensor, int] | None = None  # numbers to which kernels add, and how many are in use
        self._latest: dict[str, Count] = {}
        self._uncounted = self._latest  # empty once these are in the sums
        self.are_hidden = False  #: whether a pass ran within ``torch.func``, where nothing is measured

    def clear(self) -> None:
        """Forget the latest rates as a forward pass begins, after adding them to the means."""
        if not torch.compiler.is_compiling():
            self.count()
        self.forget()

    def count(self) -> None:
        """Add the latest rates to the running means; of compiled passes, only the latest pass of a step counts."""
        self._sums = _summed(self._sums, self._uncounted)
        self._uncounted = {}

    def forget(self) -> None:
        """Forget the latest rates."""
        self._latest = self._uncounted = {}
        self._counters = None

    @property
    def latest(self) -> dict[str, Tensor]:
        """The rates of the latest pass, 0-d."""
        return dict(zip(self._latest, _rates(self._latest.values()), strict=True))

    def mean(self) -> dict[str, float]:
        """Return the mean rates over all passes so far."""
        totals: dict[str, tuple[float, int]] = {}
        for labels, (total, passes) in _summed(self._sums, self._uncounted).items():
            for label, rate_sum in zip(labels, total.tolist(), strict=True):
                earlier, count = totals.get(label, (0.0, 0))
                totals[label] = earlier + rate_sum, count + passes
        return {label: total / count for label, (total, count) in totals.items()}

    def note(self, site: AttentionSite, kept: Tensor | None, factor: Tensor | None = None, *, quiet: bool) -> None:
        """Record the drop rate of a site: units are dropped where ``kept``, or a factor of the output, is 0."""
        compiles = not quiet and torch.compiler.is_compiling()
        if not (quiet or compiles) and transformed():  # a tensor from within vmap must not outlive it
            self.are_hidden = True
            return
        if factor is not None:
            kept = factor != 0 if kept is None else kept & (factor != 0)
        count = _traced(kept, site) if compiles else _counted(kept, site)
        self.note_count(site, count, adds=site.in_parts)

    def note_mask(self, site: AttentionSite, mask: Mask | None, *, quiet: bool) -> None:
        """Record the drop rate of a mask, whose decisions may not be in memory."""
        if mask is not None and mask.scores is not None and mask.drops_layer and not is_traced():
            self.note(site, mask.scores, quiet=quiet)
        elif mask is None or not (mask.drawn or mask.drawn_weights) or is_traced():
            self.note(site, None if mask is None else mask.units_kept, quiet=quiet)
        else:
            self.note_count(site, _on_some_rows(mask, site), adds=site.in_parts)

    def note_count(self, site: Site, count: Count, *, adds: bool = False) -> None:
        """Record the dropped units of a site; with ``adds``, of one more part of its attention."""
        label = site.label
        self._latest[label] = self._latest[label] + count if adds and label in self._latest else count

    def counter(self, site: AttentionSite, factor: Tensor | None, sites: int) -> tuple[Tensor, Tensor | None]:
        """Return a counter, ``(1,)``, to which a kernel adds the units that it drops, and the rows that it counts.

        Units whose row ``factor`` is 0 are counted here. The pass has about as many ``sites``.
        """
        counter, rows = self.counters(1, sites, site.device), site.once("rows", site.rows)
        count = _counted(factor, site)
        count = Count(count.units, counter[0], count.kept, count.units_per_decision)
        self.note_count(site, count, adds=site.in_parts)
        if factor is not None:
            kept = factor.detach() != 0
            rows = kept if rows is None else rows & kept
        return counter, rows

    def counters(self, number: int, room: int, device: torch.device) -> Tensor:
        """Return zeros, int64, to which a kernel adds; they are a slice of a tensor of ``room`` such numbers."""
        if torch.compiler.is_compiling():
            return torch.zeros(number, dtype=torch.int64, device=device)
        counters, used = self._counters or (None, 0)
        aligned = number + number % 2  # to 16 bytes: a kernel is compiled again, and looked up, for others
        if counters is None or used + aligned > counters.shape[0] or counters.device != device:
            counters, used = torch.zeros(max(1, room // number) * aligned, dtype=torch.int64, device=device), 0
        self._counters = counters, used + aligned
        return counters[used : used + number]

    def note_skipped(self, site: Site, skip: Tensor | None) -> None:
        """Record a drop rate of 1 for a site whose block is skipped, if ``skip`` (0-d, ``None``: always) is true."""
        if skip is None:
            self._latest[site.label] = Count(1, 1)
            return
        count = self._latest.get(site.label)
        (rate,) = [torch.zeros((), device=skip.device)] if count is None else _rates([count])
        self._latest[site.label] = Count(1, torch.where(skip, torch.ones_like(rate), rate))


def added(sums: Sums, rates: Mapping[str, Tensor]) -> Sums:
    """Return sums to which the rates of sites are added."""
    old = {label: sums.get(label, (torch.zeros_like(rate), 0)) for label, rate in rates.items()}
    return {**sums, **{label: (old[label][0] + rate.detach(), old[label][1] + 1) for label, rate in rates.items()}}


def _summed(sums: Groups, counts: Mapping[str, Count]) -> Groups:
    """Return sums to which the rates of sites are added: as one tensor, if earlier passes counted the same sites."""
    if not counts:
        return sums
    labels, rates = tuple(counts), _rates(counts.values()).detach()
    groups = {labels: rates}
    if labels not in sums and len(sums) >= MOST_GROUPS:  # a model that leaves out layers at random
        groups = {(label,): rate for label, rate in zip(labels, rates.split(1), strict=True)}
    old = {group: sums.get(group, (torch.zeros_like(rate), 0)) for group, rate in groups.items()}
    return {**sums, **{group: (_plus(old[group][0], rate), old[group][1] + 1) for group, rate in groups.items()}}


def _plus(a: Tensor, b: Tensor) -> Tensor:
    """Add rates of two passes, which are on a CPU if a pass counted nothing on the device of its sites."""
    return a + b.to(a.device) if b.is_cpu else a.to(b.device) + b


def _rates(counts: Collection[Count]) -> Tensor:
    """Return the rates of sites, with as few operations as possible."""
    dropped, units = _dropped([*counts]), [count.units for count in counts]
    numbers = {*map(type, dropped), *map(type, units)} <= {int, float}
    device = None if numbers else next(number.device for number in (*dropped, *units) if isinstance(number, Tensor))
    return _stacked(dropped, device) / _stacked(units, device).clamp(min=1)


def _stacked(numbers: Sequence[Number], device: torch.device | None) -> Tensor:
    if {*map(type, numbers)} <= {int, float}:
        return on_device(numbers, device, torch.float32)
    return torch.stack([_number(number, device) for number in numbers])


def _number(number: Number, device: torch.device | None) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, torch.float32).reshape(())
    return torch.full((), number, dtype=torch.float32, device=device)  # a copy of it would wait for a GPU


def _dropped(counts: Sequence[Count]) -> list[Number]:
    """Return the numbers of dropped units; decisions of the same shape, such as of heads, are counted at once."""
    dropped = [count.dropped for count in counts]
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, count in enumerate(counts):
        if (kept := count.kept) is not None:
            groups[kept.shape, kept.dtype, kept.device, id(count.units_per_decision)].append(index)
    for indices in groups.values():
        stacked = torch.stack([counts[index].kept for index in indices])  # type: ignore[misc]  # not None
        sums = ((stacked == 0) * counts[indices[0]].units_per_decision).flatten(1).sum(1)
        for index, total in zip(indices, sums.tolist() if sums.is_cpu and not is_traced() else sums, strict=True):
            dropped[index] = dropped[index] + total
    return dropped


def _counted(kept: Tensor | None, site: AttentionSite) -> Count:
    """Count the units of a site that are not kept."""
    number, units, array = site.once("counted", lambda: _units_of(site))
    if kept is None:
        return Count(number)
    if not kept.shape and kept.is_cpu:  # of the whole layer, also if the site is on a GPU
        return Count(number, 0 if kept else number)
    if kept.shape != site.shape or site.shape == (1, 1, 1, 1):  # heads, keys or rows
        shape = (*[1] * (4 - kept.dim()), *kept.shape)
        shared = site.once(("units", shape), lambda: summed(units, site.shape, shape))
        return Count(number, kept=kept.detach().view(shape), units_per_decision=shared)
    kept = kept if kept.dtype == torch.bool else kept.detach() != 0
    if kept.is_cpu:  # numpy counts in a sixtieth of torch's time
        return Count(number, number - int(np.count_nonzero(kept.numpy() if array is None else kept.numpy() & array)))
    return Count(number, (~kept if units is None else ~kept & units).sum())


def _units_of(site: AttentionSite) -> tuple[Number, Tensor | None, Any]:
    """Return the number of units of a site, their mask, and on a CPU this mask as an array of numpy."""
    number, units = site.number_of_units(), site.units
    number = int(number) if isinstance(number, Tensor) and number.is_cpu else number
    return number, units, units.numpy() if units is not None and units.is_cpu else None


def number_of(mask: Tensor) -> Number:
    """Return how many values of a mask are true."""
    return mask.sum() if is_traced() or not mask.is_cpu else int(np.count_nonzero(mask.numpy()))


def _traced(kept: Tensor | None, site: AttentionSite) -> Count:
    """Count units while torch compiles, with few operations for the compiler to trace."""
    number = torch.ones((), device=site.device) if site.units is None else site.units.expand(site.shape).sum()
    if kept is None:
        return Count(number, torch.zeros((), device=site.device))
    return Count(number, functional.drop_rate(kept.expand(site.shape), site.units) * number)


def _on_some_rows(mask: Mask, site: AttentionSite) -> Count:
    """Measure the rate of decisions that are not in memory, on query rows that are evenly spaced."""
    batch, heads, queries, keys = site.shape
    count = max(1, min(queries, POSITIONS // max(1, batch * heads * keys)))
    rows = torch.linspace(0, queries - 1, count, device=site.device).long()
    keep = torch.ones((), dtype=torch.bool, device=site.device)
    for drawn in (*mask.drawn, *mask.drawn_weights):
        keep = keep & drawn.of_queries(rows)
    for factor in (mask.scores, mask.weights, mask.normalized) if mask.kept is None else (mask.kept,):
        if factor is not None:
            keep = keep & (factor.expand(site.shape)[:, :, rows] != 0)
    # Without all rows, it is unknown which queries are padding, so padding counts, too.
    units = site.valid_of(rows) if count < queries else site.units
    units = None if units is None else units.expand(batch, heads, count, keys)
    return Count(1, functional.drop_rate(keep.expand(batch, heads, count, keys), units))
