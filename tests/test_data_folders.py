"""Folders of data as they lie: saved by datasets, in parts, in subfolders, under other names; and what is refused."""

import gzip
import json

import datasets
import pytest

from attnreg.errors import InputError
from attnreg.experiments.tasks import choose_task, get_task, load_splits
from tests.commands import assert_sentence, ran

QUICK = ["--epochs", 1, "--device", "cpu"]


def rows(count=8, **values):
    return [{"sentence": f"the boy {number} sleeps", "label": number % 2, **values} for number in range(count)]


def table(*args, **values):
    return datasets.Dataset.from_list(rows(*args, **values))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".parquet"):
        datasets.Dataset.from_list(content).to_parquet(path)
    elif path.name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(content, indent=1))
    elif path.name.endswith(".json.gz"):
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
    else:
        datasets.Dataset.from_list(content).to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)


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
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_as_they_lie(tmp_path, layout):
    for name in LAYOUTS[layout]:
        write(tmp_path / name, rows(3 if "train" in name else 2))
    splits = load_splits(get_task("cola"), tmp_path)
    assert {name: len(split) for name, split in splits.items()} == {"train": 6, "validation": 2}
    assert splits["train"]["label"][:] == [0, 1, 0, 0, 1, 0]


def test_glues_own_names_of_the_splits_of_mnli(tmp_path):
    row = {"premise": "a", "hypothesis": "b", "label": "neutral"}
    for number, name in enumerate(("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"), 1):
        write(tmp_path / name, [row] * number)
    assert sizes(tmp_path, "mnli") == {"train": 1, "validation": 2, "validation_mismatched": 3}


def test_a_folder_saved_by_datasets(cli, tmp_path):
    splits = {"train": table(), "dev": table(4), "test": table(2, label=-1)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    before = sorted((tmp_path / "saved").rglob("*"))
    assert sizes(tmp_path / "saved") == {"train": 8, "validation": 4}
    ran(cli("recipe", "finetune", "--data-dir", "saved", *QUICK, "--output-dir", "out"))
    assert sorted((tmp_path / "saved").rglob("*")) == before
    ran(cli("evaluate", "out", "--device", "cpu"))


def test_train_alone_when_rows_of_it_are_held_out(cli, tmp_path):
    write(tmp_path / "file" / "reviews.csv", rows())
    write(tmp_path / "folder" / "train.jsonl", rows())
    table().save_to_disk(tmp_path / "saved")
    for place in ("file/reviews.csv", "folder", "saved"):
        recipe = "scheduled-bernoulli" if place == "saved" else "finetune"
        args = ["recipe", recipe, "--data-dir", place, *QUICK, "--output-dir", f"out-{place[:5]}"]
        assert_sentence(cli(*args), 1, "or hold out rows of train with --validation-rows")
        ran(cli(*args, "--validation-rows", 2))
    assert "attention.png" in ran(cli("plot", "out-saved")).output
    assert_sentence(cli("evaluate", "out-file/"), 1, "out-file was trained on rows of file/reviews.csv: use --data-dir")
    write(tmp_path / "new.json", rows(3))
    for split in ("validation", "test"):
        result = ran(cli("evaluate", "out-file/", "--data-dir", "new.json", "--split", split, "--device", "cpu"))
        assert f"{split}, 3 rows" in result.output


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["train.csv", "train.jsonl", "dev.csv"], "has 2 files for split train, train.csv, train.jsonl: keep one file"),
        (["train.csv", "train-1.csv", "dev.csv"], "has 2 files for split train, train-1.csv, train.csv: keep one file"),
        (["train-1.csv", "train-2.json", "dev.csv"], "has 2 files for split train, .*: keep one file, or parts in one format"),
        (["train.csv", "dev.csv", "val.csv"], "has several splits for validation, val and dev: keep only one of them"),
        (["train-00000-of-00003.csv", "train-00002-of-00003.csv"], "has only 2 of 3 parts, .*: part 00001-of-00003 is missing"),
        (["a/train.csv", "b/train.csv"], "has data in several folders, a, b: use --data-dir to give one of them"),
        (["reviews.csv", "deep/x.txt"], r"No train file in .*, which has deep/, reviews.csv: add train\.\* \(.*\.csv, .*\)\."),
        (["train.csv"], r"No validation file in .*, which has train.csv: add validation\.\* \(.*, also as valid\.\*, val\.\*, dev\.\*\), or hold out"),
        ([f"{number}.txt" for number in range(12)], "which has 0.txt, .* and 2 more: add train"),
    ],
)  # fmt: skip
def test_what_is_refused_says_what_is_there(tmp_path, files, says):
    for name in files:
        write(tmp_path / name, rows(2))
    with pytest.raises(InputError, match=says):
        sizes(tmp_path)


