"""The difference between two methods, over the seeds that both have, and what a comparison found by it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeVar

from attnreg.experiments.compare.group import Group
from attnreg.experiments.compare.statistics import Difference, detectable, holm, paired_difference

Label = TypeVar("Label", bound=Hashable)
LEVEL = 0.05  # of p, after correction
ONE_SEED = "One seed is no evidence: repeat the command with --seeds 5 or more."


@dataclass(frozen=True)
class Contrast:
    """Runs of a method, those with the same seeds that they are compared with, and their paired difference.

    ``p`` is corrected over all contrasts that were made with it; NaN without a test.
    """

    mine: Group
    other: Group
    difference: Difference
    p: float

    @property
    def gaps(self) -> list[float]:
        """The difference of the scores, per seed."""
        return [a - b for a, b in zip(self.mine.scores, self.other.scores, strict=True)]

    @property
    def holds(self) -> bool:
        """Whether the difference is significant after correction."""
        return self.p < LEVEL

    @property
    def is_alike(self) -> bool:
        """Whether there is no test because all seeds differ by the same amount."""
        return math.isnan(self.difference.p) and len(self.gaps) > 1 and abs(self.difference.mean) > 0

    @property
    def detectable(self) -> float | None:
        """The true difference that a test over these seeds would probably find; ``None`` without a test."""
        return None if math.isnan(self.difference.p) else detectable(stdev(self.gaps), len(self.gaps))

    @property
    def cells(self) -> dict[str, str]:
        """The cells of a table of differences, by column."""
        columns = ("difference", "95 % over seeds", "p", "p (Holm)")
        return dict(zip(columns, difference_cells(self.difference, self.p, len(self.gaps)), strict=True))


def contrasts(pairs: Mapping[Label, tuple[Group, Group]]) -> dict[Label, Contrast]:
    """Compare the groups of each pair on the seeds that both have; leave out pairs without a common seed."""
    known: dict[Label, tuple[Group, Group]] = {}
    for label, (mine, other) in pairs.items():
        if common := {run.seed for run in mine.runs} & {run.seed for run in other.runs}:
            known[label] = mine.on(common), other.on(common)
    differences = [paired_difference(mine.scores, other.scores) for mine, other in known.values()]
    tested = zip(known.items(), differences, holm([each.p for each in differences]), strict=True)
    return {label: Contrast(*groups, difference, p) for (label, groups), difference, p in tested}


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

    ``found`` are the methods against the baseline, ``same_time`` those against the baseline with the same time.
    """
    if not any(map(_learned, groups)):
        return "No method learned the task: train for more epochs, or on more rows."
    if not found:
        return None
    if max(len(each.gaps) for each in found) < 2:
        return ONE_SEED
    baseline, said = found[0].other.name, list[str]()
    hold = [each for each in found if each.holds]
    for each in hold:
        gap = each.difference
        side = f"{abs(gap.mean):.4f} {'above' if gap.mean > 0 else 'below'} {baseline}"
        interval = f"95 % interval {gap.low:+.4f} to {gap.high:+.4f}"
        said.append(f"{each.mine.name} scores {side} ({interval}, corrected p {p_cell(each.p)}).")
    better = [each.mine.name for each in hold if each.difference.mean > 0]
    same_time = [each for each in same_time if each.mine.name in better]
    if lost := sorted(each.mine.name for each in same_time if not (each.holds or each.is_alike)):
        said.append(f"With the same training time, no difference to {baseline} found for {', '.join(lost)}.")
    for name, mean in ((each.mine.name, each.difference.mean) for each in same_time if each.mine.name not in lost):
        if mean < 0:
            said.append(f"With the same training time, {name} scores {-mean:.4f} below {baseline}.")
    alike = [each for each in found if each.is_alike]
    always = f"from {baseline} with every seed; a t-test needs differences that vary."
    said += [f"{each.mine.name} differs by {each.difference.mean:+.4f} {always}" for each in alike]
    if rest := [each for each in found if each not in hold and each not in alike]:
        names = f" for {', '.join(each.mine.name for each in rest)}" if len(found) > 1 else ""
        known = [(each.detectable, len(each.gaps)) for each in rest if each.detectable is not None]
        largest, seeds = max(known, default=(0.0, 0))
        corrected = ", before correction" if len(found) > 1 else ""
        detects = f"; {seeds} seeds detect one of {largest:.2g}{corrected}" if known else ""
        said.append(f"No difference to {baseline} found{names}{detects}.")
    return " ".join(said)


def _learned(group: Group) -> bool:
    """Whether a method is better than the trivial predictor, and at least one network has not collapsed."""
    better = group.trivial is None or fmean(group.scores) > fmean(group.trivial[1])
    return better and len(group.collapsed) < len(group.runs)
