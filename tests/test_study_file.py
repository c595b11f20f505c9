"""Study files: what they may say, what is refused, and the report over tasks."""

import csv
import json

import numpy as np
import pytest
import yaml
from scipy import stats

from attnreg.experiments.compare import launch
from attnreg.experiments.compare.report.study import write_study_report
from attnreg.experiments.compare.study import read_study
from attnreg.experiments.results import saved_model
from attnreg.experiments.tasks import get_task, load_splits
from tests.commands import assert_sentence, ran
from tests.task_data import write_rows
from tests.test_compare import started_by
from tests.test_compare_study import table, write

pytestmark = pytest.mark.usefixtures("undrawn")

STUDY = {
    "methods": {"plain": "finetune", "high": "ad-drop --p 0.3", "random": "ad-drop --p 0.3 --method random"},
    "baseline": "plain",
    "tasks": [{"task": "agreement", "train-size": [64, 96]}, {"name": "few", "train_size": 32, "learning_rate": 1e-3}],
    "options": {"epochs": 2, "device": "cpu"},
    "seeds": 3,
    "first_seed": 7,
    "primary": ["high", "random"],
}


def file_of(tmp_path, **changes):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return path


def test_a_file_gives_a_comparison_for_each_task_and_value(tmp_path):
    study = read_study(file_of(tmp_path))
    for comparison in study.comparisons.values():
        comparison.check()
    assert list(study.comparisons) == ["agreement-train_size=64", "agreement-train_size=96", "few"]
    comparison = study.comparisons["few"]
    typed = [method.typed for method in comparison.methods]
    assert typed == [f"{name}={text}" for name, text in STUDY["methods"].items()]
    assert comparison.baseline.name == "plain"
    assert comparison.folder.as_posix() == "runs/mine/few"
    assert {run.seed for run in comparison.runs()} == {7, 8, 9}
    settings = comparison.runs()[0].settings
    assert (settings.epochs, settings.learning_rate, settings.train_size, settings.device) == (2, 1e-3, 32, "cpu")
    assert study.comparisons["agreement-train_size=96"].runs()[0].settings.train_size == 96
    assert study.primary == ("high", "random")


def test_what_is_not_said_is_as_on_the_command_line(tmp_path):
    methods = {"high": "ad-drop", "plain": "finetune --weight-decay 0.1"}
    comparison = read_study(file_of(tmp_path, methods=methods, baseline=None, primary=None)).comparisons["few"]
    assert comparison.baseline.name == "plain"
    assert comparison.equal_time


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": {}}, "In .*mine.yaml: Unknown key 'method' in the study. Did you mean methods?"),
        ({"methods": {}}, "In .*mine.yaml: Expected `methods` to be a mapping of names to recipes"),
        ({"methods": {"plain": "finetun"}, "baseline": "plain", "primary": None}, "Did you mean finetune"),
        ({"baseline": "other"}, "In .*mine.yaml: Expected `baseline` to be one of .*, got 'other'"),
        ({"primary": ["high"]}, "Expected `primary` to be a list of two methods"),
        ({"options": {"epoch": 2}}, "Unknown key 'epoch' in `options`. Did you mean epochs?"),
        ({"tasks": [{"task": "agreement", "seed": 1}]}, "Unknown key 'seed' in task 1"),
        ({"tasks": "agreement"}, "Expected `tasks` to be a list"),
        ({"tasks": [{}, {}]}, "Two comparisons are called 'agreement': give one of them another `name`"),
        ({"tasks": [{"published": {"other": {"dev": 1}}}]}, "Expected `published` to be one of .*, got 'other'"),
        ({"seeds": 0}, "Expected `seeds` to be at least 1, got 0"),
        ({"score_on": [{"split": "train"}]}, "Expected `split` to be one of validation, test, got 'train'"),
        ({"score_on": [{"max_length": 3}]}, "Expected `max_length` to be at least 4, got 3"),
        ({"score_on": [{}], "keep_models": False}, "`score_on` needs the models"),
        ({"report_on": "test"}, "Expected `report_on` to be a name in `score_on` of each task .none., got 'test'"),
        ({"tasks": [{"train_size": []}]}, "Expected values for `train_size` of task 1"),
        ({"rungs": ["plain"]}, "methods with values in braces, which held-out rows choose from, got 'plain'"),
    ],
)
def test_what_is_wrong_is_said(cli, tmp_path, changes, says):
    result = cli("compare", "--study", file_of(tmp_path, **changes))
    assert_sentence(result, 1 if "finetun" not in str(changes) else 2, says)
    assert not (tmp_path / "runs").exists()


