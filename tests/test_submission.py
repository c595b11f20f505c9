"""Predictions on GLUE's test splits, which have no labels, in the files that its server takes."""

import csv
import json

import datasets
import pandas as pd
import pytest
import torch
import transformers as hf

from attnreg.experiments.tasks import get_task, load_model
from tests import task_data as made
from tests.commands import assert_sentence, ran

QUICK = ["--epochs", 1, "--max-length", 32, "--device", "cpu", "--model", "bert", "--output-dir", "out"]


@pytest.fixture
def home(tmp_path):
    torch.manual_seed(0)
    made.tiny_bert(tmp_path / "bert")
    return tmp_path


def two_sentences(rng):
    row = made.pair(rng, labels=("entailment", "not_entailment"))
    return {"sentence1": row["premise"], "sentence2": row["hypothesis"], "label": row["label"]}


def acceptable(rng):
    return {"sentence": " ".join(made.words(rng)), "label": rng.randrange(2)}


FILES = [("cola", acceptable, "CoLA.tsv"), ("rte", two_sentences, "RTE.tsv"), ("stsb", made.similarity, "STS-B.tsv")]


@pytest.mark.parametrize(("task", "maker", "file"), FILES)
def test_the_file_holds_the_models_predictions(cli, home, task, maker, file):
    test = made.make(maker, 9, 2)
    texts = [[row[column] for column in get_task(task).columns] for row in test]
    unlabelled = [{**row, "label": -1, "idx": number} for number, row in enumerate(test)]
    made.write(home / "data", train=32, validation=8, maker=maker, test=unlabelled[::-1])
    ran(cli("recipe", "finetune", "--task", task, "--data-dir", "data", *QUICK))
    result = ran(cli("evaluate", "out", "--submission", "glue/mine", "--device", "cpu"))
    assert result.output.endswith(f"Predictions of 9 rows saved to glue/mine/{file}\n")
    assert [path.name for path in (home / "glue" / "mine").iterdir()] == [file]
    head, *lines = (home / "glue" / "mine" / file).read_text().splitlines()
    assert head == "index\tprediction"
    model, tokenizer = load_model(get_task(task), str(home / "out" / "model"))
    with torch.no_grad():
        logits = [model.eval()(**tokenizer(*words, return_tensors="pt")).logits[0] for words in texts]
    if task == "stsb":
        assert [float(line.split("\t")[1]) for line in lines] == pytest.approx([min(max(float(score), 0), 5) for score in logits], abs=1e-3)  # fmt: skip
        return
    written = ["entailment", "not_entailment"] if task == "rte" else ["0", "1"]
    assert lines == [f"{number}\t{written[int(score.argmax())]}" for number, score in enumerate(logits)]
    assert not (home / "out" / "evaluations").exists()


def test_the_two_files_of_mnli(cli, home):
    made.write_rows(home / "one.jsonl", made.make(acceptable, 16, 0))
    tests = {f"test_{name}": [{**row, "label": None} for row in made.make(made.pair, count, 2)] for name, count in (("matched", 3), ("mismatched", 4))}  # fmt: skip
    made.write(home / "data", train=32, validation=8, **tests)
    ran(cli("recipe", "finetune", "--task", "mnli", "--data-dir", "data", *QUICK))
    ran(cli("evaluate", "out", "--submission", "glue", "--device", "cpu"))
    for name, count in (("MNLI-m.tsv", 3), ("MNLI-mm.tsv", 4)):
        _, *lines = (home / "glue" / name).read_text().splitlines()
        assert [int(line.split("\t")[0]) for line in lines] == list(range(count))
        assert {line.split("\t")[1] for line in lines} <= {"entailment", "neutral", "contradiction"}
    for args, code, says in [
        (["--data-dir", "data/test_matched.jsonl"], 1, "mnli has 2 test splits, test_matched, test_mismatched: give a folder with both"),
        (["--split", "validation"], 2, "--submission is for the test split: remove --split validation"),
        (["--task", "hans"], 2, "--submission is for the tasks of GLUE, cola, .*: remove it for hans"),
    ]:  # fmt: skip
        assert_sentence(cli("evaluate", "out", "--submission", "other", *args), code, says)
    held = ["--task", "cola", "--data-dir", "one.jsonl", "--validation-rows", 4]
    ran(cli("recipe", "finetune", *held, *QUICK[:-1], "whole"))
    says = "whole was trained on rows of one.jsonl: use --data-dir to give other rows"
    assert_sentence(cli("evaluate", "whole", "--submission", "other"), 1, says)
    (home / "data" / "test_mismatched.jsonl").unlink()
    says = "No test_mismatched file in data, which has test_matched.jsonl, train.jsonl, validation.jsonl: add test_mis"
    result = cli("evaluate", "out", "--submission", "other")
    assert_sentence(result, 1, says)
    assert "/data have changed since out was made." in result.output
    assert not (home / "other").exists()


