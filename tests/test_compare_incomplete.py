"""A report of a comparison that is not finished: what is there counts, and what is missing is named."""

import shutil

import numpy as np
import pytest

from attnreg.experiments.compare import launch
from attnreg.experiments.compare.report.comparison import write_report
from tests.test_compare import started_by
from tests.test_compare_study import comparison_of, reported, table, write

pytestmark = pytest.mark.usefixtures("undrawn")


def unfinished(tmp_path):
    """Seeds 0 to 2 of the baseline, seeds 1 and 2 of one method, nothing of the others."""
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", "attention-dropout", "r-drop --alpha {1,5}", seeds=4)
    scores = {"finetune": {0: 0.5, 1: 0.6, 2: 0.55}, "ad-drop": {1: 0.65, 2: 0.61}}
    with comparison.begun():
        for run in comparison.runs():
            if (score := scores.get(run.method.text, {}).get(run.seed)) is not None:
                write(run, score)
        failed = comparison.final_runs(comparison.methods[1])[3]
        failed.log.write_text("some\nError: The loss is nan.\nmore\n")
        write_report(comparison)
    return comparison


def test_what_has_finished_is_reported_and_what_is_missing_is_named(tmp_path):
    comparison = unfinished(tmp_path)
    report = (comparison.folder / "report.md").read_text()
    assert "Incomplete: 5 of 14 runs have finished." in report
    assert "finetune: 3 of 4 seeds; missing: 3." in report
    assert "ad-drop: 2 of 4 seeds; missing: 0, 3." in report
    assert "attention-dropout: 0 of 4 seeds; missing: 0, 1, 2, 3." in report
    assert "r-drop --alpha {1,5}: no score yet, because its search has not finished." in report
    assert "Failed: ad-drop, final, seed 3: Error: The loss is nan." in report
    (row,) = table(report, "Differences to finetune")
    assert (row["method"], row["difference"]) == ("ad-drop", f"{np.mean([0.65 - 0.6, 0.61 - 0.55]):+.4f}")
    assert [row["method"] for row in table(report, "Scores")] == ["finetune", "ad-drop"]


def test_without_the_baseline_there_are_scores_and_without_any_run_there_is_no_report(tmp_path):
    comparison = unfinished(tmp_path)
    shutil.rmtree(comparison.folder / "finetune")
    write_report(comparison)
    report = (comparison.folder / "report.md").read_text()
    assert "## Differences" not in report
    assert [row["method"] for row in table(report, "Scores")] == ["ad-drop"]
    shutil.rmtree(comparison.folder / "ad-drop")
    (comparison.folder / "report.md").unlink()
    assert write_report(comparison) == []
    assert not (comparison.folder / "report.md").exists()


def test_a_method_that_fails_costs_only_itself(cli, warm, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "subprocess", started_by(warm))
    methods = ["bad=finetune --max-length 100", "finetune"]
    small = ["--epochs", 1, "--train-size", 64, "--device", "cpu", "--seeds", 2, "--no-equal-time", "--jobs", 1]
    result = cli("compare", *methods, *small, "--output-dir", "study")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    says = "Error: 1 of the runs failed. The log of the first, study/bad/seed0.log, ends with: Error: "
    assert result.stderr.startswith(says)
    report = (tmp_path / "study" / "report.md").read_text()
    assert "Incomplete: 2 of 4 runs have finished." in report
    assert "Failed: bad, final, seed 0: Error: Expected --max-length of at most 64 for this model, got 100" in report
    assert table(report, "Scores")[0]["method"] == "finetune"
    assert not (tmp_path / "study" / "bad" / "seed1.log").exists()  # it would fail in the same way


@pytest.mark.parametrize("deviation", [0.0, 0.02])
def test_detectable_differences_are_told(tmp_path, deviation):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", seeds=3)
    gaps = [0.1 + deviation * number for number in (-1, 0, 1)]
    report = reported(comparison, lambda run: 0.5 if run.method.text == "finetune" else 0.5 + gaps[run.seed])
    (row,) = table(report, "Differences to finetune")
    if deviation:
        assert float(row["detectable"]) == pytest.approx(0.0657, abs=2e-3)  # 3.26 SDs for three seeds: a table of t
        assert 30 < int(row["seeds for 0.01"]) < 36  # (1.96 + 0.84)² · 4 = 31.4, and two more for t
    else:
        assert (row["detectable"], row["seeds for 0.01"]) == ("all equal", "all equal")
