"""Runs whose data, recipe, provider or version has changed since: they are refused, and never lost."""

import json
import re
import shutil
from pathlib import Path

import pytest

from attnreg import __version__
from attnreg.errors import InputError
from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.method import Method
from attnreg.experiments.options import files as content
from attnreg.experiments.tasks import get_task, load_data
from attnreg.experiments.tasks.loading.files import find_files
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.comparisons import written
from tests.helpers.task_data import write_rows

pytestmark = pytest.mark.usefixtures("undrawn")

METHODS = ["finetune", "mine.py", "regularize --provider p.py:Mine(0.1)"]


def changes():
    """What is done to the files of a comparison, by what is said of it, and the first method that is refused."""
    return {
        "the data": (lambda: edit("data/validation.jsonl", '"label": 1', '"label": 0'), METHODS[0]),
        "the recipe's file": (lambda: edit("mine.py", "q=0.2", "q=0.3"), METHODS[1]),
        "the provider's file": (lambda: edit("p.py", "0.1", "0.2"), METHODS[2]),
        "attnreg's version": (lambda: None, METHODS[0]),
    }


def edit(name, old, new):
    text = Path(name).read_text()
    assert old in text
    Path(name).write_text(text.replace(old, new, 1))


@pytest.fixture
def files(cli, tmp_path):
    """A data folder, a recipe file and a provider file in the current folder."""
    for split, size in (("train", 60), ("validation", 100)):
        write_rows(tmp_path / "data" / f"{split}.jsonl", load_data(get_task("agreement"))[1][split].to_list()[:size])
    ran(cli("copy", "ad-drop", "mine.py"))
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(f"{text}\n# q=0.2\n")
    (tmp_path / "p.py").write_text("import attnreg\n\nclass Mine(attnreg.DropHead):\n    share = 0.1\n")
    return tmp_path


def comparison(folder, **options):
    methods = [Method(text) for text in METHODS]
    options = {"data_dir": "data", "epochs": 2, **options}
    return Comparison(methods, methods[0], options, folder / "study", seeds=2, equal_time=False)


def made(folder, **options):
    """A comparison with runs that are written down here."""
    whole = comparison(folder, **options)
    with whole.begun():
        for run in written(whole).runs():
            config = {"attnreg": __version__, "content": run.settings.content(), **run.settings.to_dict()}
            (run.folder / "config.json").write_text(json.dumps(config))
            run.log.write_text("old")
    return whole


@pytest.mark.parametrize("what", changes())
def test_what_has_changed_is_refused_and_kept(files, cli, monkeypatch, what):
    whole = made(files)
    change, method = changes()[what]
    command = ["compare", *METHODS, "--data-dir", "data", "--epochs", 2, "--seeds", 2, "--no-equal-time"]
    command += ["--output-dir", "study"]
    assert "Report saved" in ran(cli(*command)).output  # nothing is made anew
    change()
    if what == "attnreg's version":
        monkeypatch.setattr(content, "__version__", "99")
    folder = next(f"study/{each.slug}" for each in whole.methods if each.text == method)
    says = f"Since the run in {folder}/seed0 was started, {what} changed: remove this folder, or choose another"
    assert_sentence(cli(*command), 1, re.escape(says))
    assert all(run.finished for run in whole.runs())


def test_an_older_run_that_does_not_tell_is_kept(files):
    whole = comparison(files)
    with whole.begun():
        written(whole)
    edit("data/validation.jsonl", '"label": 1', '"label": 0')
    whole.check_folder()


def test_a_run_is_not_resumed_on_other_data_or_with_another_recipe(files, cli):
    args = ["recipe", "mine.py", "--data-dir", "data", "--epochs", 2, "--device", "cpu", "--output-dir", "out"]
    ran(cli(*args))
    ran(cli(*args, "--resume"))
    edit("mine.py", "q=0.2", "q=0.3")
    edit("data/train.jsonl", '"label": 1', '"label": 0')
    says = "Since the run in out was started, the recipe's file and the data changed: remove this folder, or"
    assert_sentence(cli(*args, "--resume"), 1, says)


def test_files_behind_a_link_are_part_of_the_data(files, cli, tmp_path):
    shutil.move("data", "elsewhere")
    Path("data").mkdir()
    for split in ("train", "validation"):
        (Path("elsewhere") / split).mkdir()
        shutil.move(f"elsewhere/{split}.jsonl", f"elsewhere/{split}/part.jsonl")
        (Path("data") / split).symlink_to(tmp_path / "elsewhere" / split)
    (Path("elsewhere") / "train" / "again").symlink_to(tmp_path / "data")  # which would never end
    args = ["recipe", "mine.py", "--data-dir", "data", "--epochs", 2, "--device", "cpu", "--output-dir", "out"]
    ran(cli(*args))
    ran(cli(*args, "--resume"))
    edit("elsewhere/train/part.jsonl", '"label": 1', '"label": 0')
    assert_sentence(cli(*args, "--resume"), 1, "Since the run in out was started, the data changed")


def test_results_within_the_data_are_no_data(files, cli, monkeypatch):
    monkeypatch.chdir(files / "data")
    run = ["recipe", "../mine.py", "--epochs", 2, "--device", "cpu", "--train-size", 16, "--data-dir", "."]
    ran(cli(*run, "--output-dir", "out"))
    ran(cli(*run, "--output-dir", "runs/other"))
    before = content.checksum(".")
    with comparison(Path()).begun():  # locks its folder
        Path("study/seed0").mkdir()
        Path("study/seed0/report.md").write_text("x")
    assert content.checksum(".") == before
    ran(cli(*run, "--output-dir", "out", "--resume"))
    edit("train.jsonl", '"label": 1', '"label": 0')
    assert_sentence(cli(*run, "--output-dir", "out", "--resume"), 1, "the data changed")


def test_a_model_that_has_changed_is_refused(files):
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    run = made(files, model="model").runs()[0]
    run.check()
    edit("model/config.json", "{}", "{ }")
    with pytest.raises(InputError, match=r"Since the run in .* was started, the model changed"):
        run.check()


def test_predictions_beside_data_are_no_data(files):
    (files / "data" / "train.jsonl").rename(files / "data" / "train-00000-of-00001.jsonl")
    before, splits = content.checksum("data"), find_files(files / "data", {"train", "validation"})
    for name in ("train-00000-of-00001", "validation"):
        (files / "data" / f"{name}.predicted.csv").write_text("prediction\n1\n")
    (files / "data" / "README.md").write_text("What this is.")
    assert content.checksum("data") == before
    assert find_files(files / "data", {"train", "validation"}) == splits
    (files / "data" / "validation.predicted_labels.jsonl").write_text('{"text": "not ours"}\n')
    assert content.checksum("data") != before
