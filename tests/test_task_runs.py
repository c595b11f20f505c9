"""Runs on tasks of every kind through the command line: trained, compared, gone on with, scored on other sets."""

import json
import re
import signal

import pytest
import torch

from attnreg.experiments.tasks import agreement, get_task, load_model
from tests.helpers import task_data as made
from tests.helpers.cases import sample
from tests.helpers.commands import assert_sentence, ran, read_csv, read_lines
from tests.helpers.runs import assert_goes_on

SCORES = {  # the metrics, and the least score by the first of them
    "mnli": (["accuracy"], 0.5),
    "stsb": (["pearson", "spearman"], 0.6),
    "conll2003": (["entity_f1", "accuracy"], 0.3),
    "swag": (["accuracy"], 0.6),
    "wmt16-en-ro": (["bleu"], 0.0),
}
QUICK = ["--batch-size", 8, "--learning-rate", 3e-3, "--max-length", 32, "--device", "cpu"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Tiny models, and data for each kind of task."""
    folder = tmp_path_factory.mktemp("tasks")
    torch.manual_seed(0)
    made.tiny_bert(folder / "bert")
    made.tiny_marian(folder / "marian")
    for task, (maker, _) in made.KINDS.items():
        further = {"validation_mismatched": made.make(maker, 12, 2)} if task == "mnli" else {}
        made.write(folder / task, maker=maker, **further)
    return folder


def recipe(home, name, task, *options, epochs=2):
    model = home / made.KINDS[task][1]
    return ["recipe", name, "--task", task, "--data-dir", home / task, "--model", model, "--epochs", epochs, *QUICK, *options]  # fmt: skip


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.slow if task in ("swag", "mnli", "stsb") else []) for task in SCORES]
)
def test_every_kind_is_learned(cli, home, undrawn, tmp_path, task):
    metrics, least = SCORES[task]
    ran(cli(*recipe(home, "finetune", task, "--output-dir", "out", epochs=6)))
    records = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    got = json.loads((tmp_path / "out" / "result.json").read_text())
    assert got["metric"] == metrics[0]
    assert got["dev"].keys() >= {"loss", "calibration_error", *metrics}
    assert got["dev"][metrics[0]] >= least
    assert all(got["dev"][name] == pytest.approx(records[-1][name]) for name in metrics)
    assert got["train"].keys() == {"loss", *metrics}
    assert (got["dev"]["calibration_error"] is not None) == (task in ("mnli", "swag"))
    if task == "mnli":
        assert {"mismatched_loss", "mismatched_accuracy"} <= got["dev"].keys() & records[0].keys()
    predictions = read_lines(tmp_path / "out" / "predictions.jsonl")
    assert len(predictions) == 32
    assert predictions[0].keys() >= {"label", "prediction"}
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    again = ran(cli("evaluate", "out"))
    last = records[-1][metrics[0]]
    assert f"{metrics[0]} {last:.4f}" in again.output
    written = json.loads((tmp_path / "out" / "evaluations" / f"{task}.json").read_text())
    assert written["metrics"][metrics[0]] == pytest.approx(last)
    assert written["rows"] == 32
    ran(cli("plot", "out"))


RIGHT_ANSWERS = ["--rewards", "Rewards(score='accuracy')"]


@pytest.mark.parametrize("task", sample(made.KINDS, lambda task: task in ("mnli", "wmt16-en-ro")))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("ad-drop", ["--q", 0.5, "--layers", "all"], marks=pytest.mark.slow),
        pytest.param("ad-drop", ["--method", "integrated_gradients", "--steps", 2, "--target", "label", "--every", 1, "--offset", 0], marks=pytest.mark.slow),
        ("attendout", ["--round-steps", 2, "--no-baseline"]),
    ],
)  # fmt: skip
def test_every_regularizer_trains_on_every_kind(cli, home, tmp_path, task, name, options):
    options = [*options, *RIGHT_ANSWERS] if (name, task) == ("attendout", "conll2003") else options
    ran(cli(*recipe(home, name, task, *options, "--train-size", 48, "--output-dir", "out")))
    got = json.loads((tmp_path / "out" / "result.json").read_text())
    assert max(got["drop_rates"].values()) > 0
    if name == "attendout":
        assert any("winner" in line for line in read_lines(tmp_path / "out" / "telemetry.jsonl"))


def test_a_game_on_numbers_has_no_right_answers(cli, home, tmp_path):
    result = cli(*recipe(home, "attendout", "stsb", *RIGHT_ANSWERS, "--output-dir", "no"))
    assert_sentence(result, 2, "Expected score 'loss' in --rewards for the regression task stsb, got 'accuracy'")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("task", ["conll2003", pytest.param("swag", marks=pytest.mark.slow)])
def test_a_run_goes_on_to_the_same_end(cli, home, tmp_path, monkeypatch, task):
    args = recipe(home, "ad-drop", task, "--keep-checkpoints", "--output-dir")
    ran(cli(*args, "whole"))
    assert_goes_on(cli, monkeypatch, [*args, "out"], 17, tmp_path / "whole", signal.SIGTERM)


CUSTOM = {
    "classification": (
        [{"note": f"{color} a", "colour": color} for color in ("red", "green", "blue")],
        ["--text-columns", "note", "--label-column", "colour", "--metric", "macro_f1"],
        {"macro_f1", "accuracy"},
    ),
    "regression": (
        [{"a": "one", "b": "two", "y": number} for number in range(3)],
        ["--text-columns", "a,b", "--label-column", "y", "--metric", "spearman"],
        {"pearson", "spearman"},
    ),
    "tokens": (
        [{"words": ["a", "red"], "labels": ["DET", "ADJ"]}, {"words": ["saw"], "labels": ["VERB"]}],
        ["--text-columns", "words", "--label-column", "labels"],
        {"accuracy"},
    ),
    "multiple-choice": (
        [{"q": "red", "choices": ["one", "two", "three"], "key": letter} for letter in "ABC"],
        ["--text-columns", "q", "--choice-columns", "choices", "--label-column", "key"],
        {"accuracy"},
    ),
    "seq2seq": ([{"text": "red one", "reply": "rot eins"}], ["--text-columns", "text", "--label-column", "reply"], {"bleu"}),
}  # fmt: skip


def test_predictions_of_the_embedded_task_are_of_its_test_rows(cli, tmp_path):
    ran(cli("recipe", "finetune", "--epochs", 1, "--train-size", 64, "--output-dir", "out"))
    rows = agreement.rows("test")
    assert f"Predictions of {len(rows)} rows" in ran(cli("predict", "out")).output
    assert [row["sentence"] for row in read_csv(tmp_path / "out.predicted.csv")] == [row["sentence"] for row in rows]


@pytest.mark.parametrize("kind", CUSTOM)
def test_a_set_of_ones_own(cli, home, tmp_path, kind):
    rows, options, metrics = CUSTOM[kind]
    made.write_splits(tmp_path / "mine", train=rows * 6, validation=rows * 6)
    model = home / ("marian" if kind == "seq2seq" else "bert")
    args = ["--task", "custom", "--kind", kind, *options, "--data-dir", "mine", "--model", model, "--epochs", 1, *QUICK]
    ran(cli("recipe", "finetune", *args, "--output-dir", "out"))
    got = json.loads((tmp_path / "out" / "result.json").read_text())
    assert metrics <= got["dev"].keys()
    ran(cli("evaluate", "out", "--data-dir", "mine"))
    assert (tmp_path / "out" / "evaluations" / "custom.json").is_file()
    if kind == "classification":
        made.write_rows(tmp_path / "new.jsonl", [{"note": "", "id": 7}, {"note": "red a", "id": 8}])
        assert "Warning: row 1 of inputs has no text: remove it." in ran(cli("predict", "out", "new.jsonl")).stderr
        made.write_rows(tmp_path / "other.jsonl", [{"text": "red"}])
        says = "Missing columns in split test of other.jsonl: note. Task 'custom' needs note; the data has 'text'."
        assert_sentence(cli("predict", "out", "other.jsonl"), 1, says)
    if kind == "regression":
        assert f"Predictions of {6 * len(rows)} rows" in ran(cli("predict", "out", "mine/validation.jsonl")).output
        assert all(float(row["prediction"]) for row in read_csv(tmp_path / "mine" / "validation.predicted.csv"))
    if kind == "multiple-choice":
        says = "`attnreg predict` is for .*, and custom is a multiple-choice task with all choices in one column"
        assert_sentence(cli("predict", "out", "mine/validation.jsonl", "--output", "new.csv"), 1, says)


def test_a_model_of_mnli_on_hans(cli, home, tmp_path):
    assert cli(*recipe(home, "finetune", "mnli", "--output-dir", "out")).exit_code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    rows = [{**row, "label": int(row["label"] > 0)} for row in made.make(made.pair, 32, 1)]  # as mnli's validation
    made.write_splits(tmp_path / "hans", validation=rows)
    result = ran(cli("evaluate", "out", "--task", "hans", "--data-dir", "hans"))
    written = json.loads((tmp_path / "out" / "evaluations" / "hans.json").read_text())
    assert re.search(rf"hans, validation, 32 rows: accuracy {written['metrics']['accuracy']:.4f}", result.output)
    others = dict.fromkeys(["neutral", "contradiction"], "non-entailment")
    assert written["classes"] == {"entailment": "entailment", **others}
    assert {path: path.read_bytes() for path in before} == before
    model, tokenizer = load_model(get_task("mnli"), str(tmp_path / "out" / "model"))
    model.eval()
    right = 0
    for row in rows:
        given = tokenizer(row["premise"], row["hypothesis"], return_tensors="pt")
        right += int(int(model(**given).logits.argmax()) > 0) == row["label"]
    assert written["metrics"] == {"accuracy": right / 32}
    for args, code, says in [
        (["--task", "conll2003", "--data-dir", "hans"], 1, "Expected a classification task for the model of out"),
        (["--task", "sst2", "--data-dir", home / "mnli"], 1, "Missing columns in split validation of .*: sentence. Task 'sst2' needs sentence, label;"),
        (["--task", "hans"], 1, "Cannot load .* for task 'hans' from the hub or the local cache: use --data-dir"),
        (["--task", "hans", "--data-dir", "hans", "--split", "test"], 1, "No labelled test split in hans"),
        (["--task", "hans", "--kind", "tokens"], 2, "--kind, .* are only for --task custom: remove them for --task hans"),
        (["--task", "nothing"], 2, "Expected a task among"),
    ]:  # fmt: skip
        assert_sentence(cli("evaluate", "out", *args), code, says)
    assert [path.name for path in (tmp_path / "out" / "evaluations").iterdir()] == ["hans.json"]
    made.write_rows(tmp_path / "hans" / "validation.jsonl", [{"sentence": "a", "label": 1}])
    says = "The model's class 'entailment' does not exist in task 'sst2': .* the task accepts negative, positive"
    assert_sentence(cli("evaluate", "out", "--task", "sst2", "--data-dir", "hans"), 1, says)


def test_a_test_split_that_is_what_is_scored_on(cli, home, tmp_path):
    rows = [{"text": text, "label": label} for text, label in (("red one", 0), ("green one", 1))] * 8
    made.write_splits(tmp_path / "imdb", train=rows, test=rows[:6])
    args = ["--task", "imdb", "--data-dir", "imdb", "--model", home / "bert", "--epochs", 1, *QUICK]
    assert cli("recipe", "finetune", *args, "--output-dir", "out").exit_code == 0
    scores = []
    for options in ([], ["--split", "test"]):
        ran(cli("evaluate", "out", *options))
        name = "imdb-test" if options else "imdb"
        scores.append(json.loads((tmp_path / "out" / "evaluations" / f"{name}.json").read_text()))
    assert [score.pop("split") for score in scores] == ["validation", "test"]
    assert [score.pop("request")["split"] for score in scores] == ["validation", "test"]
    assert scores[0] == scores[1]
    made.write_rows(tmp_path / "imdb" / "validation.jsonl", rows[:4])
    for options, count in (([], 4), (["--split", "test"], 6)):
        assert f"{count} rows" in cli("evaluate", "out", "--data-dir", "imdb", *options).output
    (tmp_path / "imdb" / "test.jsonl").unlink()
    says = "No labelled test split in imdb"
    assert_sentence(cli("evaluate", "out", "--data-dir", "imdb", "--split", "test"), 1, says)
