"""Short names of methods: where they are shown, and where they lead."""

import csv
import json
import re

import pytest

from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.report.comparison import write_report
from tests.test_compare_study import comparison_of, table, write
from tests.test_plots import keeping

pytestmark = pytest.mark.usefixtures("undrawn")
HIGH, TRIED = "high=ad-drop --p 0.3", "tried=attention-dropout --drop-rate {0.1,0.2}"


def finish(comparison):
    """Write down all runs; the second method takes twice as long."""
    comparison.folder.mkdir(exist_ok=True)
    with comparison.begun():
        while pending := [run for run in comparison.runs() if not run.finished]:
            for run in pending:
                score = 0.6 + 0.05 * run.seed * ("0.2" in run.method.text)
                write(run, score, 20.0 if run.method.name == "high" else 10.0)
            comparison.decide()


@pytest.mark.parametrize(
    ("typed", "name", "text", "slug"),
    [
        ("high=ad-drop --p 0.3", "high", "ad-drop --p 0.3", "high"),
        ("very-high=ad-drop --p=0.3", "very-high", "ad-drop --p=0.3", "very-high"),
        ("ad-drop --p=0.3", "ad-drop --p=0.3", "ad-drop --p=0.3", "ad-drop--p=0.3"),
        ("ad-drop --p 0.3", "ad-drop --p 0.3", "ad-drop --p 0.3", "ad-drop--p0.3"),
        ("a--b=finetune", "a--b=finetune", "a--b=finetune", "a--b=finetune"),
    ],
)
def test_what_is_a_name_and_what_is_not(typed, name, text, slug):
    method = Method.parse(typed)
    assert (method.name, method.text, method.slug, method.typed) == (name, text, slug, typed)


def test_a_recipe_of_ones_own_may_have_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.py").touch()
    assert Method.parse("a=b.py --p 1").alias is None


def test_folders_of_runs_differ(tmp_path):
    comparison = comparison_of(tmp_path, "plain=finetune", HIGH, TRIED, options={"epochs": 2})
    finish(comparison)
    folders = {run.folder.parent.relative_to(comparison.folder).as_posix() for run in comparison.runs()}
    assert folders == {"plain", "high", "search/tried=0.1", "search/tried=0.2", "tried=0.2", "plain--epochs4"}
    assert json.loads((comparison.folder / "study.json").read_text())["methods"] == ["plain=finetune", HIGH, TRIED]


def test_the_report_shows_names_and_tells_options(tmp_path):
    comparison = comparison_of(tmp_path, "plain=finetune", HIGH, TRIED, options={"epochs": 2})
    finish(comparison)
    with keeping() as figures:
        (_, scores, differences) = write_report(comparison)
    assert [row[0] for row in scores.rows] == ["plain", "high", "tried"]
    assert [row[0] for row in differences.rows] == ["high", "tried"]
    assert [label.get_text() for label in figures["differences"].axes[0].get_yticklabels()] == ["high", "tried"]
    shown = [label.get_text() for label in figures["seeds"].axes[0].get_yticklabels()]
    assert shown == ["plain", "high", "tried", "plain --epochs 4"]
    report = (comparison.folder / "report.md").read_text()
    assert report.startswith("# plain, high, tried on agreement")
    given = {row["method"]: row["as given"] for row in table(report, "Options")}
    assert given == {"plain": "finetune", "high": "ad-drop --p 0.3", "tried": TRIED.partition("=")[2]}
    assert f"'{HIGH}' '{TRIED}'" in report  # the command
    assert "--baseline plain" in report
    assert re.findall(r"^\| (tried=\S+) ", report, re.M) == ["tried=0.1", "tried=0.2"]
    with (comparison.folder / "results.csv").open() as file:
        assert {"plain", "high", "tried=0.1", "plain --epochs 4"} <= {row["method"] for row in csv.DictReader(file)}


def test_an_older_comparison_goes_on_without_names(tmp_path):
    old = comparison_of(tmp_path, "finetune", "ad-drop --p 0.3", equal_time=False)
    finish(old)
    again = comparison_of(tmp_path, "finetune", "ad-drop --p 0.3", HIGH, equal_time=False)
    again.check()
    assert [run.finished for run in again.runs()] == [True] * 4 + [False] * 2  # the name has a folder of its own


@pytest.mark.parametrize("baseline", ["plain", "finetune", "plain=finetune"])
def test_the_baseline_may_be_named(cli, tmp_path, baseline):
    args = ["compare", HIGH, "plain=finetune", "--baseline", baseline, "--launcher", "commands", "--seeds", 1]
    result = cli(*args, "--output-dir", "study")
    assert result.exit_code == 0, result.output
    assert "study/high/seed0" in result.output
    assert json.loads((tmp_path / "study" / "study.json").read_text())["baseline"] == "plain=finetune"