def test_new_rows_without_labels_are_predicted(cli, home):
    made.write_rows(home / "one.csv", [{"text": row["sentence"], "label": ["bad", "good"][row["label"]]} for row in made.make(acceptable, 24, 0)])  # fmt: skip
    texts = ["red, green", "the a", "went"]
    made.write_rows(home / "new.csv", [{"text": text, "number": number} for number, text in enumerate(texts)])
    custom = ["--task", "custom", "--data-dir", "one.csv", "--text-columns", "text", "--validation-rows", 8]
    ran(cli("recipe", "finetune", *custom, *QUICK))
    new = ["evaluate", "out", "--data-dir", "new.csv", "--device", "cpu"]
    for suffix in ("csv", "jsonl"):
        ran(cli(*new, "--predict", f"found.{suffix}"))
    found = pd.read_csv(home / "found.csv")
    assert found.equals(pd.read_json(home / "found.jsonl", lines=True))
    assert [*found.columns] == ["text", "number", "prediction"]
    assert [*found["text"]] == texts
    predict = hf.pipeline("text-classification", str(home / "out" / "model"))  # as docs/tasks.md says
    assert [*found["prediction"]] == [each["label"] for each in predict(texts)]
    made.write_rows(home / "numbers.csv", [{"text": text, "label": 1} for text in texts])
    numbers = ["evaluate", "out", "--data-dir", "numbers.csv", "--device", "cpu"]
    says = "Expected labels bad, good .give the class of another one by --class LABEL=CLASS.*, got '1' in row 1"
    assert_sentence(cli(*numbers), 1, says)
    ran(cli(*numbers, "--class", "1=good"))
    assert_sentence(cli(*new), 1, "Missing columns .*: label.* To predict rows without labels, add --predict FILE.csv.")
    assert_sentence(cli(*new, "--predict", "found.txt"), 1, "Expected --predict to be a .csv or .jsonl file, got found")
    assert_sentence(cli(*new, "--predict", "no/found.csv"), 1, r"There is no folder no for found\.csv: make it\.")
    for used in ("new.csv", "out/predictions.jsonl"):
        before = (home / used).read_text()
        assert_sentence(
            cli(*new, "--predict", used), 1, rf"{used} would become part of the (run|data): choose another place\."
        )
        assert (home / used).read_text() == before
    for given in (["--class", "bad=good"], ["--name", "a"], ["--metric", "f1"], ["--submission", "glue"]):
        says = f"--predict writes predictions and scores nothing: remove {given[0]}"
        assert_sentence(cli(*new, "--predict", "found.csv", *given), 2, says)
    (home / "folder").mkdir()
    (home / "new.csv").rename(home / "folder" / "dev.csv")
    ran(cli("evaluate", "out", "--data-dir", "folder", "--split", "validation", "--predict", "found.csv"))
    # Other columns stay as they are.
    # The first is pandas' index.
    text = (
        ",text,id,price,flag,sign\n0,the a,12345678901234567890,1.50,TRUE,+15\n1,went,12345678901234567891,1e5,,0x10\n"
    )
    (home / "new.csv").write_text(text)
    ran(cli(*new, "--predict", "found.csv"))
    assert [line.rpartition(",")[0] for line in (home / "found.csv").read_text().splitlines()] == text.splitlines()
    rows = [{"text": "the a", "id": None, "score": 0.12345678901234566, "tags": ["ä", "b"]}]
    rows.append({"text": "went", "id": 12345678901234568, "score": 1.0, "tags": []})
    made.write_rows(home / "new.jsonl", rows)
    new[3] = "new.jsonl"
    ran(cli(*new, "--predict", "found.jsonl"))
    written = [json.loads(line) for line in (home / "found.jsonl").read_text().splitlines()]
    assert [row.pop("prediction") in ("bad", "good") for row in written] == [True, True]
    assert written == rows
    ran(cli(*new, "--predict", "found.csv"))
    with (home / "found.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["id"], second["id"], json.loads(first["tags"])) == ("", "12345678901234568", ["ä", "b"])
    made.write_rows(home / "new.jsonl", [{"text": "the\ra", "id": 1}, {"text": "went\n", "id": 2}])
    ran(cli(*new, "--predict", "found.csv"))
    with (home / "found.csv").open(newline="") as file:
        assert [(row["text"], row["id"]) for row in csv.DictReader(file)] == [("the\ra", "1"), ("went\n", "2")]
    prices = {"text": texts, "price": [0.5, float("nan"), 2.0]}
    datasets.Dataset.from_dict(prices).to_parquet(home / "new.parquet")  # pandas would write null
    new[3] = "new.parquet"
    ran(cli(*new, "--predict", "found.jsonl"))
    lines = (home / "found.jsonl").read_text().splitlines()
    prices = [json.loads(line, parse_constant=pytest.fail)["price"] for line in lines]
    assert prices == [0.5, None, 2.0]
    (home / "out" / "result.json").unlink()
    assert_sentence(
        cli(*new, "--predict", "found.csv"), 1, "The run in out has not finished: continue it with --resume"
    )


def test_the_runs_own_data_may_hold_integers_beside_declared_names(cli, home):
    rows = made.make(acceptable, 24, 0)
    named = datasets.Dataset.from_list([{"text": row["sentence"], "label": row["label"]} for row in rows])
    named = named.cast_column("label", datasets.ClassLabel(names=["good", "bad"]))
    (home / "own").mkdir()
    named.to_parquet(home / "own" / "train.parquet")
    made.write_rows(
        home / "own" / "validation.jsonl", [{"text": row["sentence"], "label": row["label"]} for row in rows[:8]]
    )
    ran(cli("recipe", "finetune", "--task", "custom", "--data-dir", "own", "--text-columns", "text", *QUICK))
    scored = json.loads((home / "out" / "result.json").read_text())["dev"]["accuracy"]
    assert f"accuracy {scored:.4f}" in ran(cli("evaluate", "out", "--device", "cpu")).output
    assert_sentence(
        cli("evaluate", "out", "--data-dir", "own"), 1, "Expected labels good, bad .give the class of another"
    )
