"""Folders of data as they lie: saved by datasets, in parts, in subfolders, under other names; and what is refused."""

import datasets
import pytest

from attnreg.errors import InputError
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.tasks import choose_task, get_task, load_splits
from tests import task_data as made
from tests.commands import assert_sentence, ran

QUICK = ["--epochs", 1, "--device", "cpu"]


def rows(count=8, **values):
    return [{"sentence": f"the boy {number} sleeps", "label": number % 2, **values} for number in range(count)]


def table(*args, **values):
    return datasets.Dataset.from_list(rows(*args, **values))


def sizes(folder, task="cola"):
    return {name: len(split) for name, split in load_splits(get_task(task), folder).items()}


LAYOUTS = {
    "parts": ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "validation-00000-of-00001.parquet"],
    "parts of text": ["train-1.jsonl", "train-2.jsonl", "validation.jsonl"],
    "parts of tables": ["train-a.csv", "train-b.csv", "validation.csv"],
    "a subfolder": [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/validation.parquet",
    ],
    "a configuration": ["cola/train-a.parquet", "cola/train-b.parquet", "cola/validation-a.parquet", "README.md"],
    "arrays": ["train-a.json", "train-b.json", "validation.json.gz"],
    "two formats": ["train-a.jsonl", "train-b.jsonl", "validation.tsv"],
    "dev": ["train-a.csv", "train-b.csv", "dev.csv"],
    "val": ["train-a.csv", "train-b.csv", "val.json"],
    "valid": ["train-a.csv", "train-b.csv", "valid-0.csv"],
    "numbers": ["train1.csv", "train_2.csv", "dev.0.csv"],
    "capitals": ["Train-a.CSV", "Train-b.csv", "Dev.JSONL"],
    "folders": ["train/0000.parquet", "train/0001.parquet", "validation/0000.parquet"],
    "folders of any names": ["train/x.csv", "train/y.csv", "dev/trial.csv", "dev/notes.txt"],
    "the hub's own conversion": ["default/train/0000.parquet", "default/train/0001.parquet", "default/val/0.parquet"],
    "packed tables": ["train-1.csv.gz", "train-2.csv.gz", "dev.tsv.bz2"],
    "packed objects": ["train-1.json.gz", "train-2.json.gz", "dev.jsonl.bz2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_as_they_lie(tmp_path, layout):
    for name in LAYOUTS[layout]:
        made.write_rows(tmp_path / name, rows(3 if "train" in name.lower() else 2))
    splits = load_splits(get_task("cola"), tmp_path)
    assert {name: len(split) for name, split in splits.items()} == {"train": 6, "validation": 2}
    assert splits["train"]["label"][:] == [0, 1, 0, 0, 1, 0]


def test_glues_own_names_of_the_splits_of_mnli(tmp_path):
    row = {"premise": "a", "hypothesis": "b", "label": "neutral"}
    for number, name in enumerate(("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"), 1):
        made.write_rows(tmp_path / name, [row] * number)
    assert sizes(tmp_path, "mnli") == {"train": 1, "validation": 2, "validation_mismatched": 3}


def test_a_folder_saved_by_datasets(cli, tmp_path):
    splits = {"train": table(), "dev": table(4), "test": table(2, label=-1)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    before = sorted((tmp_path / "saved").rglob("*"))
    assert sizes(tmp_path / "saved") == {"train": 8, "validation": 4}
    ran(cli("recipe", "finetune", "--data-dir", "saved", *QUICK, "--output-dir", "out"))
    assert sorted((tmp_path / "saved").rglob("*")) == before
    ran(cli("evaluate", "out", "--device", "cpu"))


def test_folders_saved_by_datasets_one_by_one_or_one_below(tmp_path):
    table().with_format("numpy").save_to_disk(tmp_path / "apart" / "train")
    table(4).save_to_disk(tmp_path / "apart" / "val")
    datasets.DatasetDict(train=table(), dev=table(4).with_format("torch")).save_to_disk(tmp_path / "below" / "mine")
    for name in ("apart", "below"):
        splits = load_splits(get_task("cola"), tmp_path / name)
        assert {name: len(split) for name, split in splits.items()} == {"train": 8, "validation": 4}
        assert splits["train"][:2] == {"sentence": ["the boy 0 sleeps", "the boy 1 sleeps"], "label": [0, 1]}


def test_paths_are_no_patterns(tmp_path):
    places = {"d?": 2, "dx": 3, "a::b [1]*": 2}
    for name, count in places.items():
        made.write_splits(tmp_path / name, "csv", train=rows(count), dev=rows(count))
    assert [sizes(tmp_path / name)["train"] for name in places] == [2, 3, 2]


def test_links(cli, tmp_path):
    for name in ("train", "dev"):
        made.write_rows(tmp_path / "real" / "split" / f"{name}.csv", rows())
    links = tmp_path / "links"
    links.mkdir()
    (links / "train.csv").symlink_to(tmp_path / "real" / "split" / "train.csv")
    (links / "dev").symlink_to(tmp_path / "real" / "split")  # a folder with two files
    assert sizes(links) == {"train": 8, "validation": 16}
    (links / "dev").unlink()
    (links / "dev.csv").symlink_to("../away.csv")
    says = r"Cannot read links/dev.csv as .csv: \[Errno 2\] No such file"
    assert_sentence(cli("recipe", "finetune", "--data-dir", "links"), 1, says)


@pytest.mark.slow
def test_train_alone_when_rows_of_it_are_held_out(cli, tmp_path):
    made.write_rows(tmp_path / "file" / "reviews.csv", rows())
    made.write_rows(tmp_path / "folder" / "train.jsonl", rows())
    table().save_to_disk(tmp_path / "saved")
    for place in ("file/reviews.csv", "folder", "saved"):
        recipe = "scheduled-bernoulli" if place == "saved" else "finetune"
        args = ["recipe", recipe, "--data-dir", place, *QUICK, "--output-dir", f"out-{place[:5]}"]
        assert_sentence(cli(*args), 1, "or score on rows of train with --validation-rows")
        ran(cli(*args, "--validation-rows", 2))
    assert "attention.png" in ran(cli("plot", "out-saved")).output
    assert_sentence(cli("evaluate", "out-file/"), 1, "out-file was trained on rows of file/reviews.csv: use --data-dir")
    made.write_rows(tmp_path / "new.json", rows(3))
    for split in ("validation", "test"):
        result = ran(cli("evaluate", "out-file/", "--data-dir", "new.json", "--split", split, "--device", "cpu"))
        assert f"{split}, 3 rows" in result.output


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["train.csv", "train.jsonl", "dev.csv"], "has split train several times, train.csv, train.jsonl: keep one, or parts of one format"),
        (["train.csv", "train-1.csv", "dev.csv"], "has split train several times, train-1.csv, train.csv: keep one, or parts"),
        (["train-1.csv", "train-2.json", "dev.csv"], "has split train several times, train-1.csv, train-2.json: keep one, or parts of one format"),
        (["train.csv", "dev.csv", "val.csv"], "has several splits for validation, val and dev: keep only one of them"),
        (["train-00000-of-00003.csv", "train-00002-of-00003.csv", "dev.csv"], "has only 2 of 3 parts, .*: part 00001-of-00003 is missing"),
        (["train/a-0-of-3.csv", "train/a-2-of-3.csv", "dev.csv"], "train has only 2 of 3 parts, .*: part 1-of-3 is missing"),
        (["train/a.csv", "train/b.jsonl", "dev.csv"], "train has split train several times, a.csv, b.jsonl: keep one, or parts of one format"),
        (["train/a.csv", "train.csv", "dev.csv"], "has split train several times, train/, train.csv: keep one, or parts of one format"),
        (["a/train.csv", "b/train.csv"], "has data in several folders, a, b: use --data-dir to give one of them"),
        (["reviews.csv", "deep/x.txt"], r"No train file in .*, which has deep/, reviews.csv: add train\.\* \(.*\.csv, .*\)\."),
        (["train.csv"], r"No validation file in .*, which has train.csv: add validation\.\* \(.*, also as valid\.\*, val\.\*, dev\.\*\), or score on"),
        ([f"{number}.txt" for number in range(12)], "which has 0.txt, .* and 2 more: add train"),
    ],
)  # fmt: skip
def test_what_is_refused_says_what_is_there(tmp_path, files, says):
    for name in files:
        made.write_rows(tmp_path / name, rows(2))
    with pytest.raises(InputError, match=says):
        sizes(tmp_path)


