"""The difference between two methods, over the seeds that both have, and the verdict of a comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import TypeVar

from attnreg.experiments.compare.group import NOTHING_LEARNED, Group
from attnreg.experiments.compare.statistics import Difference, detectable, holm, paired_difference
from attnreg.experiments.folder.history import COLLAPSED

Label = TypeVar("Label", bound=Hashable)
LEVEL = 0.05  # of p, after correction
ONE_SEED = "One seed is no evidence: repeat the command with --seeds 5 or more."


@dataclass(frozen=True)
class Contrast:
    """Runs of a method, the runs of another one with the same seeds, and their paired difference.

    ``p`` is corrected over all contrasts of the same call of :func:`contrasts`; NaN without a test.
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
    def keeps(self) -> bool:
        """Whether the method still scores higher."""
        return (self.holds or self.is_alike) and self.difference.mean > 0

    @property
    def detectable(self) -> float | None:
        """The true difference that a test over these seeds would probably find; ``None`` without a test."""
        return None if math.isnan(self.difference.p) else detectable(stdev(self.gaps), len(self.gaps))

    @property
    def cells(self) -> dict[str, str]:
        """The cells of a table of differences, by column."""
        columns = ("difference", "95 % over seeds", "p", "p (Holm)")
        if self.mine.never_acted:
            return dict.fromkeys(columns, "never acted")
        return dict(zip(columns, difference_cells(self.difference, self.p, len(self.gaps)), strict=True))


def contrasts(pairs: Mapping[Label, tuple[Group, Group]]) -> dict[Label, Contrast]:
    """Compare the groups of every pair on the seeds that both have; leave out pairs without a common seed."""
    shared: dict[Label, tuple[Group, Group]] = {}
    for label, (mine, other) in pairs.items():
        if common := {run.seed for run in mine.runs} & {run.seed for run in other.runs}:
            shared[label] = mine.on(common), other.on(common)
    differences = [paired_difference(mine.scores, other.scores) for mine, other in shared.values()]
    tested = zip(shared.items(), differences, holm([difference.p for difference in differences]), strict=True)
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


def verdict(groups: Sequence[Group], compared: Sequence[Contrast], same_time: Sequence[Contrast]) -> list[str]:
    """Say whether a method learned anything, which methods differ from the baseline, and what to do next.

    ``compared`` are contrasts with the baseline, ``same_time`` with a baseline that trained for the same time. Several
    groups without contrasts lack the baseline: nothing is said of them.
    """
    if not any(group.has_learned for group in groups):
        return [NOTHING_LEARNED]
    if len(groups) > 1 and not compared:
        return []
    if compared and max(len(contrast.gaps) for contrast in compared) < 2:
        return [ONE_SEED]
    acted = [contrast for contrast in compared if not contrast.mine.never_acted]
    significant = [contrast for contrast in acted if contrast.holds]
    better = [contrast for contrast in significant if contrast.difference.mean > 0]
    names = [contrast.mine.name for contrast in better]
    of_better = [contrast for contrast in same_time if contrast.mine.name in names]
    lost = {contrast.mine.name for contrast in of_better if not contrast.keeps}
    won = [contrast for contrast in better if contrast.mine.name not in lost]
    baseline = compared[0].other if compared else groups[0]
    best = max(won, key=lambda contrast: contrast.difference.mean).mine if won else baseline
    sentences = [*map(_significant, significant), *_with_the_same_time(of_better), *_without_a_test(acted)]
    if unclear := [contrast for contrast in acted if not contrast.holds and not contrast.is_alike]:
        sentences.append(_not_significant(unclear, alone=len(compared) == 1))
    if best is baseline:
        sentences += _longer_is_higher(baseline, same_time)
    return [*([" ".join(sentences)] if sentences else []), to_use(best)]


def to_use(group: Group) -> str:
    """Say which run of a method to use, and how to get its model."""
    if group.config("folds") is not None:
        return (
            f"To use {group.name}, train it once more, with --validation-rows or a validation split instead of "
            "--folds: a seed's score is that of its fold, so none is the best."
        )
    run = group.returned
    is_best = group.seed_rows is None  # scores on other rows do not tell which seed is better
    if (run.folder / "model").is_dir():
        model = "its best model" if is_best else "a model"
        return f"To use {group.name}: {model} is in {run.folder / 'model'} (seed {run.seed})."
    of_seed = f"the model of its best seed, {run.seed}" if is_best else f"a model, such as of seed {run.seed}"
    return f"To use {group.name}, train {of_seed}: `{run.alone}`"


