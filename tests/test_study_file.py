"""Study files: what they may say, what is refused, what options beside them change, and the report over tasks."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from attnreg.errors import InputError
from attnreg.experiments.compare.study import change, read_study
from attnreg.experiments.options.files import study_files
from attnreg.experiments.results import saved_model
from attnreg.experiments.tasks import get_task, load_data
from tests.helpers.cases import sample
from tests.helpers.commands import assert_sentence, ran, read_csv
from tests.helpers.comparisons import STUDY, file_of, reported_study, table, write, written
from tests.helpers.task_data import write_rows

pytestmark = pytest.mark.usefixtures("undrawn")


def test_a_file_gives_a_comparison_for_each_task_and_value(tmp_path):
    study = read_study(file_of(tmp_path))
    for comparison in study.comparisons.values():
        comparison.check_methods()
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


def test_the_home_in_an_output_folder_is_found(tmp_path):
    assert read_study(file_of(tmp_path, output_dir="~/mine")).folder == Path.home() / "mine"


def test_each_of_several_tasks_has_its_own_name(tmp_path):
    tasks = [{"task": ["agreement", "agreement-words"], "train_size": [64]}, {"name": "other", "task": ["agreement"]}]
    names = ["agreement-train_size=64", "agreement-words-train_size=64", "other-task=agreement"]
    assert list(read_study(file_of(tmp_path, tasks=tasks)).comparisons) == names


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
        (
            {"methods": {"plain": "finetune --help-all"}, "primary": None},
            "got --help-all: for help, use `attnreg recipe",
        ),
        ({"baseline": "other"}, "In .*mine.yaml: Expected `baseline` to be one of .*, got 'other'"),
        ({"primary": ["high"]}, "Expected `primary` to be a list of two different methods"),
        ({"primary": ["high", "high"]}, "Expected `primary` to be a list of two different methods"),
        ({"options": {"epoch": 2}}, "Unknown key 'epoch' in `options`. Did you mean epochs?"),
        ({"tasks": [{"task": "agreement", "seed": 1}]}, "Unknown key 'seed' in task 1"),
        ({"tasks": "agreement"}, "Expected `tasks` to be a list"),
        ({"tasks": [{"task": None}]}, "Expected `task` to be a name, got None"),
        ({"options": {"task": None}}, "Expected `task` to be a name, got None"),
        ({"tasks": [{"name": None}]}, "Expected `name` to be a name, got None"),
        ({"tasks": [{"name": ".."}]}, "Expected `name` to be a name, got '..'"),
        ({"tasks": [{"name": ["a"]}]}, r"Expected `name` to be a name, got \['a'\]"),
        ({"output_dir": ["a"]}, r"Expected `output_dir` to be a folder, got \['a'\]"),
        ({"score_on": [{"task": "hanss"}]}, "Expected a task among .*, got 'hanss'.* Did you mean hans?"),
        ({"score_on": [{"data_dir": 2026}]}, "Expected data to score 2026 on in 2026: there is nothing"),
        ({"tasks": [{}, {}]}, "Two comparisons are called 'agreement': give one of them another `name`"),
        ({"tasks": [{"published": {"other": {"dev": 1}}}]}, "Expected `published` to be one of .*, got 'other'"),
        (
            {"tasks": [{"published": {"finetune": {"dev": "71,2"}}}]},
            "`published` to be numbers by data, .*, got '71,2'",
        ),
        (
            {"tasks": [{"published": {"finetune": 71.2}}]},
            "Expected `published`, finetune to map names to values, got 71",
        ),
        ({"seeds": 0}, "Expected `seeds` to be at least 1, got 0"),
        ({"score_on": [{"split": "train"}]}, "Expected `split` to be one of validation, test, got 'train'"),
        ({"score_on": [{"max_length": 3}]}, "Expected `max_length` to be at least 4, got 3"),
        ({"score_on": [{"name": "a b"}, {"name": "a_b"}]}, "Expected names in `score_on` that make different files"),
        ({"score_on": [{}], "keep_models": False}, "`score_on` needs the models"),
        ({"report_on": "test"}, "Expected `report_on` to be a name in `score_on` of every task .none., got 'test'"),
        ({"tasks": [{"train_size": []}]}, "Expected values for `train_size` of task 1"),
        (
            {"options": {"lr_warmup": False}},
            "Expected lr_warmup in the study as a number or text, got False, as YAML reads",
        ),
        (
            {"tasks": [{"text_columns": ["a", "b"]}]},
            "Expected `text_columns` to be names with commas, as in `text_columns: a,b`",
        ),
        (
            {"tasks": [{"folds": 3, "validation_rows": 8}]},
            "--folds and --validation-rows both say which rows of train the methods are scored on",
        ),
        ({"score_on": [{"classes": {False: "bad"}}]}, "Expected `classes` to be words, no and yes in quotes, got"),
        (
            {"methods": {"a b": "finetune"}, "baseline": None, "primary": None},
            "with dashes between, as a name, got 'a b'",
        ),
        ({"tasks": [{"epochs": [1, True]}]}, "Expected epochs in the study as a number or text, got True"),
        ({"rungs": ["plain"]}, "methods with values in braces, which held-out rows choose from, got 'plain'"),
    ],
)
def test_what_is_wrong_is_said(cli, tmp_path, changes, says):
    result = cli("compare", "--study", file_of(tmp_path, **changes))
    assert_sentence(result, 2 if changes.get("methods") or says.startswith(("--folds", "Expected a task")) else 1, says)
    assert not (tmp_path / "runs").exists()


def test_methods_beside_a_file_are_added(cli, tmp_path):
    options = ["--study", file_of(tmp_path), "--dry-run"]
    shown = ran(cli("compare", "mine=sam --rho {0.1,0.2,0.4}", "r-drop", *options)).output
    assert "Added to the study: mine=sam --rho {0.1,0.2,0.4}, r-drop." in shown
    study = read_study(file_of(tmp_path), None, {"methods": ("mine=sam --rho 0.1",)})
    assert [method.name for method in study.comparisons["few"].methods] == [*STUDY["methods"], "mine"]
    assert_sentence(cli("compare", "plain=sam", *options), 2, "Expected every method once")


def test_baseline_and_study_belong_into_the_file(cli, tmp_path):
    says = "--baseline and --study exclude each other, because a study file has its own baseline"
    assert_sentence(cli("compare", "--study", file_of(tmp_path), "--baseline", "high"), 2, says)
    (tmp_path / "broken.yaml").write_text("methods: [")
    assert_sentence(cli("compare", "--study", "broken.yaml"), 1, "Cannot read the study broken.yaml")
    (tmp_path / "broken.yaml").write_text("seeds: 2\nmethods:\n  a: finetune\n  a: sam\n")
    says = "Cannot read the study broken.yaml: the key 'a' is there twice, again in line 4"
    assert_sentence(cli("compare", "--study", "broken.yaml"), 1, says)


def test_a_dry_run_prints_the_runs_and_makes_nothing(cli, tmp_path):
    output = ran(cli("compare", "--study", file_of(tmp_path), "--dry-run")).output
    assert "runs/mine/few: 9 runs, 0 finished" in output
    assert "high, final, seed 8: to run" in output
    assert "27 runs in all." in output
    assert not (tmp_path / "runs").exists()
    for comparison in read_study(tmp_path / "mine.yaml").comparisons.values():
        with comparison.begun():
            write(comparison.runs()[0], 0.5, seconds=60.0)
    output = ran(cli("compare", "--study", tmp_path / "mine.yaml", "--dry-run")).output
    assert "27 runs in all; at 60 s per run, 24 min of computing are left." in output


def test_the_report_over_tasks(tmp_path):
    study = read_study(file_of(tmp_path), tmp_path / "out")
    draw, scores = np.random.default_rng(0), {}
    for name, comparison in study.comparisons.items():
        for run in comparison.runs():
            score = round(0.6 + 0.1 * (run.method.name == "high") + draw.normal(0, 0.02), 2)
            scores.setdefault((name, run.method.name), []).append(score)
            write(run, score)
    report = reported_study(study)
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
    lines = read_csv(study.folder / "results.csv")
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
    runs = [run for comparison in study.comparisons.values() for run in written(comparison, 0.5).runs()]
    assert "No run has a score on test yet: repeat the command." in reported_study(study)
    for run in runs:
        if run.method.name != "random":
            score = 0.5 + 0.01 * run.seed * (1 + (run.method.name == "high"))
            (run.folder / "evaluations").mkdir()
            content = json.dumps({"request": asked, "metrics": {"accuracy": score}})
            (run.folder / "evaluations" / "test.json").write_text(content)
    report = reported_study(study)
    cells = [[row[name] for name in ("plain", "high", "random")] for row in table(report, "Scores on test")]
    assert cells == [["0.5750", "0.6500", "not run"]] * 2
    assert [row["difference"] for row in table(report, "Differences by task")] == ["+0.0750"] * 2
    assert "Not significant: none of 2 differences holds after one correction over all of them (" in report
    assert [row["mean difference"] for row in table(report, "Over tasks")] == ["+0.0750"]


def test_a_method_that_failed_is_left_out_over_tasks(tmp_path):
    study = read_study(file_of(tmp_path, tasks=[{"name": "a"}, {"name": "b"}], seeds=2), tmp_path / "out")
    for comparison in study.comparisons.values():
        for run in comparison.runs():
            if run.method.name != "random":
                write(run, 0.5 + 0.1 * (run.method.name == "high") + 0.01 * run.seed)
    report = reported_study(study)
    assert [row["method"] for row in table(report, "Over tasks")] == ["high"]
    assert table(report, "Scores")[0]["random"] == "not run"
    assert "Differences by task" not in report  # the primary contrast needs it


def test_commands_of_a_study_are_all_that_is_printed(cli, tmp_path):
    printed = ran(cli("compare", "--study", file_of(tmp_path), "--launcher", "commands")).stdout
    assert len(printed.splitlines()) == 27
    assert all(line.startswith("cd ") for line in printed.splitlines())


def test_all_data_is_read_before_the_first_run(cli, tmp_path):
    write_rows(tmp_path / "good" / "train.jsonl", load_data(get_task("agreement"))[1]["train"].to_list()[:200])
    tasks = [{"data_dir": "good", "name": "a"}, {"data_dir": "good", "name": "b", "train_size": 181}]
    path = file_of(tmp_path, tasks=tasks, options={"folds": 10})
    assert_sentence(
        cli("compare", "--study", path),
        1,
        "Expected --train-size of at most 180, because 20 of 200 rows are held out to score on, got 181",
    )
    search = {"methods": {"plain": "finetune", "high": "ad-drop --p {0.1,0.3}"}, "primary": None}
    path = file_of(tmp_path, tasks=tasks[:1], options={"folds": 2}, **search)
    assert_sentence(cli("compare", "--study", path), 1, "Holding out 500 rows needs at least 501 training")
    path = file_of(tmp_path, tasks=tasks, options={})
    says = "No validation file in good, .*, or score on rows of train with --validation-rows .in a comparison: --folds"
    assert_sentence(cli("compare", "--study", path), 1, says)
    assert not (tmp_path / "runs").exists()


MANY = ("ad-drop-glue", "ladder")  # of hundreds of runs, each of whose options is read


@pytest.mark.parametrize("name", sample(study_files(), lambda name: name not in MANY))
def test_each_built_in_study_can_be_planned(name, tmp_path):
    assert name == "ladder" or read_study(study_files()[name]).published  # the others are of the papers
    options = {"data_dir": str(tmp_path)} if name == "ladder" else {}
    for task in ("sst2_sentences", "cr", "subj", "trec"):
        (tmp_path / task).mkdir()
    for comparison in read_study(study_files()[name], tmp_path / "out", options).comparisons.values():
        comparison.check_methods()
        assert comparison.runs()


CONTENT = {
    "methods": {"plain": "finetune", "high": "ad-drop --p {0.1,0.3,0.5} --layers 0,1"},
    "tasks": [
        {"task": "cola", "name": "cola-a", "model": "a", "epochs": 9, "published": {"plain": {"dev": 50}}},
        {"task": "cola", "name": "cola-b", "model": "b", "epochs": 9},
        {"task": "ptb-pos", "model": "b"},
    ],
    "options": {"batch-size": 8},
    "score_on": [{"task": "hans"}],
    "report_on": "hans",
    "seeds": 5,
}


def test_options_are_changed_and_the_file_left_alone():
    whole, notes = change(CONTENT, {"epochs": 3})
    assert [entry.get("epochs", whole["options"]["epochs"]) for entry in whole["tasks"]] == [3, 3, 3]
    assert notes == ["Changed from the study file: --epochs 3."]
    assert CONTENT["tasks"][0]["epochs"] == 9
    assert change(CONTENT, {}) == (CONTENT, [])


def test_a_task_is_chosen_or_replaces_all():
    for task, names in (("cola", ["cola-a", "cola-b"]), ("cola-b", ["cola-b"]), ("agreement", [None])):
        whole, _ = change(CONTENT, {"task": task})
        assert [entry.get("name") for entry in whole["tasks"]] == names


def test_each_task_has_its_folder_and_one_model(tmp_path):
    (tmp_path / "ptb_pos").mkdir()
    whole, notes = change(CONTENT, {"data_dir": str(tmp_path), "model": "m"})
    assert whole["tasks"] == [{"task": "ptb-pos", "model": "m", "data_dir": str(tmp_path / "ptb_pos")}]
    assert [note.partition(", because")[0] for note in notes[1:3]] == ["Left out", "Left out"]
    assert notes[1].endswith("cola.")
    assert notes[3] == "The report is on dev, since there is no hans for all tasks."
    (tmp_path / "cola").mkdir()
    whole, _ = change(CONTENT, {"data_dir": str(tmp_path), "model": "m"})
    assert [entry.get("name") for entry in whole["tasks"]] == ["cola-a", None]
    own = {"score_on": [], "report_on": None, "tasks": [{"task": "custom", "name": name} for name in ("cola", "subj")]}
    whole, notes = change({**CONTENT, **own}, {"data_dir": str(tmp_path)})
    assert whole["tasks"] == [{"task": "custom", "name": "cola", "data_dir": str(tmp_path / "cola")}]
    assert any(note.endswith("subj.") for note in notes)
    with pytest.raises(InputError, match=r"no folder for any task of the study \(cola, ptb-pos\)"):
        change(CONTENT, {"data_dir": str(tmp_path / "other")})


def test_published_figures_stand_beside_the_measured_ones(tmp_path):
    figures = {"finetune": {"dev": 61.25, "test": 60}, "high": {"dev": 63.5}}  # `plain` by its text
    tasks = [{"published": figures}, {"name": "b", "published": {"plain": {"dev": 50}}, "measured": "loss"}]
    path = file_of(tmp_path, seeds=2, first_seed=0, published="A paper, Table 1.", tasks=tasks)
    study = read_study(path, tmp_path / "out", {"epochs": 2})
    for comparison in study.comparisons.values():
        for run in comparison.final_runs(comparison.baseline):
            write(run, 0.6 + 0.02 * run.seed)
    report = reported_study(study)
    rows = [tuple(row.values()) for row in table(report, "Published figures")]
    assert rows == [
        ("agreement", "plain", "dev", "61.2", "61.0", "2"),
        ("agreement", "plain", "test", "60.0", "not scored", "0"),
        ("agreement", "high", "dev", "63.5", "not run", "0"),
        ("b", "plain", "dev", "50.0", "39.0", "2"),
    ]
    assert "A paper, Table 1." in report
    assert "Changed from the study file: --epochs 2." in report


def test_a_dry_run_counts_the_runs_that_follow_a_search(cli, tmp_path):
    methods = {"low": "finetune", "high": "ad-drop --p {0.1,0.3}"}
    path = file_of(tmp_path, tasks=[{}], methods=methods, baseline="low", primary=None)
    output = ran(cli("compare", "--study", path, "--dry-run")).output
    assert "high, final: 3 runs, once its search has finished" in output
    assert f"{3 + 2 + 3} runs in all." in output
    path = file_of(tmp_path, tasks=[{}], methods={"low": "finetune"}, baseline="low", primary=None, seeds=1)
    output = ran(cli("compare", "--study", path, "--dry-run")).output
    assert "runs/mine/agreement: 1 run, 0 finished" in output
    assert "1 run in all." in output


def test_others_are_compared_with_the_best_rung(tmp_path):
    values = "--learning-rate {1e-4,2e-4}"
    methods = {"low": f"finetune {values}", "high": f"few-sample {values}", "new": "sam"}
    changes = {"methods": methods, "baseline": "low", "primary": None, "rungs": ["low", "high"]}
    study = read_study(file_of(tmp_path, tasks=[{}], **changes), tmp_path / "out")
    (comparison,) = study.comparisons.values()
    low, high, new = comparison.methods
    held_out = {"low": 0.6, "high": 0.7}  # though it scores lower on dev
    for method in (low, high):
        assert comparison.best_of(study.rungs) is None
        for number, run in enumerate(comparison.search_runs(method)):
            write(run, held_out[method.name] - 0.1 * number)
    scores = {"low": [0.8, 0.9, 0.85], "high": [0.5, 0.52, 0.57], "new": [0.6, 0.67, 0.68]}
    for method in (low, high, new):
        for run, score in zip(comparison.final_runs(comparison.chosen(method)), scores[method.name], strict=True):
            write(run, score)
    (row,) = table(reported_study(study), "Against the best rung")
    gaps = np.subtract(scores["new"], scores["high"])
    half = stats.t.ppf(0.975, 2) * gaps.std(ddof=1) / 3**0.5
    interval = f"[{gaps.mean() - half:+.4f}, {gaps.mean() + half:+.4f}]"
    assert [*row.values()][:6] == ["agreement", "new", "high", "1.00", f"{gaps.mean():+.4f}", interval]
    assert float(row["p"]) == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue, abs=1e-4)


def test_data_to_score_on_that_is_not_there_is_told_before_any_run(cli, tmp_path):
    content = {"methods": ["finetune"], "tasks": [{"epochs": 1}], "score_on": [{"name": "far", "data_dir": "nowhere"}]}
    (tmp_path / "s.yaml").write_text(json.dumps(content))
    result = cli("compare", "--study", "s.yaml", "--output-dir", "out")
    assert_sentence(result, 1, "Expected data to score far on in nowhere: there is nothing")
    assert not (tmp_path / "out").exists()