def test_a_task_may_have_further_data_of_its_own(tmp_path):
    study = read_study(file_of(tmp_path, tasks=[{}, {"name": "b", "score_on": [{"split": "test"}]}]))
    assert [comparison.keep_models for comparison in study.comparisons.values()] == [False, True]
    assert [[scoring.name for scoring in scorings] for scorings in study.score_on.values()] == [[], ["test"]]


def test_methods_beside_a_file_are_added(cli, tmp_path):
    options = ["--study", file_of(tmp_path), "--scale", "small", "--dry-run"]
    shown = ran(cli("compare", "mine=sam --rho {0.1,0.2,0.4}", "r-drop", *options)).output
    assert "Added to the study: mine=sam --rho {0.1,0.2,0.4}, r-drop." in shown
    study = read_study(file_of(tmp_path), None, {"methods": ("mine=sam --rho 0.1",)})
    assert [method.name for method in study.comparisons["few"].methods] == [*STUDY["methods"], "mine"]
    assert_sentence(cli("compare", "plain=sam", *options), 2, "Expected each method once")


def test_baseline_and_study_belong_into_the_file(cli, tmp_path):
    says = "--baseline belongs into the study file: remove it, or remove --study"
    assert_sentence(cli("compare", "--study", file_of(tmp_path), "--baseline", "high"), 2, says)
    assert_sentence(cli("compare", "finetune", "--scale", "small"), 2, "--scale is for --study")
    assert_sentence(cli("compare", "--study", "attendout-table9"), 2, "Did you mean attendout-table")
    (tmp_path / "broken.yaml").write_text("methods: [")
    assert_sentence(cli("compare", "--study", "broken.yaml"), 1, "Cannot read the study broken.yaml")


def test_a_dry_run_prints_the_runs_and_makes_nothing(cli, tmp_path):
    output = ran(cli("compare", "--study", file_of(tmp_path), "--dry-run")).output
    assert "runs/mine/few: 9 runs, 0 finished" in output
    assert "high, final, seed 8: to run" in output
    assert "27 runs in all." in output
    assert not (tmp_path / "runs").exists()
    for comparison in read_study(tmp_path / "mine.yaml").comparisons.values():
        with comparison.begun():
            write(comparison.runs()[0], 0.5)
        result = comparison.runs()[0].folder / "result.json"
        result.write_text(json.dumps({**json.loads(result.read_text()), "seconds": 60.0}))
    output = ran(cli("compare", "--study", tmp_path / "mine.yaml", "--dry-run")).output
    assert "27 runs in all; at 60 s each, 24 min of computing are left." in output


