"""What the page of fits says is what its tables have."""

import csv
import re
from collections import defaultdict

import numpy as np
import pandas as pd
import pytest

from tests.helpers.repository import ROOT

RESULTS = ROOT / "docs" / "results"
MODELS = {"all-MiniLM-L6-v2": "MiniLM", "multilingual-e5-small": "e5-small"}
NAMES = {
    "cr": "CR", "mr": "MR", "banking77": "BANKING77", "clinc150": "CLINC150",
    "subj": "Subj", "trec": "TREC", "sst2_sentences": "SST-2's sentences", "mrpc": "MRPC",
}  # fmt: skip
UNSEEN = {
    "tweets": "Tweets", "newsgroups": "Newsgroups", "reuters_r8": "Reuters R8", "slovenian": "Slovenian comments",
    "books": "Books", "friends": "Friends", "mails": "Mails",
}  # fmt: skip
OF_UNSEEN = "Five data sets that `fit` was not made with"
AGAIN, LONGER, MORE = "With contrastive fine-tuning", "With more tokens", "Three more, and the second model"
MEANS, SECOND = "Fits with the mean of several trainings", "With 100 rows, another seed"
NOW = "With 500 rows, a head that is fitted again"


def read(path):
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def part_of_fit(title):
    """A section of the page of fits, its runs, and how far promises were off, in points, and the data sets of these."""
    page = (RESULTS / "fit" / "README.md").read_text(encoding="utf-8")
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    files = {
        AGAIN: "again.csv", LONGER: "longer.csv", MORE: "unseen.csv", MEANS: "averaged.csv", SECOND: "hundred.csv",
        NOW: "now.csv",
    }  # fmt: skip
    runs = read(RESULTS / "fit" / files.get(title, "runs.csv"))
    if title not in files:
        titles = {rows: f"With {rows} rows" for rows in ("50", "100", "200")}
        of_rows = [(titles.get(run["rows"], "So far"), run) for run in runs]
        runs = [run for of, run in of_rows if (OF_UNSEEN if run["data"] in UNSEEN else of) == title]
    fits = [run for run in runs if run["method"] == "fit"]
    gaps = np.array([100 * (float(run["promised"]) - float(run["score"])) for run in fits])
    return section, runs, gaps, [run["data"] for run in fits]


