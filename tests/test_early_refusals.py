"""Mistakes in a command are told at once: without torch, and before the output folder is looked at."""

import json
import re
import subprocess
import sys

import pytest
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from attnreg.experiments.runs.command import _PACKAGES, available_trackers
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.task_data import write_rows

SMALL = ["--epochs", 1, "--train-size", 32, "--device", "cpu"]
# Each command runs in a fork of a process that has imported the command line, and no more.
WITHOUT = """
import json, os, sys
from attnreg.experiments.cli.main import main

SLOW = {"torch", "transformers", "datasets", "matplotlib", "scipy"}
for number, args in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        os.dup2(os.open(f"../{number}.txt", os.O_WRONLY | os.O_CREAT), 2)
        code = 0
        try:
            main(args)
        except SystemExit as end:
            code = end.code
        print("exit code", code, "imported", sorted(SLOW & sys.modules.keys()), file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
"""
OWN = ["recipe", "finetune", "--task", "custom", "--text-columns", "text", "--data-dir", "two", "--model", "mine"]
MISTAKES = {
    "a recipe": (["recipe", "finetun"], "Did you mean finetune?"),
    "a method": (["compare", "finetune", "ad-dropp"], "Did you mean ad-drop?"),
    "a method in one word": (["compare", "finetune ad-drop"], "remove the quotes"),
    "an option": (["recipe", "finetune", "--epochs", "three"], "is not a whole number"),
    "an option without a text": (["recipe", "finetune", "--model", ""], "--model': got an empty text"),
    "an option without columns": (["compare", "finetune", "--text-columns", ""], "--text-columns': got an empty text"),
    "an option of a method": (["compare", "finetune", "ad-drop --q 2"], "not in the range"),
    "a task": (["compare", "finetune", "--task", "colas"], "Did you mean cola?"),
    "a provider's name": (["recipe", "regularize", "--provider", "DropHed(0.1)"], "Did you mean DropHead?"),
    "a provider's file": (["recipe", "regularize", "--provider", "no.py:Mine(0.1)"], "Provider file no.py not found"),
    "a data folder": (["recipe", "finetune", "--data-dir", "nowhere"], "no such folder or file"),
    "a data folder of all": (["compare", "finetune", "--data-dir", "nowhere"], "no such folder or file"),
    "a split": (["recipe", "finetune", "--data-dir", "one"], "No validation file in one"),
    "a column": (
        ["recipe", "finetune", "--task", "custom", "--text-columns", "txt", "--data-dir", "one", "--folds", "2", "--model", "mine"],
        "Missing columns in split train of one: txt. Task 'custom' needs txt, label; the data has 'text', 'label'. Did "
        "you mean text?",
    ),
    "files that were joined": (
        ["recipe", "finetune", "--task", "custom", "--text-columns", "text", "--data-dir", "joined.csv", "--folds", "2", "--model", "mine"],
        "Row 2 of joined.csv repeats the column names",
    ),
    "more rows than there are": ([*OWN, "--train-size", "4000"], "Expected --train-size of at most 60, got 4000."),
    "more rows than the built-in task has": (
        ["recipe", "finetune", "--train-size", "4000"], "Expected --train-size of at most 2000, got 4000."
    ),
    "rows that are also held out": (
        [*OWN, "--validation-rows", "20", "--train-size", "41"], "Expected --train-size of at most 40, because 20 of 60 rows are held out to score on, got 41."
    ),
    "more rows than there are, of all": (
        ["compare", "finetune", *OWN[2:], "--train-size", "4000"], "Expected --train-size of at most 60, got 4000."
    ),
    "more parts than rows": (
        [*OWN, "--folds", "61"], "Expected --folds of at most 60, the number of training rows, got 61."
    ),
    "rows to choose values on": (
        ["compare", "finetune", "ad-drop --q {0.1,0.2}", *OWN[2:], "--search-rows", "60"],
        "Holding out 60 rows needs at least 61 training rows, got 60: lower --search-rows, for example to 12.",
    ),
    "rows to score trials on": (["search", *OWN[2:]], "Holding out 500 rows needs at least 501 training rows, got 60"),
    "a tracker": (["recipe", "finetune", "--report-to", "tensorbord"], "Did you mean tensorboard?"),
    "a tracker of all": (["compare", "finetune", "--report-to", "mine"], "an installed tracker (tensorboard), got mine"),
    "a model": (["recipe", "finetune", "--model", "./nowhere"], "No model ./nowhere: there is no such folder"),
    "a model's name": (["compare", "finetune", "--model", "berrt"], "not in the local cache, and the hub does not answer"),
    "no model": (
        ["recipe", "finetune", "--task", "custom", "--text-columns", "text", "--data-dir", "one", "--folds", "2"],
        "give the folder of a model with --model",
    ),
    "an epoch too few": (["compare", "finetune", "ad-drop", "--epochs", "1"], "AD-DROP would never act"),
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What is told of each mistake, in a folder where nothing may be left."""
    folder = tmp_path_factory.mktemp("mistakes") / "here"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "train.csv").write_text("text,label\na,0\nb,1\n")
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text("{}")
    (folder / "joined.csv").write_text("text,label\na,0\ntext,label\nb,1\n")
    for split in ("train", "validation"):
        write_rows(folder / "two" / f"{split}.jsonl", [{"text": f"a {row}", "label": row % 2} for row in range(60)])
    commands = json.dumps([args for args, _ in MISTAKES.values()])
    subprocess.run([sys.executable, "-c", WITHOUT, commands], cwd=folder, check=True, capture_output=True)
    assert {path.name for path in folder.iterdir()} == {"one", "two", "mine", "joined.csv"}
    return {mistake: (folder.parent / f"{number}.txt").read_text() for number, mistake in enumerate(MISTAKES)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_without_slow_imports(told, mistake):
    assert MISTAKES[mistake][1] in told[mistake]
    assert re.search(r"^exit code [12] imported \[\]$", told[mistake], re.M), told[mistake]


def test_trackers_are_those_of_accelerate(tmp_path, monkeypatch):
    assert {*_PACKAGES} == {str(tracker) for tracker in LoggerType} - {"all"}
    assert available_trackers() == sorted(map(str, get_available_trackers()))
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "wandb" not in available_trackers()


def test_other_options_get_a_folder_of_their_own(cli, tmp_path):
    ran(cli("recipe", "finetune", *SMALL))
    again = cli("recipe", "finetune", *SMALL)
    assert_sentence(again, 1, "runs/finetune-agreement-seed0: choose another folder, or pass --resume")
    wrong = cli("recipe", "finetune", *SMALL, "--batch-size", 8, "--train-size", 4000)
    assert "Expected --train-size of at most 2000" in wrong.output
    other = ran(cli("recipe", "finetune", *SMALL, "--batch-size", 8))
    says = "finetune-agreement-seed0 holds a run with --batch-size 64 (not --batch-size 8): saving to runs/finetune-agr"
    assert says in other.output
    assert "Results saved to runs/finetune-agreement-seed0-2/." in other.output
    ran(cli("recipe", "finetune", *SMALL, "--batch-size", 16, "--output-dir", "runs/finetune-agreement-seed0"))
    sizes = {
        path.parent.name[-1]: json.loads(path.read_text())["batch_size"] for path in tmp_path.glob("runs/*/config.json")
    }
    assert sizes == {"0": 64, "2": 8, "3": 16}
    resumed = ran(cli("recipe", "finetune", *SMALL, "--batch-size", 8, "--resume")).output
    assert "saving to runs/finetune-agreement-seed0-2" in resumed
    assert "# finetune on agreement" in resumed  # its report
    nothing = cli("recipe", "finetune", *SMALL, "--batch-size", 4, "--resume")
    assert_sentence(nothing, 1, "was started with other options: repeat it with --batch-size 64")


def test_rows_without_text_have_the_numbers_of_the_file(cli, tmp_path):
    texts = [*("the boy sleeps" for _ in range(6)), "", *("the girls sleep" for _ in range(9))]
    for split in ("train", "validation"):
        rows = [
            {"sentence": f"{text} {number}" if text else "", "label": number % 2} for number, text in enumerate(texts)
        ]
        write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    words = ["--data-dir", "data", "--epochs", 1, "--device", "cpu", "--train-size", 12]
    output = ran(cli("recipe", "finetune", *words)).output
    assert "Warning: row 7 of train has no text: remove it." in output
    assert "Warning: row 7 of validation has no text: remove it." in output
