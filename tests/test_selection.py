"""Which network a run returns, and that its report, its files and ``attnreg evaluate`` all speak of this one."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from attnreg.experiments.folder.history import Selection
from attnreg.experiments.tasks import get_task, load_data
from tests.helpers.commands import assert_sentence, ran, read_lines
from tests.helpers.task_data import write_rows

SMALL = ["--epochs", 4, "--train-size", 128, "--batch-size", 32, "--learning-rate", 5e-3, "--device", "cpu"]


def test_the_last_or_the_best_record_is_returned():
    records = [{"accuracy": score} for score in (0.6, 0.8, 0.8, math.nan)]
    assert Selection("accuracy").returned(records) is records[3]
    assert Selection("accuracy", returns_best=True).returned(records) is records[1]
    assert Selection("accuracy", patience=2).returned(records) is records[3]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        pytest.param([], None, id="last", marks=pytest.mark.slow),
        pytest.param(["--select", "best"], "stopping_matthews_correlation", id="best on held-out rows"),
        pytest.param(["--select", "best", "--stop-on", "dev"], "matthews_correlation", id="best on dev"),
        pytest.param(["--select", "last", "--patience", 1], None, id="last with patience"),
    ],
)
def test_report_files_and_evaluation_are_of_the_same_network(cli, tmp_path, options, key):
    output = ran(cli("recipe", "finetune", *SMALL, *options, "--output-dir", "out")).output
    records = read_lines(tmp_path / "out" / "metrics.jsonl")
    returned = records[-1] if key is None else max(records, key=lambda record: record[key])
    got = json.loads((tmp_path / "out" / "result.json").read_text())
    assert got["dev"]["loss"] == pytest.approx(returned["loss"])
    assert got["returned"] == {"select": "last" if key is None else "best", "epoch": returned["epoch"]}
    assert "is returned, scored and saved" in output
    assert ("--stop-on dev chooses the epoch" in output) == ("dev" in options)
    again = ran(cli("evaluate", "out"))
    assert f"Network: {'last' if key is None else 'best'} (epoch {returned['epoch']})." in again.output
    written = json.loads((tmp_path / "out" / "evaluations" / "agreement.json").read_text())
    assert written["metrics"]["loss"] == pytest.approx(returned["loss"], rel=1e-4)


def test_evaluations_never_replace_those_of_other_data(cli, tmp_path, monkeypatch):
    ran(cli("recipe", "finetune", *SMALL, "--epochs", 1, "--output-dir", "out"))
    rows = load_data(get_task("agreement"))[1]["validation"].to_list()
    sizes = {"a/short": 20, "b/short": 30, "long": 40}
    for folder, size in sizes.items():
        (tmp_path / folder).mkdir(parents=True)
        write_rows(tmp_path / folder / "validation.jsonl", rows[:size])
    for options in ([], [], *(["--data-dir", folder] for folder in ("a/short", *sizes))):
        ran(cli("evaluate", "out", *options))  # the same evaluation, made again, replaces itself
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out" / "evaluations").iterdir()}
    assert len(written) == 4
    assert {"agreement.json", "agreement-short.json", "agreement-long.json"} < written.keys()
    assert sorted(content["rows"] for content in written.values())[:3] == [20, 30, 40]
    ran(cli("evaluate", "out", "--data-dir", "long", "--name", "mine"))
    result = cli("evaluate", "out", "--data-dir", "a/short", "--name", "mine")
    says = "out/evaluations/mine.json is the evaluation of other data, or with other options: choose another name"
    assert_sentence(result, 1, says)
    result = cli("evaluate", "out", "--data-dir", "long", "--name", "mine", "--metric", "accuracy")
    assert_sentence(result, 1, says)
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "access", lambda path, mode: (Path(path).name, mode) != ("evaluations", os.W_OK)
        )  # root may do all
        says = "Cannot write to the folder out/evaluations: scores are saved there; copy the run elsewhere"
        assert_sentence(cli("evaluate", "out"), 1, says)
    result = cli("evaluate", "out", "--name", "../mine")
    assert_sentence(result, 1, "Expected --name to be a file name, got '../mine'")


def test_an_unfinished_run_is_not_evaluated(cli, tmp_path):
    ran(cli("recipe", "finetune", *SMALL, "--epochs", 1, "--output-dir", "out"))
    (tmp_path / "out" / "result.json").unlink()
    assert_sentence(cli("evaluate", "out/model"), 1, "out/model is the model of a run: give the run folder, out")
    left_out = [
        "No drop_rates.png: nothing was dropped.",
        "No attention.png: it needs the run's provider, model and tokens.",
    ]
    assert ran(cli("plot", "out")).stderr.splitlines() == left_out
    assert_sentence(cli("recipe", "finetune", "--model", "out"), 1, "got out, the folder of a run: give out/model")
    assert_sentence(cli("evaluate", "out"), 1, "The run in out has not finished: continue it with --resume")
    assert_sentence(cli("evaluate", "nowhere"), 1, "Run folder nowhere not found")
    assert_sentence(cli("evaluate", "."), 1, "Expected a run folder, got .: it has no config.json with a run's options")
    (tmp_path / "new.csv").write_text("sentence\nThe dog barks.\n")
    of_run = "The model in out/model was not saved by `attnreg fit`: give the folder of its run"
    assert_sentence(cli("predict", "out/model", "new.csv"), 1, of_run)
    shutil.rmtree(tmp_path / "out" / "model")
    for command in (["evaluate", "out"], ["predict", "out", "new.csv"]):  # it was stopped in training
        assert_sentence(cli(*command), 1, "The run in out has not finished: continue it with --resume")
    (tmp_path / "out" / "result.json").write_text("{}")
    assert_sentence(cli("evaluate", "out"), 1, "No model in out/model")
