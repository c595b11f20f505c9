"""Contributed studies stand among the results, also those without a gain."""

import runpy

import numpy as np
import pytest
import yaml
from scipy.stats import ttest_1samp

from tests.helpers.commands import write_csv
from tests.helpers.repository import ROOT

RESULTS = ROOT / "docs" / "results"


@pytest.fixture
def overview(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)
    return runpy.run_path(str(RESULTS / "overview.py"))


def test_a_contributed_study_is_compared_as_its_file_says(overview, tmp_path, monkeypatch):
    folder = tmp_path / "contributed" / "mine"
    folder.mkdir(parents=True)
    plan = {"methods": {"plain": "finetune", "high": "ad-drop", "low": "ad-drop --region low"}}
    plan |= {"baseline": "plain", "primary": ["high", "low"], "report_on": "test", "options": {"model": "base/small"}}
    plan |= {"tasks": [{"task": "sst2", "data_dir": "DATA/sst2", "train-size": [100, 200], "model": ["base/small"]}]}
    plan |= {"score_on": [{"split": "test"}]}
    (folder / "study.yaml").write_text(yaml.safe_dump(plan))
    scores = {"high": (0.8, 0.7), "low": (0.6, 0.6), "plain": (0.5, 0.7)}
    lines = [
        f"sst2-model=base_small-train_size={size},{name},{seed},{row},abc"
        for size in (100, 200)
        for name, each in scores.items()
        for seed in (3, 4)
        for row in (f"test,accuracy,{each[seed - 3] * size / 100}", "test,loss,7", "dev,accuracy,0.1")
    ]
    (folder / "results.csv").write_text("\n".join(["task,method,seed,scored_on,metric,score,commit", *lines]))
    names = overview["comparisons"].__globals__  # of published.py
    monkeypatch.setitem(names, "FOLDER", tmp_path)
    pairs = ((each, contrast) for each in names["contributed"](folder) for contrast in names["names"](each))
    rows = [names["comparison"](*pair) for pair in pairs]
    planned = [" ".join(row[name] for name in ("method", "baseline", "planned")) for row in rows]
    assert planned == ["high low primary", "high plain secondary", "low plain secondary"] * 2
    assert rows[0]["setting"] == "mine: sst2, 100 rows, 2 seeds"
    assert (rows[0]["rows"], rows[0]["model"], rows[0]["commit"]) == ("phrases → sentences", "small", "abc")
    test = ttest_1samp([0.2, 0.1], 0)
    expected = [0.15, *test.confidence_interval(0.95), test.pvalue]
    assert [rows[0][name] for name in ("difference", "low", "high", "p")] == pytest.approx(expected)
    assert (rows[0]["metric"], rows[3]["train_size"], rows[3]["board"]) == ("accuracy", 200, "sst2, 200 rows")
    assert rows[3]["difference"] == pytest.approx(0.3)


@pytest.mark.parametrize(("seeds", "says"), [((1, 2), "all equal"), ((1,), "1 seed")])
def test_a_difference_that_cannot_be_tested_is_a_row_without_interval(overview, tmp_path, monkeypatch, seeds, says):
    (folder := tmp_path / "contributed" / "mine").mkdir(parents=True)
    plan = {"methods": {"plain": "finetune", "high": "ad-drop"}, "tasks": [{"task": "sst2"}]}
    (folder / "study.yaml").write_text(yaml.safe_dump(plan))
    rows = [("sst2", name, seed, "dev", "accuracy", 0.5) for name in ("plain", "high") for seed in seeds]
    write_csv(folder / "results.csv", [("task", "method", "seed", "scored_on", "metric", "score"), *rows])
    names = overview["comparisons"].__globals__  # of published.py
    monkeypatch.setitem(names, "FOLDER", tmp_path)
    names["table"].cache_clear()
    (row,) = (names["comparison"](each, "high - plain") for each in names["contributed"](folder))
    overview["write"]([row], tmp_path / "all.csv")
    assert row["difference"] == 0
    assert np.isnan([row[name] for name in ("low", "high", "p", "p_holm", "detectable")]).all()
    assert f"| high - plain |  | +0.0000 | {says} | {says} | {says} | {says} |" in overview["all_table"]([row])
    assert f"| AD-DROP | {len(seeds)} | +0.0000 | {says} | {says} |" in overview["board"]([row])
