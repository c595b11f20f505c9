"""The difference between two methods, over the seeds that both have, and what a comparison found by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.statistics import Difference, detectable, holm, paired_difference

LEVEL = 0.05  # of p, after correction
ONE_SEED = "One seed is no evidence: repeat the command with --seeds 5 or more."


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


def corrected(found: Sequence[Contrast]) -> list[float]:
    """Return p of each contrast, with Holm's correction over all of them; NaN without a test."""
    return holm([each.difference.p for each in found])


def difference_rows(found: Sequence[Contrast]) -> list[dict[str, str]]:
    """Return the cells of each contrast in a table, by column, with p corrected over all of them."""
    columns = ("difference", "95 % over seeds", "p", "p (Holm)")
    tested = zip(found, corrected(found), strict=True)
    cells = [difference_cells(each.difference, p, len(each.gaps)) for each, p in tested]
    return [dict(zip(columns, row, strict=True)) for row in cells]


def difference_cells(result: Difference, adjusted: float, seeds: int) -> list[str]:
    """Return the mean, the interval, p and the adjusted p; without an interval, why there is none."""
    mean = f"{result.mean:+.4f}"
    if math.isnan(result.low):
        return [mean, *["1 seed" if seeds == 1 else "all equal"] * 3]
    return [mean, f"[{result.low:+.4f}, {result.high:+.4f}]", p_cell(result.p), p_cell(adjusted)]


def p_cell(value: float) -> str:
    """Format a p-value."""
    return "<0.0001" if value < 0.0001 else f"{value:.4f}"


def verdict(groups: Sequence[Group], found: Sequence[Contrast], same_time: Sequence[Contrast]) -> str | None:
    """Say whether anything was learned, which methods differ from the baseline, and what the seeds could have shown.

    Args:
        groups: the runs of all methods.
        found: the methods against the baseline; without any, there is a verdict only if nothing was learned.
        same_time: methods against the baseline with the same training time.
    """
    if not any(map(_learned, groups)):
        return "No method learned the task: train for more epochs, or on more rows."
    if not found:
        return None
    if max(len(each.gaps) for each in found) < 2:
        return ONE_SEED
    baseline, tested = found[0].other.name, list(zip(found, corrected(found), strict=True))
    said = [_sentence(each, p) for each, p in tested if p < LEVEL]
    rest = [each for each, p in tested if not p < LEVEL]  # also without a test, whose p is NaN
    better = {each.mine.name for each in found if each not in rest and each.difference.mean > 0}
    again = zip(same_time, corrected(same_time), strict=True)
    if lost := sorted(each.mine.name for each, p in again if each.mine.name in better and not p < LEVEL):
        said.append(f"With the same training time, no difference to {baseline} found for {', '.join(lost)}.")
    if rest:
        names = f" for {', '.join(each.mine.name for each in rest)}" if len(found) > 1 else ""
        said.append(f"No difference to {baseline} found{names}{_could_be_found(rest)}.")
    return " ".join(said)


def _learned(group: Group) -> bool:
    """Whether a method is better than the trivial predictor, and at least one network has not collapsed."""
    better = group.trivial is None or fmean(group.scores) > fmean(group.trivial[1])
    return better and len(group.collapsed) < len(group.runs)


def _sentence(each: Contrast, p: float) -> str:
    gap = each.difference
    side = "above" if gap.mean > 0 else "below"
    interval = f"95 % interval {gap.low:+.4f} to {gap.high:+.4f}"
    return (
        f"{each.mine.name} scores {abs(gap.mean):.4f} {side} {each.other.name} ({interval}, corrected p {p_cell(p)})."
    )


def _could_be_found(rest: Sequence[Contrast]) -> str:
    """Say which true difference so many seeds would find with a probability of 0.8; the largest of several."""
    known = [(detectable(stdev(each.gaps), len(each.gaps)), len(each.gaps)) for each in rest if len(each.gaps) > 1]
    largest, seeds = max(known, default=(math.nan, 0))
    return f"; {seeds} seeds detect one of {largest:.2g}" if largest > 1e-12 else ""
