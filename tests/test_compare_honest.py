"""What a report says of networks that learned nothing, and of numbers that it does not have."""

import json
import re

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.tasks import get_task
from attnreg.experiments.tasks.kinds import kind_class
from tests import task_data
from tests.commands import invoke, ran, read_lines
from tests.test_compare_study import LABELS, comparison_of, reported, table, write
from tests.test_plots import keeping

pytestmark = pytest.mark.usefixtures("undrawn")

TRIVIAL = {"predictor": "majority class", "dev": {"accuracy": 0.55}, "train": {"accuracy": 0.6}}


def collapse(run):
    """Let a finished run predict class 1 for every row."""
    rows = [{"label": label, "prediction": 1} for label in LABELS]
    (run.folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_writes_what_the_majority_class_scores(cli, tmp_path):
    args = ["--train-size", 65, "--batch-size", 32, "--device", "cpu", "--epochs", 1, "--output-dir", "out"]
    printed = ran(cli("recipe", "finetune", *args)).output
    trivial = json.loads((tmp_path / "out" / "result.json").read_text())["trivial"]
    labels = [row["label"] for row in read_lines("out/predictions.jsonl")]
    assert trivial["predictor"] == "majority class"
    assert trivial["dev"]["matthews_correlation"] == matthews_corrcoef(labels, [0] * len(labels)) == 0.0
    assert set(trivial["train"]) == set(trivial["dev"])
    assert "majority class" in printed
    assert "| majority class | 0.0000 | none | none | 65 | 0 |" in (tmp_path / "out" / "report.md").read_text()


def test_the_majority_is_that_of_the_training_rows(tmp_path):
    task = get_task("mrpc")
    kind = kind_class(task.kind)(task, None, 16)
    assert kind.trivial([1, 0, 1])[1] == 1
    assert kind.trivial([1, 0])[1] == 0  # the first, in a tie
    gold = [0, 0, 1]
    assert kind.score([{"label": label, "prediction": 1} for label in gold])["f1"] == f1_score(gold, [1] * 3)


def test_regression_has_the_mean(tmp_path):
    data = task_data.write(tmp_path / "data", train=24, validation=16, maker=task_data.similarity)
    folders = ["--data-dir", data, "--model", task_data.tiny_bert(tmp_path / "model"), "--output-dir", tmp_path / "out"]
    options = "--task stsb --max-length 32 --batch-size 8 --epochs 1 --device cpu"
    ran(invoke("recipe", "finetune", *options.split(), *folders))
    trivial = json.loads((tmp_path / "out" / "result.json").read_text())["trivial"]
    assert trivial["predictor"] == "mean of train"
    assert trivial["dev"]["pearson"] == trivial["train"]["pearson"] == 0.0  # a constant has no correlation
    task = get_task("stsb")
    assert kind_class(task.kind)(task, None, 16).trivial([1.0, 2.0, 6.0]) == ("mean of train", 3.0)


def test_the_majority_class_is_a_line_of_every_table_of_scores(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop --q {0.1,0.3}", equal_time=False)
    for run in comparison.search_runs(comparison.methods[1]):
        write(run, 0.7 + 0.01 * run.seed, trivial=TRIVIAL)
    with keeping() as figures:
        report = reported(comparison, trivial=TRIVIAL)
    scores, fit = table(report, "Scores")[-1], table(report, "Fit")[-1]
    assert scores == {"method": "majority class", "mean": "0.5500", "SD": "0.0000", "seeds, from 0": "0.550  0.550"}
    assert (fit["method"], fit["train"], fit["dev"], fit["gap"]) == ("majority class", "0.6000", "0.5500", "+0.0500")
    tried = report[report.index("| tried |") :].split("\n\n")[0].splitlines()
    assert tried[-1] == "| majority class | 0.5500 | 0.550 | no |"
    assert "Majority class predicts the most frequent class of the training rows for every row." in report
    (axes,) = figures["seeds"].axes
    line = next(line for line in axes.lines if line.get_linestyle() == ":")
    assert set(line.get_xdata()) == {0.55}
    assert [text.get_text() for text in axes.texts] == ["majority class"]


def test_a_comparison_with_older_runs_leaves_it_out(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", equal_time=False)
    write(comparison.runs()[-1], 0.7, trivial=TRIVIAL)
    report = reported(comparison)
    assert "ajority class" not in report
    assert "ollapsed" not in report  # the networks predict several classes


def test_networks_that_predict_one_class_are_named(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", "attention-dropout", seeds=3, equal_time=False)
    for run in comparison.runs():
        write(run, 0.5 + 0.1 * run.seed, trivial=TRIVIAL)
        if run.method.text == "ad-drop" and run.seed != 1:
            collapse(run)
    report = reported(comparison)
    marks = {row["method"]: row["collapsed"] for row in table(report, "Scores")}
    assert marks == {"finetune": "no", "ad-drop": "seeds 0, 2", "attention-dropout": "no", "majority class": "constant"}
    assert "Collapsed: ad-drop predicts the same class for all dev rows (seeds 0, 2)." in report


@pytest.mark.parametrize(
    ("seeds", "cell", "note"),
    [
        (1, "1 seed", "With 1 seed there is no interval over seeds and no test."),
        (2, "all equal", "All equal: the difference is the same for every seed, so there is no test."),
    ],
)
def test_a_difference_without_an_interval_says_why(tmp_path, seeds, cell, note):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", seeds=seeds, equal_time=False)
    report = reported(comparison, lambda run: 0.5 + 0.1 * run.seed + 0.1 * (run.method.text == "ad-drop"))
    (row,) = table(report, "Differences to finetune")
    empty = ("95 % over seeds", "p", "p (Holm)", "detectable", "seeds for 0.01")
    assert [row[name] for name in ("difference", *empty)] == ["+0.1000", *[cell] * 5]
    assert note in report
    assert (table(report, "Scores")[0]["SD"] == "1 seed") == (seeds == 1)


def test_no_cell_is_empty(tmp_path):
    comparison = comparison_of(tmp_path, "finetune --label-noise 0", "ad-drop --label-noise 0.1", equal_time=False)
    for run in comparison.runs():
        wrong = {"rows": 4, "memorized": 0.5, "recovered": 0.5}
        noisy = "ad-drop" in run.method.text
        dev = {"accuracy": 0.5, "loss": 1.0, "calibration_error": None}
        write(run, 0.5, dev=dev, peak_memory_bytes=0, trivial=TRIVIAL, mislabelled=wrong if noisy else None)
    report = reported(comparison)
    rows = [line for line in report.splitlines() if line.startswith("|")]
    assert len(rows) > 12
    assert not [line for line in rows if any(not cell.strip() for cell in line.strip("|").split("|"))]
    assert table(report, "Cost")[0]["memory ratio"] == "not measured"
    assert table(report, "Fit")[0]["memorized"] == "no noise"
    assert np.all([row["calibration error"] == "none" for row in table(report, "Fit")])


@pytest.mark.parametrize(
    ("mine", "others", "says"),
    [
        (
            [0.8, 0.82, 0.81],
            [0.7, 0.71, 0.72],
            r"ad-drop scores 0.1000 above finetune \(95 % interval .0.0\d+ to .*\)\.$",
        ),
        ([0.7, 0.76, 0.71], [0.71, 0.72, 0.73], r"^No difference to finetune found; 3 seeds detect one of 0\.\d+\.$"),
        ([0.7], [0.6], "^One seed is no evidence: repeat the command with --seeds 5 or more.$"),
        ([0.5, 0.55], [0.55, 0.54], "^No method learned the task: train for more epochs, or on more rows.$"),
        ([0.7, 0.7], [0.7, 0.7], "^No difference to finetune found.$"),
    ],
)
def test_a_report_opens_with_what_was_found(tmp_path, mine, others, says):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", seeds=len(mine), equal_time=False)
    with comparison.begun():
        for method, scores in zip(comparison.methods, (others, mine), strict=True):
            for run, score in zip(comparison.final_runs(method), scores, strict=True):
                write(run, score, trivial=TRIVIAL)
        printed, *_ = write_report(comparison)
    assert re.search(says, printed), printed
    assert reported(comparison).index(printed) < reported(comparison).index("```")