def test_the_report_over_tasks(tmp_path):
    study = read_study(file_of(tmp_path), tmp_path / "out")
    draw, scores = np.random.default_rng(0), {}
    for name, comparison in study.comparisons.items():
        for run in comparison.runs():
            score = round(0.6 + 0.1 * (run.method.name == "high") + draw.normal(0, 0.02), 2)
            scores.setdefault((name, run.method.name), []).append(score)
            write(run, score)
    write_study_report(study)
    report = (study.folder / "report.md").read_text()
    rows = table(report, "Differences by task")
    assert [row["difference of"] for row in rows] == ["high - random"] * 3
    tests = []
    for row in rows:
        high, random = scores[row["task"], "high"], scores[row["task"], "random"]
        gaps = np.subtract(high, random)
        assert row["difference"] == f"{gaps.mean():+.4f}"
        tests.append(stats.ttest_rel(high, random).pvalue)
    assert float(rows[int(np.argmin(tests))]["p (Holm)"]) == pytest.approx(3 * min(tests), abs=1e-4)
    held = [row for row in rows if float(row["p (Holm)"].strip("<")) < 0.05]
    named = "; ".join(f"high - random on {row['task']} ({row['difference']})" for row in held)
    assert f"Of 3 differences, {len(held)} hold after correction: {named}." in report
    over = {row["method"]: row for row in table(report, "Over tasks")}
    mean = np.mean([np.mean(np.subtract(scores[task, "high"], scores[task, "plain"])) for task in study.comparisons])
    assert over["high"]["mean difference"] == f"{mean:+.4f}"
    assert [*over] == ["high", "random"]
    with (study.folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 27
    assert {(line["scored_on"], line["device"], line["threads"]) for line in lines} == {("dev", "cpu", "1")}
    assert (study.folder / "plots" / "difference-1.pdf").is_file()
    assert "- [few](few/report.md)" in report


def test_a_report_may_compare_scores_on_further_data(tmp_path):
    further = {"score_on": [{"split": "test"}], "report_on": "test", "primary": ["high", "plain"]}
    tasks = [{"name": "a", "validation_rows": 9}, {"name": "b"}]
    study = read_study(file_of(tmp_path, tasks=tasks, seeds=2, **further), tmp_path / "out")
    asked = saved_model.request({"task": None}, data_dir=None, split="test", max_length=None, classes={})
    assert study.comparisons["a"].runs()[0].settings.validation_rows == 9
    for comparison in study.comparisons.values():
        for run in comparison.runs():
            write(run, 0.5)
            if run.method.name != "random":
                score = 0.5 + 0.01 * run.seed * (1 + (run.method.name == "high"))
                (run.folder / "evaluations").mkdir()
                content = json.dumps({"request": asked, "metrics": {"accuracy": score}})
                (run.folder / "evaluations" / "test.json").write_text(content)
    write_study_report(study)
    report = (study.folder / "report.md").read_text()
    cells = [[row[name] for name in ("plain", "high", "random")] for row in table(report, "Scores on test")]
    assert cells == [["0.5750", "0.6500", "not run"]] * 2
    assert [row["difference"] for row in table(report, "Differences by task")] == ["+0.0750"] * 2
    assert "No difference found: none of 2 holds after one correction over all of them." in report
    assert [row["mean difference"] for row in table(report, "Over tasks")] == ["+0.0750"]


def test_a_method_that_failed_is_left_out_over_tasks(tmp_path):
    study = read_study(file_of(tmp_path, tasks=[{"name": "a"}, {"name": "b"}], seeds=2), tmp_path / "out")
    for comparison in study.comparisons.values():
        for run in comparison.runs():
            if run.method.name != "random":
                write(run, 0.5 + 0.1 * (run.method.name == "high") + 0.01 * run.seed)
    write_study_report(study)
    report = (study.folder / "report.md").read_text()
    assert [row["method"] for row in table(report, "Over tasks")] == ["high"]
    assert table(report, "Scores")[0]["random"] == "not run"
    assert "Differences by task" not in report  # the primary contrast needs it


@pytest.mark.slow
def test_a_study_end_to_end_with_further_data(cli, warm, undrawn, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "subprocess", started_by(warm))
    (tmp_path / "other").mkdir()
    rows = load_splits(get_task("agreement"))["test"].to_list()[:40]
    named = [{**row, "label": ["bad", "good"][row["label"]]} for row in rows]
    write_rows(tmp_path / "other" / "validation.jsonl", named)
    changes = {
        "methods": ["finetune", "sam"], "baseline": None, "primary": None, "tasks": [{"train_size": [64, 96]}],
        "options": {"epochs": 1, "device": "cpu"}, "seeds": 1,
        "score_on": [
            {"split": "test"},
            {"data-dir": "other", "classes": {"bad": "unacceptable", "good": "acceptable"}, "max-length": 30},
        ],
    }  # fmt: skip
    path = file_of(tmp_path, **changes)
    output = ran(cli("compare", "--study", path, "--jobs", 2)).output
    assert "Report of the study saved to runs/mine/report.md" in output
    further = table((tmp_path / "runs" / "mine" / "report.md").read_text(), "Scores on further data")
    assert [(row["task"], row["scored on"], row["method"]) for row in further][:4] == [
        ("agreement-train_size=64", scored, method) for scored in ("test", "other") for method in ("finetune", "sam")
    ]
    assert all(row["seeds"] == "1 of 1" for row in further)
    run = tmp_path / "runs" / "mine" / "agreement-train_size=64" / "finetune" / "seed7"
    evaluation = json.loads((run / "evaluations" / "other.json").read_text())
    assert evaluation["max_length"] == 30
    classes = ["--class", "bad=unacceptable", "--class", "good=acceptable"]
    direct = ran(cli("evaluate", run, "--data-dir", "other", "--name", "again", *classes)).output
    assert f"accuracy {evaluation['metrics']['accuracy']:.4f}" in direct
    assert_sentence(cli("evaluate", run, "--data-dir", "other", "--class", "x=y"), 1, "No row has the label 'x'")
    assert_sentence(cli("evaluate", run, "--class", "x"), 2, "Expected --class LABEL=CLASS")
    again = ran(cli("compare", "--study", path, "--jobs", 2)).output
    assert ", seed 7:" not in again  # nothing is made or scored again
    length = changes["score_on"][1].pop("max-length")
    without = cli("compare", "--study", file_of(tmp_path, **changes), "--jobs", 2)
    assert_sentence(without, 1, "finetune, seed 7, on other: .* at another length: choose another name")
    changes["score_on"][1] |= {"max-length": length, "classes": {"good": "unacceptable", "bad": "acceptable"}}
    ran(cli("compare", "--study", file_of(tmp_path, **changes), "--jobs", 2))
    swapped = json.loads((run / "evaluations" / "other.json").read_text())["metrics"]
    assert swapped["accuracy"] == pytest.approx(1 - evaluation["metrics"]["accuracy"])


def test_a_study_that_is_stopped_scores_nothing_further(cli, tmp_path, monkeypatch, undrawn):
    def local(jobs, threads):
        def start(runs, watcher):
            for run in runs[:2]:
                run.prepare()
                write(run, 0.5)
            raise KeyboardInterrupt

        return start

    monkeypatch.setattr(launch, "local", local)
    monkeypatch.setattr(saved_model.SavedModel, "score", lambda *args, **options: pytest.fail("scored"))
    path = file_of(tmp_path, score_on=[{"split": "test"}], primary=None)
    assert_sentence(cli("compare", "--study", path), 1, "Stopped. Repeat the command to continue.$")
    assert {path.parent.name for path in tmp_path.rglob("report.md")} == {"agreement-train_size=64", "mine"}


def test_all_data_is_read_before_the_first_run(cli, tmp_path):
    (tmp_path / "good").mkdir()
    write_rows(tmp_path / "good" / "train.jsonl", load_splits(get_task("agreement"))["validation"].to_list()[:200])
    tasks = [{"data_dir": "good", "name": "a"}, {"data_dir": "good", "name": "b", "train_size": 181}]
    path = file_of(tmp_path, tasks=tasks, options={"folds": 10})
    assert_sentence(cli("compare", "--study", path), 1, "Expected --train-size of at most 180, got 181")
    search = {"methods": {"plain": "finetune", "high": "ad-drop --p {0.1,0.3}"}, "primary": None}
    path = file_of(tmp_path, tasks=tasks[:1], options={"folds": 2}, **search)
    assert_sentence(cli("compare", "--study", path), 1, "Holding out 500 rows needs at least 501 training")
    path = file_of(tmp_path, tasks=tasks, options={})
    says = "No validation file in good, .*, or score on rows of train with --validation-rows .in a comparison: --folds"
    assert_sentence(cli("compare", "--study", path), 1, says)
    assert not (tmp_path / "runs").exists()