def test_files_that_do_not_fit_are_named(cli, tmp_path):
    write(tmp_path / "notes.txt", rows())
    assert_sentence(cli("recipe", "finetune", "--data-dir", "notes.txt"), 1, "Expected --data-dir to be a folder or a .*.parquet file, got notes.txt")  # fmt: skip
    datasets.DatasetDict(train=table()).save_to_disk(tmp_path / "saved")
    assert_sentence(cli("recipe", "finetune", "--data-dir", "saved"), 1, "No validation split in saved, which has train: save it too, or hold out rows")  # fmt: skip
    (tmp_path / "saved" / "train" / "state.json").unlink()
    assert_sentence(cli("recipe", "finetune", "--data-dir", "saved"), 1, "Cannot read saved as a saved data set: No such file")  # fmt: skip
    write(tmp_path / "data" / "train-1.jsonl", rows())
    write(tmp_path / "data" / "train-2.jsonl", [{"sentence": "a", "label": "acceptable"}])
    write(tmp_path / "data" / "dev.json", rows())
    assert_sentence(cli("recipe", "finetune", "--data-dir", "data"), 1, "Cannot read train-1.jsonl, train-2.jsonl as one table, their columns or types differ: ")  # fmt: skip
    (tmp_path / "data" / "train-2.jsonl").write_text("{")
    assert_sentence(cli("recipe", "finetune", "--data-dir", "data"), 1, "Line 1 of data/train-2.jsonl must be one JSON object")  # fmt: skip
    (tmp_path / "data" / "train-2.jsonl").unlink()
    (tmp_path / "data" / "dev.json").write_text('[{"sentence": "a"},')
    assert_sentence(cli("recipe", "finetune", "--data-dir", "data"), 1, "Cannot read data/dev.json as .json, which must be one array of objects: ")  # fmt: skip


def test_columns_given_one_by_one(cli, tmp_path):
    for split in ("train", "dev"):
        write(tmp_path / "data" / f"{split}.json", [{"a": "the boy", "b": "sleeps", "y": n % 2} for n in range(4)])
    args = ["--task", "custom", "--data-dir", "data", "--label-column", "y", "--model"]
    from tests.task_data import tiny_bert

    tiny_bert(tmp_path / "bert")
    args += ["bert", "--max-length", 16, *QUICK]
    for output, columns in (
        ("one", ["--text-columns", "a,b"]),
        ("two", ["--text-columns", "a", "--text-columns", "b"]),
    ):
        ran(cli("recipe", "finetune", *args, *columns, "--output-dir", output))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert configs[0]["text_columns"] == configs[1]["text_columns"] == "a,b"
    assert_sentence(cli("recipe", "finetune", *args, "--text-columns", "a", "--text-columns", "a"), 2, "Expected --text-columns to be different column names")  # fmt: skip


def test_a_whole_file_of_ones_own(tmp_path):
    write(tmp_path / "train.json.gz", rows())
    custom = choose_task("custom", text_columns="sentence")
    with pytest.raises(InputError, match=r"train.json.gz has no splits: use --data-dir to give a folder"):
        load_splits(custom, tmp_path / "train.json.gz")