@pytest.mark.parametrize(
    "title",
    ["So far", AGAIN, LONGER, MORE, MEANS, SECOND, NOW, "With 200 rows", "With 100 rows", "With 50 rows", OF_UNSEEN],
)
def test_the_page_of_fit_has_the_scores_of_its_runs(title):
    page, runs, gaps, _ = part_of_fit(title)
    heads, _, *lines = (
        [each.strip("` ") for each in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line
    )
    table = {(row[0], row[1], row[2]): dict(zip(heads, row, strict=True)) for row in lines}
    shown = 0
    for run in runs:
        row = table[(NAMES | UNSEEN)[run["data"]], MODELS[run["model"]], run["seed"]]
        assert row[run["method"]] == f"{float(run['score']):.3f}"
        assert run["method"] != "fit" or row["promised"] == f"{float(run['promised']):.3f}"
        shown += 1 + (run["method"] == "fit")
    assert shown == sum(bool(cell) for row in table.values() for cell in [*row.values()][3:-1])
    mean, error = map(float, re.search(r"test\*\*, over.*: ([+-]\d\.\d) points.*\s(\d\.\d)\.", page).groups())
    assert (mean, error) == pytest.approx((gaps.mean(), gaps.std(ddof=1) / len(gaps) ** 0.5), abs=0.0501)
    inside = sum(float(run["low"]) <= float(run["score"]) <= float(run["high"]) for run in runs if run["low"])
    assert f"In {inside} of {len(gaps)} the test score lies" in page


def test_the_means_of_networks_are_those_of_their_table():
    page, _, _, _ = part_of_fit("The mean of several trainings")
    table = pd.read_csv(RESULTS / "fit" / "averages.csv")
    names = "weights of 4", "probabilities of 4", "weights of 2"
    whole, both, half = (100 * (table[name] - table["one"]) for name in names)
    for number, run in table.iterrows():
        figures = f"{run['one']:.3f} | {whole[number]:+.1f} | {both[number]:+.1f}"
        assert f"| {NAMES[run['data']]} | {run['rows']} | {run['way']} | {figures} |" in page
    by = r"these (\d+), .* score (.{3}) points more.*error (.{3})\), those of two (.{3}).*of four (.{3})\."
    expected = [len(table), whole.mean(), whole.sem(), half.mean(), both.mean()]
    assert [*map(float, re.search(by, page).groups())] == pytest.approx(expected, abs=0.0501)


def test_the_heads_that_are_fitted_again_are_those_of_their_table():
    page, _, _, _ = part_of_fit("A head that is fitted again")
    table = pd.read_csv(RESULTS / "fit" / "heads.csv")
    of_one = [100 * (table[f"one, C {penalty}"] - table["one"]) for penalty in ("0.01", "0.1", "1", "10")]
    gains = [of_one[1], 100 * (table["mean, C 0.1"] - table["mean"])]
    for number, run in table.iterrows():
        cells = [NAMES[run["data"]], MODELS[run["model"]], str(run["rows"]), f"{run['one']:.3f}"]
        cells += [*(f"{gain[number]:+.1f}" for gain in of_one), f"{run['mean']:.3f}", f"{gains[1][number]:+.1f}"]
        assert f"| {' | '.join(cells)} |" in page
    said = re.search(rf"these {len(table)},.* (.{{3}}) points.*error (.{{3}})\), .*two (.{{3}}) \((.{{3}})\)", page)
    expected = [of for gain in gains for of in (gain.mean(), gain.sem())]
    assert [*map(float, said.groups())] == pytest.approx(expected, abs=0.0501)


def test_the_order_of_two_ways_is_that_of_their_table():
    page, _, _, _ = part_of_fit("Which comes first")
    table = pd.read_csv(RESULTS / "fit" / "order.csv")
    gaps = 100 * (table["LP-FT"] - table["contrastive"])
    for number, run in table.iterrows():
        scores = f"{run['contrastive']:.3f} | {run['LP-FT']:.3f} | {gaps[number]:+.1f}"
        assert f"| {NAMES[run['data']]} | {MODELS[run['model']]} | {run['rows']} | {scores} |" in page
    said = map(float, re.search(r"scores (\d\.\d) points less .* and (\d\.\d) more with e5", page).groups())
    expected = [gaps[table["model"] == model].mean() for model in MODELS]
    assert [*said] == pytest.approx([-expected[0], expected[1]], abs=0.0501)


def test_promises_by_data_set_are_those_of_the_runs():
    page, _, gaps, data = part_of_fit("So far")
    means = [gaps[[name == each for each in data]].mean() for name in NAMES]
    by_name = (
        r" ([+-]\d\.\d)[,;]\s".join(NAMES.values()) + r" ([+-]\d\.\d);[^*]*\s([+-]\d\.\d),\sstandard\serror\s(\d\.\d)\."
    )
    said = map(float, re.search(r"By data set: " + by_name, page).groups())
    error = np.std(means, ddof=1) / len(means) ** 0.5
    assert [*said] == pytest.approx([*means, np.mean(means), error], abs=0.0501)


def test_the_results_count_the_comparisons_in_which_fit_leads():
    scores = defaultdict(dict)
    tables = "runs.csv", "again.csv", "averaged.csv", "now.csv", "unseen.csv", "hundred.csv"
    for name in tables:  # the later fits replace earlier ones of the same rows
        for run in read(RESULTS / "fit" / name):
            scores[run["data"], run["rows"], run["model"], run["seed"]][run["method"]] = float(run["score"])
    page = " ".join((RESULTS.parent / "results.md").read_text(encoding="utf-8").split())
    leads = {
        method: [of["fit"] > of[method] for of in scores.values() if {"fit", method} <= {*of}]
        for method in ("Trainer, 10 epochs", "SetFit")
    }
    (trainer, of_trainer), (setfit, of_setfit) = ((sum(won), len(won)) for won in leads.values())
    assert f"Trainer's 10 epochs in {trainer} of {of_trainer} comparisons, SetFit in {setfit} of {of_setfit}" in page
    again = [
        scores[tuple(run[name] for name in ("data", "rows", "model", "seed"))]
        for run in read(RESULTS / "fit" / "again.csv")
    ]
    again = [of for of in again if "Trainer, 10 epochs" in of]  # with one other method, the best of all says little
    unseen = [of for (data, *_), of in scores.items() if data in UNSEEN and "Trainer, 10 epochs" in of]
    best = [sum(of["fit"] == max(of.values()) for of in some) for some in (again, unseen)]
    assert f"above all others in {best[0]} of {len(again)}; on unseen data, {best[1]} of {len(unseen)}" in page
