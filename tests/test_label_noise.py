"""Wrong labels: how they are drawn, which rows get them, and what a report says of them."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset

from attnreg.experiments.setup.sampling import mislabel
from attnreg.experiments.tasks import get_task, load_data, load_model
from tests.helpers.commands import ran, read_lines

NOISY = ["--train-size", 200, "--label-noise", 0.3, "--epochs", 1, "--batch-size", 50, "--device", "cpu"]


@pytest.mark.parametrize("classes", [2, 5])
def test_the_share_is_exact_and_wrong_labels_are_uniform_over_the_other_classes(classes):
    labels = [number % classes for number in range(4000)]
    rows = Dataset.from_dict({"labels": labels, "reference": labels})
    noisy, truth = mislabel(rows, 0.25, classes, seed=3)
    given = noisy["labels"][:]
    assert given == noisy["reference"][:]
    assert truth == {n: labels[n] for n in range(4000) if given[n] != labels[n]}
    assert len(truth) == 1000
    shifts = np.bincount([(given[n] - label) % classes for n, label in truth.items()], minlength=classes)
    assert np.abs(shifts[1:] - 1000 / (classes - 1)).max() < 5 * np.sqrt(1000 / (classes - 1))
    assert mislabel(rows, 0.25, classes, seed=3)[1] == truth
    assert mislabel(rows, 0.25, classes, seed=4)[1] != truth


def test_a_report_says_how_many_wrong_labels_were_memorized(cli, tmp_path):
    output = ran(cli("recipe", "finetune", *NOISY, "--output-dir", "out")).output
    got = json.loads((tmp_path / "out" / "result.json").read_text())["mislabelled"]
    assert got["rows"] == 60
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").eval()
    _, tokenizer = load_model(get_task("agreement"))
    rows = load_data(get_task("agreement"))[1]["train"].shuffle(seed=0).select(range(200))
    _, truth = mislabel(Dataset.from_dict({"labels": rows["label"][:], "reference": rows["label"][:]}), 0.3, 2, 0)
    wrong = rows.select(list(truth))
    with torch.no_grad():
        predicted = model(**tokenizer(wrong["sentence"][:], return_tensors="pt", padding=True)).logits.argmax(1)
    right = float((predicted == torch.tensor(wrong["label"][:])).double().mean())
    assert (got["recovered"], got["memorized"]) == (pytest.approx(right), pytest.approx(1 - right))
    assert f"60 training rows had a wrong label: the network gives {1 - right:.1%} of them this label" in output
    assert "(it memorized it)" in (tmp_path / "out" / "report.md").read_text()


def test_rows_held_out_for_the_whole_run_do_not_count_as_trained_on(cli, tmp_path):
    ran(cli("recipe", "finetune", *NOISY, "--patience", 1, "--stopping-rows", 100, "--output-dir", "out"))
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["mislabelled"]["rows"]
    assert 15 < rows < 45  # of the first half


@pytest.mark.slow
def test_rows_held_out_of_train_are_noisy_and_dev_rows_are_not(cli, tmp_path):
    def labels_of(*options):
        ran(cli("recipe", "finetune", *NOISY[:2], *NOISY[4:], *options, "--output-dir", "out"))
        found = np.array([line["label"] for line in read_lines(tmp_path / "out" / "predictions.jsonl")])
        shutil.rmtree(tmp_path / "out")
        return found

    held = ["--validation-rows", 100]
    assert (labels_of(*held) != labels_of(*held, "--label-noise", 0.3)).sum() == 30
    assert (labels_of() == labels_of("--label-noise", 0.3)).all()
