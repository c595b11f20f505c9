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
from attnreg.functional.seeded import is_traced, transformed
from attnreg.functional.validity import summed
from attnreg.masks import Mask
from attnreg.sites import AttentionSite, Site

POSITIONS = 2**22  # on which rates are measured, if decisions are not in memory
MOST_GROUPS = 8
Number = Tensor | int | float
Sums = dict[str, tuple[Tensor, int]]  # of the rates of a site, and of how many
Groups = dict[tuple[str, ...], tuple[Tensor, int]]  # the same of sites whose rates are summed at once


@dataclass(frozen=True, eq=False)
class Count:
    """How many of the units of a site are dropped, or which: computed only when somebody asks."""

    of: Number  # the units that count, 0-d
    dropped: Number = 0  # 0-d
    kept: Tensor | None = None  # of decisions that many units share: 0 where they are dropped
    weights: Number = 1  # how many units each of these decisions is for, broadcastable to them

    def __add__(self, other: Count) -> Count:
        """Count the units of two parts of one attention."""
        (a, b), of = _dropped([self, other]), self.of + other.of
        return Count(of, a + b)


class DropRates:
    """The share of dropped units per site, by site label ``"<stack>.<layer>"``."""

    def __init__(self) -> None:
        self._sums: Groups = {}
        self._counters: tuple[Tensor, int] | None = None  # to which kernels add, and how many are in use
        self._latest: dict[str, Count] = {}
        self._uncounted = self._latest  # unless they are in the sums
        self.are_hidden = False  #: whether a pass ran within ``torch.func``, where nothing is measured

    def clear(self) -> None:
        """Forget the latest rates, which count, as a forward pass begins."""
        if not torch.compiler.is_compiling():
            self.count()
        self.forget()

    def count(self) -> None:
        """Add the latest rates to the running means; of compiled passes, only those that are latest in a step."""
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
            for label, one in zip(labels, total.tolist(), strict=True):
                before, count = totals.get(label, (0.0, 0))
                totals[label] = before + one, count + passes
        return {label: total / count for label, (total, count) in totals.items()}

    def note(self, site: AttentionSite, kept: Tensor | None, factor: Tensor | None = None, *, quiet: bool) -> None:
        """Record the drop rate of a site, given what is not 0 where a unit is kept, and a factor of its output."""
        compiles = not quiet and torch.compiler.is_compiling()
        if not (quiet or compiles) and transformed():  # a tensor made under vmap must not outlive it
            self.are_hidden = True
            return
        if factor is not None:
            kept = factor != 0 if kept is None else kept & (factor != 0)
        count = _traced(kept, site) if compiles else _counted(kept, site)
        self.note_count(site, count, adds=site.in_parts)

    def note_mask(self, site: AttentionSite, mask: Mask | None, *, quiet: bool) -> None:
        """Record the drop rate of a mask, whose decisions may not be in memory."""
        if mask is None or not (mask.drawn or mask.drawn_weights) or is_traced():
            self.note(site, None if mask is None else mask.units_kept, quiet=quiet)
        else:
            self.note_count(site, _of_some_rows(mask, site), adds=site.in_parts)

    def note_count(self, site: Site, count: Count, *, adds: bool = False) -> None:
        """Record how many units of a site are dropped, or with ``adds`` of a part of it."""
        label = site.label
        self._latest[label] = self._latest[label] + count if adds and label in self._latest else count

    def counter(self, site: AttentionSite, factor: Tensor | None, sites: int) -> tuple[Tensor, Tensor | None]:
        """Return where a kernel, ``(1,)``, adds the units that it drops, besides those of a row factor of 0.

        With it come the rows that count. The pass has about as many sites as given.
        """
        place, rows = self.counters(1, sites, site.device), site.once("rows", site.rows)
        count = _counted(factor, site)
        self.note_count(site, Count(count.of, place[0], count.kept, count.weights), adds=site.in_parts)
        if factor is not None:
            kept = factor.detach() != 0
            rows = kept if rows is None else rows & kept
        return place, rows

    def counters(self, number: int, room: int, device: torch.device) -> Tensor:
        """Return numbers of zero, int64, to which a kernel adds; about as many as there is room for are one tensor."""
        if torch.compiler.is_compiling():
            return torch.zeros(number, dtype=torch.int64, device=device)
        counters, used = self._counters or (None, 0)
        if counters is None or used + number > counters.shape[0] or counters.device != device:
            counters, used = torch.zeros(max(number, room), dtype=torch.int64, device=device), 0
        self._counters = counters, used + number
        return counters[used : used + number]

    def note_skipped(self, site: Site, skip: Tensor) -> None:
        """Record a drop rate of 1 for a site whose block is skipped, that is, if ``skip`` (0-d) is true."""
        known = self._latest.get(site.label)
        (rate,) = [torch.zeros((), device=skip.device)] if known is None else _rates([known])
        self._latest[site.label] = Count(1, torch.where(skip, torch.ones_like(rate), rate))


def added(sums: Sums, rates: Mapping[str, Tensor]) -> Sums:
    """Return sums with one more rate of each of these sites."""
    kept = {label: sums.get(label, (torch.zeros_like(rate), 0)) for label, rate in rates.items()}
    return {**sums, **{label: (kept[label][0] + rate.detach(), kept[label][1] + 1) for label, rate in rates.items()}}