def test_other_ways_out_are_named(tmp_path):
    made.write_rows(tmp_path / "train.json.gz", rows())
    with pytest.raises(InputError, match=r"train.json.gz has no splits: use --data-dir to give a folder"):
        load_splits(choose_task("custom", text_columns="sentence"), tmp_path / "train.json.gz")
    made.write_rows(tmp_path / "test" / "0.csv", rows(1))
    with pytest.raises(InputError, match=r"No validation file in .*, which has test/, .*\.$"):
        load_splits(get_task("hans"), tmp_path)


def test_files_that_do_not_fit_are_named(cli, tmp_path):
    made.write_rows(tmp_path / "notes.txt", rows())
    assert_sentence(cli("recipe", "finetune", "--data-dir", "notes.txt"), 1, "Expected --data-dir to be a folder or a .*.parquet file, got notes.txt")  # fmt: skip
    datasets.DatasetDict(train=table()).save_to_disk(tmp_path / "saved")
    assert_sentence(cli("recipe", "finetune", "--data-dir", "saved"), 1, "No validation split in saved, which has train: use --data-dir to give a folder that has it, or score on rows")  # fmt: skip
    (tmp_path / "saved" / "train" / "state.json").unlink()
    assert_sentence(cli("recipe", "finetune", "--data-dir", "saved"), 1, "Cannot read saved as a saved data set: No such file")  # fmt: skip
    made.write_rows(tmp_path / "data" / "train-1.jsonl", rows())
    made.write_rows(tmp_path / "data" / "train-2.jsonl", [{"sentence": "a", "label": "acceptable"}])
    made.write_rows(tmp_path / "data" / "dev.json", rows())
    assert_sentence(cli("recipe", "finetune", "--data-dir", "data"), 1, "Cannot read train-1.jsonl, train-2.jsonl as one table, their columns or types differ: ")  # fmt: skip
    (tmp_path / "data" / "train-2.jsonl").write_text("{")
    assert_sentence(cli("recipe", "finetune", "--data-dir", "data"), 1, "Line 1 of data/train-2.jsonl must be one JSON object")  # fmt: skip
    (tmp_path / "data" / "train-2.jsonl").unlink()
    (tmp_path / "data" / "dev.json").write_text('[{"sentence": "a"},')
    assert_sentence(cli("recipe", "finetune", "--data-dir", "data"), 1, "Cannot read data/dev.json as .json, which must be one array of objects: ")  # fmt: skip


def test_columns_given_one_by_one():
    args = ["--task", "custom", "--data-dir", "data", "--text-columns", "a", "--text-columns", "b"]
    settings = load_command("finetune").settings(args)
    assert settings.text_columns == "a,b"
