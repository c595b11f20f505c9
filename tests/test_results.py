"""Published differences are those of the published runs, recomputed here from the scores of each seed."""

import csv
import itertools
import re
import runpy
from functools import cache
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from tests.helpers.commands import write_csv
from tests.helpers.repository import ROOT

RESULTS = ROOT / "docs" / "results"
STUDIES = sorted(RESULTS.glob("*/README.md"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/providers/*.md")), *STUDIES]
TERM = r"([+-]?) ?(\S+\.csv):(\w+)\[(.*?)\]"  # a column of a table, in the rows with these values


@cache
def read(path):
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


ALL = read(RESULTS / "comparisons" / "all.csv")


def of_seeds(formula):
    """The score of each seed by what all.csv says of its source."""
    found = {}
    for sign, path, column, where in re.findall(TERM, formula):
        values, names = {*map(unquote, where.split(" & "))}, re.findall(r"(?:^| & )(\w+)=", where)
        for row in read(RESULTS / path):
            if all(f"{name}={row[name]}" in values for name in names):
                found.setdefault(int(row["seed"]), []).append((-1 if sign == "-" else 1) * float(row[column]))
    terms = len(re.findall(TERM, formula))
    assert terms
    assert all(len(each) in (terms, 1) for each in found.values()), formula
    return {seed: sum(each) for seed, each in found.items() if len(each) == terms}


def recomputed(gaps):
    """Mean, 95 % interval and p of paired differences, by Student's t."""
    gaps = np.asarray(gaps)
    half = student.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
    return [gaps.mean(), gaps.mean() - half, gaps.mean() + half, ttest_1samp(gaps, 0).pvalue]


def random_effects(data):
    """Mean over data sets, 95 % interval and p: DerSimonian and Laird's variance between them, Knapp and Hartung's test."""
    places, free = range(len(data)), len(data) - 1
    means = [sum(gaps) / len(gaps) for gaps in data]
    within = [sum((gap - means[i]) ** 2 for gap in data[i]) / (len(data[i]) - 1) / len(data[i]) for i in places]
    fixed = sum(means[i] / within[i] for i in places) / sum(1 / each for each in within)
    spread = sum((means[i] - fixed) ** 2 / within[i] for i in places)
    scale = sum(1 / each for each in within) - sum(1 / each**2 for each in within) / sum(1 / each for each in within)
    weights = [1 / (each + max(0, (spread - free) / scale)) for each in within]
    mean = sum(weights[i] * means[i] for i in places) / sum(weights)
    wide = sum(weights[i] * (means[i] - mean) ** 2 for i in places) / free
    error = (max(1, wide) / sum(weights)) ** 0.5
    low, high = (mean + student.ppf(end, free) * error for end in (0.025, 0.975))
    return [mean, low, high, 2 * student.cdf(-abs(mean) / error, free)]


def crossed_effects(data):
    """Mean over data sets and models, its interval, p, and the interval of a new one: restricted maximum likelihood.

    ``data`` has the differences of seeds by ``(data set, model)``; seeds have one variance in all. The likelihood
    is that of contrasts that are orthogonal to the mean, maximized on a grid that is refined around its best point.
    """
    y = np.array([np.mean(gaps) for gaps in data.values()])
    known = np.eye(len(y)) * np.mean(
        [np.var(gaps, ddof=1) / len(gaps) if len(gaps) > 1 else 0 for gaps in data.values()]
    )
    same = [np.array([[a[k] == b[k] for b in data] for a in data], float) for k in (0, 1)] + [np.eye(len(y))]
    contrasts = np.linalg.svd(np.ones((1, len(y))))[2][1:]
    z, center, wide = contrasts @ y, np.full(3, np.log(y.var())), 6.0
    for _ in range(12):
        logs = np.array([*itertools.product(np.linspace(-wide, wide, 7), repeat=3)]) + center
        tried = np.concatenate([np.exp(logs) * [*on] for on in itertools.product((0, 1), (0, 1), (1,))])
        of_contrasts = contrasts @ (known + np.tensordot(tried, same, 1)) @ contrasts.T
        minus_twice = np.linalg.slogdet(of_contrasts)[1] + z @ np.linalg.solve(of_contrasts, z[:, None])[..., 0].T
        best = tried[minus_twice.argmin()]
        center, wide = np.where(best > 0, np.log(np.maximum(best, 1e-300)), center), wide / 1.7
    weights = np.linalg.solve(known + np.tensordot(best, same, 1), np.ones(len(y)))
    mean, variance, free = weights @ y / weights.sum(), 1 / weights.sum(), len({place for place, _ in data}) - 1
    t = student.ppf(0.975, free)
    half, new = t * variance**0.5, t * (variance + best.sum()) ** 0.5
    p = 2 * student.cdf(-abs(mean) / variance**0.5, free)
    return [mean, mean - half, mean + half, p, mean - new, mean + new]


def corrected(ps):
    """Holm's correction: the i-th smallest of m times m - i, never below a smaller one's."""
    order, adjusted = np.argsort(ps), np.empty(len(ps))
    for place, number in enumerate(order):
        adjusted[number] = min(1.0, ps[number] * (len(ps) - place))
        if place:
            adjusted[number] = max(adjusted[number], adjusted[order[place - 1]])
    return adjusted


@pytest.fixture
def overview(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)
    return runpy.run_path(str(RESULTS / "overview.py"))


def test_all_comparisons_follow_from_the_scores_of_their_seeds():
    names = ("setting", "method", "baseline", "study", "extension")
    assert len({tuple(row[name] for name in names) for row in ALL}) == len(ALL)
    for row in ALL:
        first, count = int(row["first_seed"]), int(row["seeds"])
        data = []
        for formulas in zip(row["scores"].split("; "), row["baseline_scores"].split("; "), strict=True):
            mine, other = map(of_seeds, formulas)
            data.append([mine[seed] - other[seed] for seed in range(first, first + count)])
            some = row["extension"] == "added" or "the first" in row["setting"]  # of the seeds that both have
            assert len({*mine} & {*other}) == count or some, row
        names = ["difference", "low", "high", "p"]
        if not row["p"]:  # one seed, or the same difference with all
            names, expected, close = names[:1], [np.mean(data)], {"rel": 1e-5, "abs": 1e-9}
            assert np.ptp(data) < 1e-9, row
        elif row["new_low"]:
            cells = {}
            for place, gaps in zip(re.findall(r"task=(\w+)-model=([\w-]+)", row["scores"]), data, strict=True):
                # MR has SST-2's sentences: they count once, by their mean.
                cells.setdefault((place[0].replace("sst2_sentences", "mr"), place[1]), []).append(gaps)
            expected = crossed_effects({place: np.mean(gaps, axis=0) for place, gaps in cells.items()})
            names, close = [*names, "new_low", "new_high"], {"rel": 1e-2, "abs": 1e-4}
        else:
            expected, close = random_effects(data) if len(data) > 1 else recomputed(*data), {"rel": 1e-5, "abs": 1e-9}
        assert [float(row[name]) for name in names] == pytest.approx(expected, **close), row
    tested = [row for row in ALL if row["p"]]
    adjusted = corrected(np.array([float(row["p"]) for row in tested]))
    assert [float(row["p_holm"]) for row in tested] == pytest.approx(adjusted, rel=1e-5)


def test_the_file_and_the_pages_are_those_of_the_script(overview, tmp_path):
    rows = overview["comparisons"]()
    overview["write"](rows, tmp_path / "all.csv")
    again = "run python docs/results/overview.py"
    assert (tmp_path / "all.csv").read_text() == (RESULTS / "comparisons/all.csv").read_text(), again
    for page in overview["pages"]():
        text = page.read_text(encoding="utf-8")
        assert overview["renewed"](text, overview["shown_on"](page, rows)) == text, f"{page}: {again}"


def published(text, pattern):
    """What a pattern finds outside of commands and code."""
    return re.findall(pattern, re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S))


def rounded(number, printed):
    """Whether a number is printed so, as it is or in points."""
    digits = len(printed.partition(".")[2])
    return any(abs(scale * number - float(printed)) <= 0.5001 * 10**-digits for scale in (1, 100))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_interval_and_p_on_a_page_is_of_a_comparison(page):
    text = page.read_text(encoding="utf-8")
    pattern = r"(?:([+-]?\d+\.\d+)(?: points)?(?: \|)? )?\[([+-]\d+(?:\.\d+)?), ([+-]\d+(?:\.\d+)?)\]"
    for mean, *ends in published(text, pattern):
        found = [
            row
            for row in ALL
            for low, high in (("low", "high"), ("new_low", "new_high"))
            if row[low] and rounded(float(row[low]), ends[0]) and rounded(float(row[high]), ends[1])
        ]
        found = [row for row in found if not mean or rounded(abs(float(row["difference"])), mean.strip("+-"))]
        assert found, f"{mean} [{', '.join(ends)}] is in no row of all.csv"
    for value in published(text, r"\bp (?:=|<|of|below|above) (0?\.\d\d+)"):
        known = [float(row[name]) for row in ALL for name in ("p", "p_holm") if row[name]]
        assert any(abs(each - float(value)) <= 0.5001 * 10 ** -len(value.partition(".")[2]) for each in known), value
    if page in STUDIES or page.name in ("results.md", "which.md") or page == PAGES[0]:
        unchecked = r"interval[^.\n|]{0,30} [+-]?\d[\d.]* to [+-]?\d[^.\n]{0,9}|\[\d+\.\d+, \d+\.\d+\]|±\s?\d*\.\d+"
        assert not published(text, unchecked), "write intervals as [-0.5, +1.5], so that this test finds them"
        if "SST-2" in text:
            assert re.search("phrases|SST-2's sentences", text), "say that SST-2 of GLUE is trained on phrases"


def test_a_contributed_study_may_have_folds_and_methods_without_names(overview, tmp_path, monkeypatch):
    (folder := tmp_path / "contributed" / "mine").mkdir(parents=True)
    high = 'regularize --provider "OnLayers(DropHead(0.1), [0]) & DropKey(0.1)"'
    plan = {"methods": ["finetune", high], "tasks": [{"task": "sst2", "folds": 3}]}
    (folder / "study.yaml").write_text(yaml.safe_dump(plan))
    runs = [(name, seed, seed * by) for name, by in (("finetune", 1), (high, 3)) for seed in (1, 2)]
    rows = [("sst2", name, seed, "held-out", "accuracy", score) for name, seed, score in runs]
    write_csv(folder / "results.csv", [("task", "method", "seed", "scored_on", "metric", "score"), *rows])
    monkeypatch.setitem(names := overview["comparisons"].__globals__, "FOLDER", tmp_path)
    names["table"].cache_clear()
    (row,) = (names["comparison"](each, f"{high} - finetune") for each in names["contributed"](folder))
    monkeypatch.setitem(globals(), "RESULTS", tmp_path)
    assert of_seeds(row["scores"]) == {1: 3.0, 2: 6.0}


def test_a_second_model_is_a_column_of_the_board(overview):
    def row(board, model, difference, matched=""):
        made = {"board": board, "model": model, "difference": difference, "matched": matched, "method": "high"}
        return {**made, "baseline": "plain", "seeds": 8, "low": 0.0, "high": 0.1, "p_holm": 0.5, "extension": ""}

    rows = [row("cr", "MiniLM", 0.01), row("cr", "e5-small", 0.02), row("cr", "e5-small", 0.03, "time")]
    cr, trec = overview["board"]([*rows, row("trec", "MiniLM", 0.04)]).split("**trec**")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in cr.splitlines() if line.startswith("|")]
    assert cells[0][:4] == ["method", "model", "seeds", "minus plain"]
    assert [line[:4] for line in cells[2:]] == [
        ["AD-DROP", "e5-small", "8", "+0.0200"],
        ["AD-DROP", "MiniLM", "8", "+0.0100"],
    ]
    assert [line[6].split()[0] if line[6] else "" for line in cells[2:]] == [
        "+0.0300",
        "",
    ]  # at equal time, of its model
    assert "| model |" not in trec


@pytest.mark.parametrize("apart", [0.0, 0.5, 2.0])  # of the variance between data sets, none, some, most
def test_data_sets_are_pooled_by_a_random_effects_model(overview, apart):
    draws = np.random.default_rng(int(2 * apart))
    data = [draws.normal(apart * place, 1 + place, 12) for place in range(4)]
    found, _ = overview["comparisons"].__globals__["pooled"](data)
    assert [*found] == pytest.approx(random_effects(data))


@pytest.mark.parametrize("seeds", [1, 2, 8])
@pytest.mark.parametrize("spread", [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.6, 0.8, 0.4)])  # of data set, model, both
def test_data_sets_and_models_are_pooled_as_crossed_random_effects(overview, spread, seeds):
    draws = np.random.default_rng(7)
    of_set, of_model = draws.normal(0, spread[0], 7), draws.normal(0, spread[1], 2)
    gaps = {
        (f"set {d}", f"model {m}"): draws.normal(0.5 + of_set[d] + of_model[m] + draws.normal(0, spread[2]), 1.0, seeds)
        for d in range(7)
        for m in range(2)
    }
    found, new = overview["comparisons"].__globals__["crossed"](gaps)
    assert [*found, *new] == pytest.approx(crossed_effects(gaps), rel=1e-2, abs=1e-3)


def test_the_arms_of_the_average_are_ranked_on_each_data_set_and_model():
    names = {"ad-drop": "AD-DROP", "random": "random masks", "plain": "plain", "longer": "plain for as long"}
    rows = pd.read_csv(RESULTS / "on-average" / "results.csv")
    kinds = {"accuracy": ("test", "accuracy"), "calibration": ("dev", "calibration_error")}
    wide = {
        kind: rows[(rows.scored_on == split) & (rows.metric == metric)]
        .pivot(index=["task", "seed"], columns="method", values="score")
        .dropna()
        for kind, (split, metric) in kinds.items()
    }
    assert len(wide["accuracy"]) == 16
    ranks = wide["accuracy"].rank(axis=1, ascending=False).mean()
    page = (RESULTS / "on-average" / "README.md").read_text(encoding="utf-8")
    for method, name in names.items():
        accuracy, error = (wide[kind][method].mean() for kind in kinds)
        assert f"| {name} | {accuracy:.4f} | {ranks[method]:.2f} | {error:.3f} |" in page


def test_another_cpu():
    builds = {}
    for row in read(RESULTS / "another-cpu" / "results.csv"):
        runs = builds.setdefault((row["task"], row["kernels"], row["threads"]), {})
        runs[row["method"], row["seed"]] = float(row["score"])
    gaps = {
        build: np.mean([score if method == "high" else -score for (method, _), score in runs.items()]) * 2
        for build, runs in builds.items()
        if len(runs) == 8
    }
    text = (RESULTS / "another-cpu" / "README.md").read_text()
    for build, runs in builds.items():
        of = {
            each: " ".join(f"{score:.4f}" for (name, _), score in runs.items() if name == each)
            for each in ("plain", "high")
        }
        gap = f" {round(gaps[build], 9):+.4f} |" if build in gaps else " |"
        assert f"| {' | '.join(build)} | {of['plain']} | {of['high']} |{gap}\n" in text
    for task in ("sst2_sentences", "agreement"):
        same = [runs for (name, *_), runs in builds.items() if name == task]
        move = max(np.ptp([runs[run] for runs in same if run in runs]) for run in same[0])
        means = np.ptp([gap for (name, *_), gap in gaps.items() if name == task])
        assert f"| {task} | {100 * move:.2f} | {100 * means:.2f} |" in text
