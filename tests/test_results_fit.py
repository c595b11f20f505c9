"""What the pages of fits say is what their tables have."""

import re

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
KEY = ["data", "rows", "model", "seed", "method"]
OTHERS = ["Trainer, 10 epochs", "SetFit", "logistic regression"]


def page_of(study):
    return (RESULTS / study / "README.md").read_text(encoding="utf-8")


def rows_of(text):
    """The rows of a table of Markdown, as lists of cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `").replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]


@pytest.fixture(scope="module")
def runs():
    return pd.read_csv(RESULTS / "fit" / "runs.csv")


@pytest.fixture(scope="module")
def parts(runs):
    """The latest runs, by section of the page; data sets are unseen only until `fit` is changed because of them."""
    runs = runs[~(runs["data"].isin(UNSEEN) & (runs["version"] == "longer"))].drop_duplicates(KEY, keep="last")
    seen, of_few = runs[runs["data"].isin(NAMES)], (200, 100, 50)
    return {
        "With 500 rows": seen[~seen["rows"].isin(of_few) & (seen["seed"] == 800)],
        **{f"With {rows} rows": seen[seen["rows"] == rows] for rows in of_few},
        "Data that `fit` was not made with": runs[runs["data"].isin(UNSEEN)],
    }


def promises(fits):
    """How far promises were off, in points: the mean and its standard error; and how many scores the intervals hold."""
    gaps = 100 * (fits["promised"] - fits["score"])
    inside = (fits["low"] <= fits["score"]) & (fits["score"] <= fits["high"])
    return gaps.mean(), gaps.sem(), f"{inside.sum()} of {len(fits)}"


@pytest.mark.parametrize("number", range(5))
def test_a_section_has_the_scores_of_its_runs(parts, number):
    title, part = [*parts.items()][number]
    heads, _, *lines = rows_of(page_of("fit").partition(f"## {title}\n")[2].partition("\n## ")[0])
    table = [dict(zip(heads, line, strict=True)) for line in lines]
    shown = {(row["data set"], row["model"], row.get("seed", "800")): row for row in table}
    assert len(shown) == len(table)
    cells = 0
    for run in part.itertuples():
        row = shown[(NAMES | UNSEEN)[run.data], MODELS[run.model], str(run.seed)]
        assert row[run.method] == f"{run.score:.3f}"
        if run.method == "fit":
            expected = f"{run.promised:.3f}", run.chosen.partition(" (")[0], run.version
            assert (row["promised"], row["fit chose"], row["version"]) == expected
        cells += 4 if run.method == "fit" else 1
    names = {"data set", "model", "seed"}
    assert cells == sum(bool(cell) for row in table for name, cell in row.items() if name not in names)


def test_the_summary_is_that_of_the_sections(parts):
    five, *few, unseen = parts.values()
    is_of_many = five["data"].isin(["banking77", "clinc150"])
    groups = [five[~is_of_many], five[is_of_many], *few, unseen]
    heads, _, *table = rows_of(page_of("fit").partition("## So far\n")[2].partition("\n## ")[0])
    assert heads[2:5] == [f"- {name}" for name in OTHERS]
    for (_, count, *cells), part in zip(table, [*groups, pd.concat(groups)], strict=True):
        fits = part[part["method"] == "fit"]
        scores = part.pivot_table(index=KEY[:4], columns="method", values="score")
        expected = []
        for other in OTHERS:
            gaps = 100 * (scores["fit"] - scores[other]).dropna() if other in scores else []
            leads = f" ({(gaps > 0).sum()} of {len(gaps)})" if len(gaps) else ""
            expected.append(f"{gaps.mean():+.1f}{leads}" if len(gaps) else "")
        mean, error, inside = promises(fits)
        assert cells == [*expected, f"{mean:+.1f}", f"{error:.1f}", inside]
        assert int(count) == len(fits)
    said = re.search(r"Over (\d+) fits\](.*), promises were (.*) points too high", (ROOT / "docs/fit.md").read_text())
    assert (said[1], f"+{said[3]}") == (count, f"{mean:+.1f}")


def test_the_results_count_the_comparisons_in_which_fit_leads(parts):
    page = " ".join((RESULTS.parent / "results.md").read_text(encoding="utf-8").split())
    scores = pd.concat(parts.values()).pivot_table(index=KEY[:4], columns="method", values="score")
    leads = [
        f"{(pair['fit'] > pair[other]).sum()} of {len(pair)}"
        for other in OTHERS[:2]
        for pair in [scores[["fit", other]].dropna()]
    ]
    assert f"Trainer's 10 epochs in {leads[0]} comparisons, SetFit in {leads[1]}" in page
    best = []
    for part in (parts["With 500 rows"], parts["Data that `fit` was not made with"]):
        scores = part.pivot_table(index=KEY[:4], columns="method", values="score")
        scores = scores[scores["Trainer, 10 epochs"].notna() & scores["fit"].notna()]  # the best of two says little
        best.append(f"{(scores['fit'] == scores.max(axis=1)).sum()} of {len(scores)}")
    assert f"above all others in {best[0]}; on unseen data, {best[1]}" in page


def test_the_versions_of_fit_are_those_of_the_runs(runs):
    page = page_of("fit-trials").partition("## From version to version\n")[2]
    heads, _, *table = rows_of(page)
    fits = runs[(runs["method"] == "fit") & runs["data"].isin(NAMES) & (runs["rows"] >= 500)]
    scores = fits[fits["seed"] == 800].pivot_table(index=["data", "model"], columns="version", values="score")
    versions = heads[2:]
    assert {*versions} == {*scores}
    short = {name: key for key, name in (NAMES | MODELS).items()}
    for data, model, *cells in table:
        of = scores.loc[short[data], short[model]]
        assert cells == [f"{of[name]:.3f}" if of[name] == of[name] else "" for name in versions]
    assert len(table) == len(scores)
    words = " ".join(page.split())
    before = [scores[versions[:number]].ffill(axis=1).iloc[:, -1] for number in range(1, len(versions))]
    gains = [100 * (scores[name] - earlier).mean() for name, earlier in zip(versions[1:], before, strict=True)]
    said = [re.search(rf"\*{name}\* ([+-]\d\.\d)", words.partition("Each version")[2])[1] for name in versions[1:]]
    assert [*map(float, said)] == pytest.approx(gains, abs=0.0501)
    for name in versions:
        mean, error, _ = promises(fits[fits["version"] == name])
        numbers = re.search(
            rf"\*{name}\* ([+-]\d\.\d) [^(]*\((?:standard error )?(\d\.\d)\)", words.partition("Promised")[2]
        )
        assert [*map(float, numbers.groups())] == pytest.approx([mean, error], abs=0.0501)
    first = fits[fits["version"] == "first"]
    means = (100 * (first["promised"] - first["score"])).groupby(first["data"]).mean()
    said = re.search(
        r", by data set: " + r" ([+-]\d\.\d)[,:] ".join(NAMES.values()) + r" ([+-]\d\.\d): ", words
    ).groups()
    assert [*map(float, said)] == pytest.approx([means[name] for name in NAMES], abs=0.0501)
    assert float(re.search(r"over the eight has a standard error of (\d\.\d)", words)[1]) == round(means.sem(), 1)


def test_the_means_of_networks_are_those_of_their_table():
    page = page_of("fit-trials")
    table = pd.read_csv(RESULTS / "fit-trials" / "averages.csv")
    names = "weights of 4", "probabilities of 4", "weights of 2"
    whole, both, half = (100 * (table[name] - table["one"]) for name in names)
    for number, run in table.iterrows():
        figures = f"{run['one']:.3f} | {whole[number]:+.1f} | {both[number]:+.1f}"
        assert f"| {NAMES[run['data']]} | {run['rows']} | {run['way']} | {figures} |" in page
    by = r"these (\d+), .* score (.{3}) points more.*error (.{3})\), those of two (.{3}).*of four (.{3})\."
    expected = [len(table), whole.mean(), whole.sem(), half.mean(), both.mean()]
    assert [*map(float, re.search(by, page).groups())] == pytest.approx(expected, abs=0.0501)


def test_the_heads_that_are_fitted_again_are_those_of_their_table():
    page = page_of("fit-trials")
    table = pd.read_csv(RESULTS / "fit-trials" / "heads.csv")
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
    page = page_of("fit-trials")
    table = pd.read_csv(RESULTS / "fit-trials" / "order.csv")
    gaps = 100 * (table["LP-FT"] - table["contrastive"])
    for number, run in table.iterrows():
        scores = f"{run['contrastive']:.3f} | {run['LP-FT']:.3f} | {gaps[number]:+.1f}"
        assert f"| {NAMES[run['data']]} | {MODELS[run['model']]} | {run['rows']} | {scores} |" in page
    said = map(float, re.search(r"scores (\d\.\d) points less .* and (\d\.\d) more with e5", page).groups())
    expected = [gaps[table["model"] == model].mean() for model in MODELS]
    assert [*said] == pytest.approx([-expected[0], expected[1]], abs=0.0501)


def test_the_batches_with_many_rows_are_those_of_their_table():
    page = page_of("fit-trials")
    table = pd.read_csv(RESULTS / "fit-trials" / "batches.csv")
    gaps = 100 * (table["batches of 16"] - table["batches of 32"])
    for number, run in table.iterrows():
        scores = f"{run['batches of 16']:.3f} | {run['batches of 32']:.3f} | {gaps[number]:+.1f}"
        assert f"| {NAMES[run['data']]} | {MODELS[run['model']]} | {scores} |" in page
    of_minilm = gaps[table["model"] == "all-MiniLM-L6-v2"]
    said = float(re.search(r"batches of 16 score (\d\.\d) points more on average, four of four", page)[1])
    assert said == pytest.approx(of_minilm.mean(), abs=0.0501)
    assert (of_minilm > 0).sum() == len(of_minilm) == 4


def test_the_means_of_two_ways_are_those_of_their_table():
    page = page_of("fit-trials")
    table = pd.read_csv(RESULTS / "fit-trials" / "turns.csv")
    for _, run in table.iterrows():
        cells = [NAMES[run["data"]], MODELS[run["model"]], str(run["rows"]), *(f"{score:.3f}" for score in run[3:])]
        assert f"| {' | '.join(cells)} |" in page
    twice = table[["contrastive, twice", "LP-FT, twice"]]
    gains = [
        100 * (table["one of each"] - other)
        for other in (table[["contrastive", "LP-FT"]].mean(axis=1), twice.mean(axis=1), twice.max(axis=1))
    ]
    number = r"(-?\d\.\d) points \((\d\.\d)\) more"
    said = re.search(f"these {len(table)}, one of each scores {number} .* {number} .* {number}", page).groups()
    expected = [of for gain in gains for of in (gain.mean(), gain.sem())]
    assert [*map(float, said)] == pytest.approx(expected, abs=0.0501)