def _summed(sums: Groups, counts: Mapping[str, Count]) -> Groups:
    """Return sums with one more rate of each of these sites, added at once if the same sites are counted each time."""
    if not counts:
        return sums
    labels, new = tuple(counts), _rates(counts.values()).detach()
    groups = {labels: new}
    if labels not in sums and len(sums) >= MOST_GROUPS:  # a model that leaves out layers at random
        groups = {(label,): rate for label, rate in zip(labels, new.split(1), strict=True)}
    before = {each: sums.get(each, (torch.zeros_like(rate), 0)) for each, rate in groups.items()}
    return {**sums, **{each: (before[each][0] + rate, before[each][1] + 1) for each, rate in groups.items()}}


def _rates(counts: Collection[Count]) -> Tensor:
    """Return the rates of sites, with as few operations as there can be."""
    dropped, of = _dropped([*counts]), [each.of for each in counts]
    numbers = {*map(type, dropped), *map(type, of)} <= {int, float}
    device = None if numbers else next(each.device for each in (*dropped, *of) if isinstance(each, Tensor))
    return _stacked(dropped, device) / _stacked(of, device).clamp(min=1)


def _stacked(numbers: Sequence[Number], device: torch.device | None) -> Tensor:
    if {*map(type, numbers)} <= {int, float}:
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    return torch.stack([torch.as_tensor(each, dtype=torch.float32, device=device).reshape(()) for each in numbers])


def _dropped(counts: Sequence[Count]) -> list[Number]:
    """Return how many units are dropped; those of decisions of the same shape, such as heads, are counted at once."""
    found = [each.dropped for each in counts]
    groups: dict[Any, list[int]] = defaultdict(list)
    for at, each in enumerate(counts):
        if each.kept is not None:
            groups[each.kept.shape, each.kept.dtype, each.kept.device, id(each.weights)].append(at)
    for places in groups.values():
        kept = torch.stack([counts[at].kept for at in places])  # type: ignore[misc]  # not None
        sums = ((kept == 0) * counts[places[0]].weights).flatten(1).sum(1)
        for at, total in zip(places, sums.tolist() if sums.is_cpu and not is_traced() else sums, strict=True):
            found[at] = found[at] + total
    return found


def _counted(kept: Tensor | None, site: AttentionSite) -> Count:
    """Count the units of a site that are not kept."""
    of, units, array = site.once("counted", lambda: _units_of(site))
    if kept is None:
        return Count(of)
    if kept.shape != site.shape or site.shape == (1, 1, 1, 1):  # heads, keys or rows
        shape = (*[1] * (4 - kept.dim()), *kept.shape)
        weights = site.once(("units", shape), lambda: summed(units, site.shape, shape))
        return Count(of, kept=kept.detach().view(shape), weights=weights)
    kept = kept if kept.dtype == torch.bool else kept.detach() != 0
    if kept.is_cpu:  # numpy counts in a sixtieth of torch's time
        return Count(of, of - int(np.count_nonzero(kept.numpy() if array is None else kept.numpy() & array)))
    return Count(of, (~kept if units is None else ~kept & units).sum())


def _units_of(site: AttentionSite) -> tuple[Number, Tensor | None, Any]:
    """Return the number of units of a site, which these are, and on a CPU the same as an array of numpy."""
    of, units = site.number_of_units(), site.units
    of = int(of) if isinstance(of, Tensor) and of.is_cpu else of
    return of, units, units.numpy() if units is not None and units.is_cpu else None


def number_of(mask: Tensor) -> Number:
    """Return how many values of a mask are true."""
    return mask.sum() if is_traced() or not mask.is_cpu else int(np.count_nonzero(mask.numpy()))


def _traced(kept: Tensor | None, site: AttentionSite) -> Count:
    """Count while torch compiles, in the fewest operations that it has to follow."""
    of = torch.ones((), device=site.device) if site.units is None else site.units.expand(site.shape).sum()
    if kept is None:
        return Count(of, torch.zeros((), device=site.device))
    return Count(of, functional.drop_rate(kept.expand(site.shape), site.units) * of)


def _of_some_rows(mask: Mask, site: AttentionSite) -> Count:
    """Measure the rate of decisions that are not in memory, on query rows that are evenly spaced."""
    batch, heads, queries, keys = site.shape
    count = max(1, min(queries, POSITIONS // max(1, batch * heads * keys)))
    rows = torch.linspace(0, queries - 1, count, device=site.device).long()
    keep = torch.ones((), dtype=torch.bool, device=site.device)
    for drawn in (*mask.drawn, *mask.drawn_weights):
        keep = keep & drawn.of_queries(rows)
    for given in (mask.scores, mask.weights, mask.normalized) if mask.kept is None else (mask.kept,):
        if given is not None:
            keep = keep & (given.expand(site.shape)[:, :, rows] != 0)
    # Some rows do not tell which queries are padding, so these count, too.
    units = site.valid_of(rows) if count < queries else site.units
    units = None if units is None else units.expand(batch, heads, count, keys)
    return Count(1, functional.drop_rate(keep.expand(batch, heads, count, keys), units))
