"""Measured drop rates: of the latest pass, and on average; and tables of them as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from attnreg import functional
from attnreg.functional.seeded import transformed
from attnreg.masks import Mask
from attnreg.sites import AttentionSite, Site

POSITIONS = 2**22  # on which rates are measured, if decisions are not in memory
Sums = dict[str, tuple[Tensor, int]]  # of the rates of a site, and of how many


def added(sums: Sums, rates: Mapping[str, Tensor]) -> Sums:
    """Return sums with one more rate of each of these sites."""
    kept = {label: sums.get(label, (torch.zeros_like(rate), 0)) for label, rate in rates.items()}
    return {**sums, **{label: (kept[label][0] + rate.detach(), kept[label][1] + 1) for label, rate in rates.items()}}


class DropRates:
    """The share of dropped units per site, by site label ``"<stack>.<layer>"``."""

    def __init__(self) -> None:
        self._sums: Sums = {}
        self._uncounted: dict[str, Tensor] = {}  # the latest, unless they are in the sums
        self.are_hidden = False  #: whether a pass ran within ``torch.func``, where nothing is measured
        self.forget()

    def clear(self) -> None:
        """Forget the latest rates, which count, as a forward pass begins."""
        if not torch.compiler.is_compiling():
            self.count()
        self.forget()

    def count(self) -> None:
        """Add the latest rates to the running means; of compiled passes, only those that are latest in a step."""
        self._sums = added(self._sums, self._uncounted)
        self._uncounted = {}

    def forget(self) -> None:
        """Forget the latest rates."""
        self.latest: dict[str, Tensor] = {}  #: rates of the latest pass, 0-d
        self._uncounted = self.latest
        self._weights: dict[str, Tensor] = {}  # of sites in parts: the number of units counted so far

    def mean(self) -> dict[str, float]:
        """Return the mean rates over all passes so far."""
        return {label: float(total) / count for label, (total, count) in added(self._sums, self._uncounted).items()}

    def note(self, site: AttentionSite, mask: Mask | None) -> None:
        """Record the drop rate of a site."""
        if not torch.compiler.is_compiling() and transformed():  # a tensor made under vmap must not outlive it
            self.are_hidden = True
            return
        if mask is not None and (mask.drawn or mask.drawn_weights):
            rate = _of_some_rows(mask, site)
        elif (kept := None if mask is None else mask.units_kept) is None:
            rate = torch.zeros((), device=site.device)
        elif kept.dim() == 0:
            rate = 1.0 - kept.float()
        else:
            rate = functional.drop_rate(kept, site.units)
        self.latest[site.label] = self._with_other_parts(site, rate) if site.in_parts else rate

    def _with_other_parts(self, site: AttentionSite, rate: Tensor) -> Tensor:
        units = torch.ones((), device=site.device) if site.units is None else site.units
        weight = units.expand(site.shape).sum()
        before = self._weights.get(site.label, torch.zeros_like(weight))
        self._weights[site.label] = before + weight
        return (self.latest.get(site.label, 0.0) * before + rate * weight) / (before + weight).clamp(min=1)

    def note_states(self, site: Site, rate: Tensor) -> None:
        """Record the share of hidden values that are set to zero, 0-d."""
        self.latest[site.label] = rate

    def note_skipped(self, site: Site, skip: Tensor) -> None:
        """Record a drop rate of 1 for a site whose block is skipped, that is, if ``skip`` (0-d) is true."""
        rate = self.latest.get(site.label, torch.zeros((), device=skip.device))
        self.latest[site.label] = torch.where(skip, torch.ones_like(rate), rate)


def _of_some_rows(mask: Mask, site: AttentionSite) -> Tensor:
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
    return functional.drop_rate(keep.expand(batch, heads, count, keys), units)


def share(part: Tensor, whole: Tensor, valid: Tensor | None) -> Tensor:
    """Return the share of counts ``(B, T)`` in others, over all tokens that are not padding, 0-d."""
    if valid is not None:
        part, whole = part.masked_fill(~valid, 0), whole.masked_fill(~valid, 0)
    return part.sum() / whole.sum().clamp(min=1)


class Report(str):
    """A table with sentences below, which is its own ``repr``."""

    __slots__ = ("notes", "rows")

    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Self:
        """Make a report of rows, the first of which is the header."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        made = cls("\n".join([*lines, *notes]))
        made.rows, made.notes = rows, notes
        return made

    def __repr__(self) -> str:
        return str(self)
