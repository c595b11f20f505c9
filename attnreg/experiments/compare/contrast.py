"""The difference between two methods, over the seeds that both have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.statistics import Difference, holm, paired_difference


@dataclass(frozen=True)
class Contrast:
    """Runs of a method, and those with the same seeds that they are compared with."""

    mine: Group
    other: Group

    @property
    def gaps(self) -> list[float]:
        """The difference of the scores, per seed."""
        return [a - b for a, b in zip(self.mine.scores, self.other.scores, strict=True)]

    @cached_property
    def difference(self) -> Difference:
        """The mean difference, paired by seed."""
        return paired_difference(self.mine.scores, self.other.scores)


def contrasts(pairs: Iterable[tuple[Group, Group]]) -> list[Contrast]:
    """Compare the groups of each pair on the seeds that both have; leave out pairs without a common seed."""
    both = [(mine.on(other), other.on(mine)) for mine, other in pairs]
    return [Contrast(mine, other) for mine, other in both if mine is not None and other is not None]


def difference_rows(found: Sequence[Contrast]) -> list[list[str]]:
    """Return the :func:`difference_cells` of each, with p adjusted over all of these contrasts."""
    adjusted = holm([each.difference.p for each in found])
    return [difference_cells(each.difference, p, len(each.gaps)) for each, p in zip(found, adjusted, strict=True)]


def difference_cells(result: Difference, adjusted: float, seeds: int) -> list[str]:
    """Return the mean, the interval, p and the adjusted p; without an interval, why there is none."""
    mean = f"{result.mean:+.4f}"
    if math.isnan(result.low):
        return [mean, *["1 seed" if seeds == 1 else "all equal"] * 3]
    return [mean, f"[{result.low:+.4f}, {result.high:+.4f}]", p_cell(result.p), p_cell(adjusted)]


def p_cell(value: float) -> str:
    """Format a p-value."""
    return "<0.0001" if value < 0.0001 else f"{value:.4f}"
