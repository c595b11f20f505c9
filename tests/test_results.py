"""Published differences are those of the published runs, recomputed here from the tables of runs."""

import csv
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def recomputed(gaps):
    """Mean, 95 % interval and p of paired differences, by Student's t."""
    gaps = np.asarray(gaps)
    half = student.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
    return [gaps.mean(), gaps.mean() - half, gaps.mean() + half, ttest_1samp(gaps, 0).pvalue]


def corrected(ps):
    """Holm's correction: the i-th smallest of m times m - i, never below a smaller one's."""
    order, adjusted = np.argsort(ps), np.empty(len(ps))
    for place, number in enumerate(order):
        adjusted[number] = min(1.0, ps[number] * (len(ps) - place))
        if place:
            adjusted[number] = max(adjusted[number], adjusted[order[place - 1]])
    return adjusted


def printed(page, heads):
    """The rows of tables of differences on a page: their names, and their numbers."""
    for line in (RESULTS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) >= heads + 4 and re.fullmatch(r"[+-]\d\.\d{4}", cells[heads]):
            numbers = [float(n) for cell in cells[heads:] for n in re.findall(r"[-+]?\d\.\d+", cell)]
            yield cells[:heads], numbers


def assert_published(page, heads, gaps_of):
    rows = [*printed(page, heads)]
    found = [recomputed(gaps_of(*names)) for names, _ in rows]
    holm = corrected(np.array([each[-1] for each in found]))
    for (names, numbers), each, adjusted in zip(rows, found, holm, strict=True):
        expected = [max(value, 1e-4) if place > 2 else value for place, value in enumerate([*each, adjusted])]
        assert numbers[:5] == pytest.approx(expected, abs=5.1e-5), names
    return len(rows)


def test_all_comparisons(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)
    overview = runpy.run_path(str(RESULTS / "overview.py"))
    found = {}
    for setting, (title, contrasts) in overview["SETTINGS"].items():
        scores = overview["scores"](setting)
        for contrast in contrasts:
            mine, other = (scores[name] for name in contrast.split(" - "))
            seeds = sorted({*mine} & {*other})
            found[title.format(len(seeds)), contrast] = [mine[seed] - other[seed] for seed in seeds]
    assert assert_published("comparisons/README.md", 2, lambda *names: found[names]) == len(found)


def test_exploration():
    with (RESULTS / "exploration/results.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    gaps = {
        arm: [float(row["planted"]) - float(row["second"]) for row in rows if row["arm"] == arm]
        for arm in {row["arm"] for row in rows}
    }
    assert {len(each) for each in gaps.values()} == {8}
    assert assert_published("exploration/README.md", 1, gaps.get) == 5


def test_the_ceiling():
    with (RESULTS / "ceiling/results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["scored_on"] == "dev" and row["metric"] == "accuracy"]
    scores = {(row["method"], row["seed"]): float(row["score"]) for row in rows}
    seeds = sorted({seed for _, seed in scores})

    def gaps(contrast):
        mine, other = contrast.split(" - ")
        return [scores[mine, seed] - scores[other, seed] for seed in seeds]

    assert assert_published("ceiling/README.md", 1, gaps) == 6