def _significant(contrast: Contrast) -> str:
    gap = contrast.difference
    side = f"{abs(gap.mean):.4f} {'above' if gap.mean > 0 else 'below'} {contrast.other.name}"
    interval = f"95 % interval {gap.low:+.4f} to {gap.high:+.4f}"
    return f"{contrast.mine.name} scores {side} ({interval}, corrected p {p_cell(contrast.p)})."


def _with_the_same_time(compared: Sequence[Contrast]) -> Iterator[str]:
    """Say which gains disappear if the baseline trains for the same time."""
    if lost := sorted(contrast.mine.name for contrast in compared if not (contrast.holds or contrast.is_alike)):
        verb = "shows" if len(lost) == 1 else "show"
        yield f"Given the same training time, {', '.join(lost)} {verb} no significant gain."
    for contrast in compared:
        if contrast.mine.name not in lost and contrast.difference.mean < 0:
            yield f"Given the same training time, {contrast.mine.name} scores {-contrast.difference.mean:.4f} below it."


def _longer_is_higher(baseline: Group, same_time: Sequence[Contrast]) -> Iterator[str]:
    """Say how much higher the baseline scores that trained longest, if it does."""
    if not same_time:
        return
    longest = max((contrast.other for contrast in same_time), key=lambda group: group.training_time)
    for contrast in contrasts({longest.name: (longest, baseline)}).values():
        if contrast.difference.mean > 0:
            mean, interval, *_ = contrast.cells.values()
            yield f"More epochs may help: {longest.name} scores {mean} ({interval}) against {baseline.name}."


def _without_a_test(compared: Sequence[Contrast]) -> Iterator[str]:
    for contrast in compared:
        if contrast.is_alike:
            always = f"from {contrast.other.name} with every seed; a t-test needs differences that vary."
            yield f"{contrast.mine.name} differs by {contrast.difference.mean:+.4f} {always}"


def _not_significant(compared: Sequence[Contrast], *, alone: bool) -> str:
    """Say which differences are not significant, and what more seeds would detect."""
    names = "" if alone else f": {', '.join(contrast.mine.name for contrast in compared)}"
    return f"Not significant{names} {seeds_detect(compared, corrected=alone)}"


def seeds_detect(compared: Sequence[Contrast], *, corrected: bool) -> str:
    """Say in brackets which difference the seeds can detect, then which one four times as many seeds would."""
    tested = [contrast for contrast in compared if contrast.detectable is not None]
    if not tested:
        return f"(all scores equal those of {compared[0].other.name})."
    hardest = max(tested, key=lambda contrast: contrast.detectable or 0.0)
    seeds = len(hardest.gaps)
    correction = "" if corrected else ", before correction"
    would = detectable(stdev(hardest.gaps), 4 * seeds)
    return (
        f"({seeds} seeds can detect {hardest.detectable:.2g}{correction}). {4 * seeds} seeds would detect about "
        f"{would:.2g}."
    )


def warnings_of(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the warnings of the runs: methods that never acted, collapsed networks, and data."""
    for group in groups:
        if group.never_acted:  # first, since it makes the verdict void
            reasons = {reason for result in group.results for reason in result["warnings"] if "first acts in" in reason}
            warning = f"Warning: {group.name} never acted, so its scores say nothing about it."
            yield " ".join([warning, *sorted(reasons)])
    for group in groups:
        if group.collapsed:
            yield f"Warning: {COLLAPSED.format(group.name)} (seeds: {str(group.collapsed)[1:-1]})."
    by_text: dict[str, list[tuple[str, str]]] = {}  # methods and sentences, by their text without numbers
    for group in groups:
        for text in (text for result in group.results for text in result.get("warnings", ())):
            if not (group.never_acted and "first acts in" in text):
                by_text.setdefault(re.sub(r"\d+", "0", text), []).append((group.name, text))
    total = sum(len(group.runs) for group in groups)
    for warnings in by_text.values():
        names = dict.fromkeys(name for name, _ in warnings)
        prefix = "" if len(names) == len(groups) else f"{', '.join(names)}: "
        yield f"Warning: {prefix}{warnings[0][1]}" + f" ({len(warnings)} of {total} runs)" * (len(warnings) < total)
