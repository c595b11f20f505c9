"""Further data that a study also scores its networks on."""

import json
from types import SimpleNamespace

import pytest

from attnreg.experiments.compare import make as launch
from attnreg.experiments.compare.scoring import Scoring
from attnreg.experiments.compare.study import read_study
from attnreg.experiments.results import saved_model
from attnreg.experiments.tasks import get_task, load_data
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.comparisons import file_of, started_by, table, write
from tests.helpers.task_data import write_rows

pytestmark = pytest.mark.usefixtures("undrawn")


def test_a_task_may_have_further_data_of_its_own(tmp_path):
    study = read_study(file_of(tmp_path, tasks=[{}, {"name": "b", "score_on": [{"split": "test"}]}]))
    assert [comparison.keep_models for comparison in study.comparisons.values()] == [False, True]
    assert [[scoring.name for scoring in scorings] for scorings in study.score_on.values()] == [[], ["test"]]


def test_scores_of_rows_that_have_changed_are_made_again(tmp_path):
    rows, run = tmp_path / "other" / "validation.jsonl", SimpleNamespace(folder=tmp_path / "run")
    write_rows(rows, [{"sentence": "red", "label": 1}])
    scoring, place = Scoring("mine", data_dir=str(tmp_path / "other")), run.folder / "evaluations" / "mine.json"
    asked = {"data_dir": scoring.data_dir, "split": "validation", "max_length": None, "classes": {}}
    content = {"metrics": {"accuracy": 0.5}, "request": saved_model.request({"task": None}, **asked)}
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(content))
    assert scoring.of(run) == {"accuracy": 0.5}
    write_rows(rows, [{"sentence": "red", "label": 0}])
    assert scoring.of(run) is None
    content["request"].pop("content")  # scores of before do not tell
    place.write_text(json.dumps(content))
    assert scoring.of(run) == {"accuracy": 0.5}


ROWS = [{"sentence": f"a film of {number}", "label": ["unacceptable", "acceptable"][number % 2]} for number in range(8)]


@pytest.mark.parametrize(
    ("scoring", "options", "says"),
    [
        ({"split": "test"}, {}, "In score_on: test: No labelled test split in mine"),
        ({"data_dir": "test-only"}, {}, "In score_on: test-only: No validation file in test-only"),
        ({"data_dir": "new"}, {}, "In score_on: new: Expected labels 0 .unacceptable., .* got 'fine' in row 9"),
        ({"data_dir": "new", "classes": {"dull": "acceptable"}}, {}, "In score_on: new: No row has the label 'dull'"),
        ({"task": "stsb", "data_dir": "new"}, {}, "Expected a classification task in score_on: new, got 'stsb'"),
        ({}, {"data_dir": "mine/train.jsonl", "folds": 2}, "Expected `data_dir` with other rows in score_on: val"),
    ],
)  # fmt: skip
def test_data_that_networks_cannot_be_scored_on_are_told_before_any_run(cli, tmp_path, scoring, options, says):
    for split in ("mine/train", "mine/validation", "test-only/test"):
        write_rows(tmp_path / f"{split}.jsonl", ROWS)
    write_rows(tmp_path / "new" / "validation.jsonl", [*ROWS, {"sentence": "a film", "label": "fine"}] * 2)
    task = {"task": "agreement", "data_dir": "mine", **options}
    content = {"methods": ["finetune"], "tasks": [task], "seeds": 1, "score_on": [scoring]}
    (tmp_path / "s.yaml").write_text(json.dumps(content))
    assert_sentence(cli("compare", "--study", "s.yaml", "--output-dir", "out"), 1, says)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_study_end_to_end_with_further_data(cli, warm, undrawn, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "subprocess", started_by(warm))
    rows = load_data(get_task("agreement"))[1]["test"].to_list()[:40]
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
    assert_sentence(cli("evaluate", run, *classes, "--class", "bad=acceptable"), 2, "Expected one --class per label")
    again = ran(cli("compare", "--study", path, "--jobs", 2)).output
    assert ", seed 7:" not in again  # nothing is made or scored again
    length = changes["score_on"][1].pop("max-length")
    without = cli("compare", "--study", file_of(tmp_path, **changes), "--jobs", 2)
    assert_sentence(without, 1, "finetune, seed 7, on other: .* with other options: choose another name")
    other_way = {"good": "unacceptable", "bad": "acceptable"}
    changes["score_on"][1] |= {"name": "swapped", "max-length": length, "classes": other_way}
    ran(cli("compare", "--study", file_of(tmp_path, **changes), "--jobs", 2))
    swapped = json.loads((run / "evaluations" / "swapped.json").read_text())["metrics"]
    assert swapped["accuracy"] == pytest.approx(1 - evaluation["metrics"]["accuracy"])
    write_rows(
        tmp_path / "other" / "validation.jsonl", [{**row, "label": ["good", "bad"][row["label"]]} for row in rows]
    )
    ran(cli("compare", "--study", file_of(tmp_path, **changes), "--jobs", 2))
    back = json.loads((run / "evaluations" / "swapped.json").read_text())["metrics"]
    assert back["accuracy"] == pytest.approx(evaluation["metrics"]["accuracy"])


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
    assert_sentence(cli("compare", "--study", path), 130, "Stopped. Repeat the command to continue.$")
    assert {path.parent.name for path in tmp_path.rglob("report.md")} == {"agreement-train_size=64", "mine"}


def test_further_data_keeps_its_name_in_another_folder(tmp_path):
    """The folder of a task with a dash in its name has an underscore; scores are still reported by the task's name."""
    for name in ("mrpc", "paws_x"):
        (tmp_path / name).mkdir()
    path = file_of(tmp_path, tasks=[{"task": "mrpc"}], score_on=[{"task": "paws-x"}], report_on="paws-x")
    study = read_study(path, None, {"data_dir": str(tmp_path)})
    ((scoring,),) = study.score_on.values()
    assert (scoring.name, scoring.data_dir, study.report_on) == ("paws-x", str(tmp_path / "paws_x"), "paws-x")
