"""Data as people have it: the content of files, the files and folders as they lie; and what is refused."""

import bz2
import gzip
import json
import math

import datasets
import pyarrow
import pytest

from attnreg.errors import InputError
from attnreg.experiments.results.document import save_rows
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.tasks import choose_task, get_task, load_data
from attnreg.experiments.tasks.loading.reading import read_files
from tests.helpers import task_data as made
from tests.helpers.commands import assert_sentence, ran

QUICK = ["--epochs", 1, "--device", "cpu"]
GOOD = [{"text": "a b", "label": "neg"}, {"text": "c d", "label": "pos"}]


def load(folder, name, content, dev=None, **options):
    """Read a train file with this content, and a dev file that is as good as can be."""
    content = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(content)
    (folder / "dev.json").write_text(json.dumps(GOOD if dev is None else dev))
    task, splits = load_data(choose_task("custom", **{"text_columns": "text", **options}), folder)
    return task.labels, splits["train"]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def zst(rows):
    return pyarrow.Codec("zstd").compress(lines(rows).encode(), asbytes=True)


ZST = zst(GOOD[:1])
SAME = {
    "a mark at the start": ("train.csv", "\ufefftext,label\na b,neg\nc d,pos\n"),
    "a mark before JSON": ("train.jsonl", "\ufeff" + lines(GOOD)),
    "a mark before a field": ("train.json", "\ufeff" + json.dumps({"data": GOOD})),
    "ends of lines": ("train.tsv", "text\tlabel\r\na b\tneg\r\nc d\tpos\r\n"),
    "old ends of lines": ("train.csv", "text,label\ra b,neg\rc d,pos\r"),
    "quotes": ("train.csv", '"text","label"\n"a b",neg\n"c d","pos"\n\n'),
    "a column of numbers": ("train.csv", ",text,label\n0,a b,neg\n1,c d,pos\n"),
    "a field of rows": ("train.json", json.dumps({"version": "1.0", "tags": ["x"], "data": GOOD}, indent=1)),
    "lines in .json": ("train.json", lines(GOOD)),
    "one array in .jsonl": ("train.jsonl", json.dumps(GOOD)),
    "packed lines": ("train.jsonl.gz", gzip.compress(lines(GOOD).encode())),
    "a packed field": ("train.json.gz", gzip.compress(json.dumps({"rows": GOOD}).encode())),
    "packed in two frames": ("train.jsonl.zst", ZST + zst(GOOD[1:])),
    "packed in two parts": ("train.json.gz", gzip.compress(b"[") + gzip.compress(json.dumps(GOOD)[1:].encode())),
}


@pytest.mark.parametrize("form", SAME)
def test_the_same_rows(tmp_path, form):
    labels, rows = load(tmp_path, *SAME[form])
    assert labels == ("neg", "pos")
    assert [{name: row[name] for name in ("text", "label")} for row in rows] == GOOD


def test_quotes_hold_lines_in_csv_only(tmp_path):
    _, rows = load(tmp_path, "train.csv", 'text,label\n"a\nb, ""c""",neg\nc d,pos\n')
    assert rows["text"][:] == ['a\nb, "c"', "c d"]
    _, rows = load(tmp_path, "train.csv", 'text,label\n"a\rb",neg\nc\rd,pos\n')
    assert rows["text"][:] == ["a\rb", "c\rd"]
    _, rows = load(tmp_path, "train.csv", 'text,label\n"NA",neg\nnull,pos\n')
    assert rows["text"][:] == ["NA", "null"]
    (tmp_path / "train.csv").unlink()
    _, rows = load(tmp_path, "train.tsv", 'text\tlabel\n"a "b" c\tneg\nd", e\tpos\nNA\tneg\n')
    assert rows["text"][:] == ['"a "b" c', 'd", e', "NA"]


REFUSED = [
    ("train.csv", "text,label\ncafé,neg\n".encode("latin1"), r"Line 2 of .*train.csv is not UTF-8: convert the file, for example with `iconv`\.$"),
    ("train.jsonl", lines([{"text": "é", "label": "neg"}]).encode() + '{"text": "é", "label": "pos"}\n'.encode("latin1"), "Line 2 of .*train.jsonl is not UTF-8"),
    ("train.json", '[{"text": "é", "label": "neg"}]'.encode("latin1"), "Line 1 of .*train.json is not UTF-8"),
    ("train.csv", "text,label\na,neg\n".encode("utf-16"), "Line 1 of .*train.csv is not UTF-8"),
    ("train.csv.bz2", bz2.compress(b"text,label\n\xe9,neg\n"), "Line 2 of .*train.csv.bz2 is not UTF-8"),
    ("train.csv", "text;label\na b;neg\n", "The only column of .*train.csv is 'text;label': separate columns by commas, not by ';'"),
    ("train.csv", "text;label\na, b;neg\n", "Cannot read .*: Expected 1 fields .*: separate columns by commas, not by ';'"),
    ("train.csv", '"text"\t"label"\na b\tneg\n', "The only column of .*train.csv is .*: separate columns by commas, not by"),
    ("train.tsv", "text,label\na b,neg\n", "The only column of .*train.tsv is .*: separate columns by tabs, not by"),
    ("train.csv", "text,label\na, b,neg\nc,pos\n", "Cannot read .*train.csv: Expected 2 fields in line 2, saw 3: put texts with commas in double quotes"),
    ("train.csv", "text,label\na,neg\nb, c,pos\n", "Cannot read .*train.csv: Expected 2 fields in line 3, saw 3: put texts with commas in double quotes"),
    ("train.tsv", "text\tlabel\na\tneg\nb\tc\tpos\n", "Cannot read .*train.tsv: Expected 2 fields in line 3, saw 3: replace tabs in texts by spaces"),
    ("train.csv", "text,text,label\na,b,neg\nc,d,pos\n", "train.csv has two columns named 'text': rename one of them"),
    ("train.csv", "text,label,id,id\na,neg,0,1\nc,pos,2,3\n", "train.csv has two columns named 'id': rename one of them"),
    ("train.csv", ",text,label,\n0,a,neg,1\n1,c,pos,\n", "train.csv has two columns named '': rename one of them"),
    ("train.csv", "fine,pos\nb,neg\n", "the data has 'fine', 'pos'. The first line of a .csv or .tsv file must hold the column names"),
    ("train.csv", "text, label\na, neg\nb, pos\n", "Missing columns in split train .*: label. .*the data has 'text', ' label'. Did you mean  label"),
    ("train.csv", "text,label\na,neg\nb,\nc,pos\n", "Expected labels 0 .neg., 1 .pos. .remove rows without a label., got '' in row 2 of split train"),
    ("train.tsv", 'text\tlabel\n"a\nb"\tneg\nc\tpos\n', "Expected labels 0 .neg., 1 .pos. .remove rows without a label., got '' in row 1 of split train"),
    ("train.json", json.dumps({"text": ["a"], "label": ["neg"]}), r'train.json must be an array of objects, one per row, or have it as in \{"data": \[...\]\}\.$'),
    ("train.json", json.dumps({"1": GOOD[0], "2": GOOD[1]}), "train.json must be an array of objects, one per row"),
    ("train.json", json.dumps({"train": GOOD, "validation": GOOD}), "train.json must be an array of objects, one per row"),
    ("train.json", json.dumps({"version": "1.1", "data": [{"title": "a", "paragraphs": []}]}), "Missing columns in split train of .*: text, label"),
    ("train.json", "3", "train.json must be an array of objects, one per row"),
    ("train.json", "[1]", "train.json must be an array of objects, one per row"),
    ("train.csv", 'text,label\na,neg\n"b,pos\n', r"Cannot read .*train.csv: EOF inside string starting at row 2: put texts with commas in double quotes"),
    ("train.csv", "text,label\na,neg,\nc,pos,\n", "Cannot read .*train.csv: Expected 2 fields in line 2, saw 3"),
    ("train.jsonl", "3\n", "train.jsonl must be an array of objects, one per row"),
    ("train.jsonl", '{"text": "a"\n', "Line 1 of .*train.jsonl must be one JSON object, but cannot be read: "),
    ("train.jsonl.gz", lines(GOOD), r"Cannot read .*train.jsonl.gz as .jsonl.gz: zlib inflate failed"),
    ("train.jsonl.gz", gzip.compress(lines(GOOD * 500).encode(), 0)[:-60], r"Cannot read .*train.jsonl.gz as .jsonl.gz: Truncated compressed stream"),
    *(("train.jsonl.zst", each, r"Cannot read .*train.jsonl.zst as .jsonl.zst: ") for each in (b"junk", ZST[:-3], ZST + ZST[:-3])),
    ("train.csv", "\n\n", r"train.csv has no rows\.$"),
    ("train.jsonl", "", r"train.jsonl is empty"),
    ("train.jsonl", lines([{**GOOD[0], "text": None}, GOOD[1]]), "Expected text in column text, got None in row 1"),
    ("train.json", json.dumps([{**GOOD[0], "label": 1}, GOOD[1]]), r"\(a column needs one type\)"),
    ("train.jsonl", '{"text": "a", "label": "neg"}\n{"text": "b \\ud83d", "label": "pos"}\n', r"Row 2 of .*train.jsonl has half of a character, as where an emoji is cut: remove it\.$"),
    ("train.csv", 'text,label\na,neg\n"b,pos\nc,neg\n"d" e,pos\nf,neg\n', r"Cannot read .*train.csv: in the row from line 3 to 5, ',' expected after '\"': put a text with quotation marks between"),
    ("train.csv", "text,label\na,neg\nb,pos\ntext,label\nc,neg\n", r"Row 3 of .*train.csv repeats the column names, as if files were joined: remove it\.$"),
    ("train.parquet", "x", r"Cannot read .*train.parquet as .parquet: (?!.*needs one type)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "says"), REFUSED, ids=[says[:50] for _, _, says in REFUSED])
def test_what_cannot_be_read_is_named(tmp_path, capfd, name, content, says):
    with pytest.raises(InputError, match=says) as error:
        load(tmp_path, name, content)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_flipped_bit_in_a_packed_file(tmp_path):
    for name, packed in (("csv.gz", gzip.compress(b"text,label\n" + b"a b,neg\nc d,pos\n" * 99)), ("csv.bz2", bz2.compress(b"text,label\n" * 99))):  # fmt: skip
        for place in range(12, len(packed) - 1, 3):
            damaged = packed[:place] + bytes([packed[place] ^ 4]) + packed[place + 1 :]
            with pytest.raises(InputError):
                load(tmp_path, f"train.{name}", damaged)
        (tmp_path / f"train.{name}").unlink()


MANY = "0 1 " * 5_000  # pandas infers types from so many rows
CLASSES = [
    ("True False", False, ("False", "True")),
    ("true false", False, ("False", "True")),
    ("0 1", "1", ("0", "1")),
    ("0.0 1.0", "1", ("0", "1")),
    (MANY + "1", 1, ("0", "1")),
    (MANY + "yes", 1, ("0", "1", "yes")),
]


@pytest.mark.parametrize(("train", "dev", "classes"), CLASSES, ids=range(len(CLASSES)))
def test_labels_of_all_types_are_the_same_classes(tmp_path, train, dev, classes):
    words = train.split()
    rows = "".join(f"{number},a b,{word}\n" for number, word in enumerate(words[:-1]))
    content = f"id,text,label\n{rows}x1,c,{words[-1]}\n"  # the column of numbers ends with a word
    labels, table = load(tmp_path, "train.csv", content, [{"text": "a", "label": dev}])
    assert labels == classes
    assert len(table) == len(words)


def test_one_line_is_one_row(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = tmp_path / "train.jsonl"
    path.write_text(lines([row]))
    assert read_files([path])[:] == {"messages": [row["messages"]]}


def test_nested_columns(tmp_path):
    rows = [{"q": {"stem": {"en": "a"}}, "y": {"gold": "neg"}}, {"q": {"stem": {"en": "b"}}, "y": {"gold": "pos"}}]
    options = {"text_columns": "q.stem.en", "label_column": "y.gold"}
    assert load(tmp_path, "train.jsonl", lines(rows), rows, **options)[0] == ("neg", "pos")


def test_names_with_spaces_and_other_letters(cli, tmp_path):
    folder = tmp_path / "my data (1)" / "größe"
    folder.mkdir(parents=True)
    rows = [{"Mein Text": "a", "größe": "s"}, {"Mein Text": "b", "größe": "l"}]
    labels, _ = load(folder, "train.jsonl", lines(rows), rows, text_columns="Mein Text", label_column="größe")
    assert labels == ("l", "s")
    (folder / "train.jsonl").write_bytes(b"\xe9")
    args = ["--task", "custom", "--data-dir", "my data (1)", "--text-columns", "Mein Text", "--label-column", "größe"]
    args += ["--model", "mine"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert_sentence(cli("recipe", "finetune", *args), 1, "Line 1 of my data .1./größe/train.jsonl is not UTF-8")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_parquet_file_with_other_types(tmp_path):
    import pandas as pd

    table = pd.DataFrame({"sentence": ["a", "b", "c"], "label": [0, 1, 1], "idx": [0, 1, 2]})
    table.astype({"sentence": "category", "label": "int8"}).to_parquet(tmp_path / "train.parquet")
    datasets.Dataset.from_pandas(table).to_parquet(tmp_path / "dev.parquet")
    _, splits = load_data(get_task("cola"), tmp_path)
    assert splits["train"]["sentence"][:] == ["a", "b", "c"]
    assert splits["train"]["label"][:] == [0, 1, 1]


def rows(count=8, **values):
    return [{"sentence": f"the boy {number} sleeps", "label": number % 2, **values} for number in range(count)]


def table(*args, **values):
    return datasets.Dataset.from_list(rows(*args, **values))


def sizes(folder, task="cola"):
    return {name: len(split) for name, split in load_data(get_task(task), folder)[1].items()}


LAYOUTS = {
    "parts": ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "validation-00000-of-00001.parquet"],
    "parts of text": ["train-1.jsonl", "train-2.jsonl", "validation.jsonl"],
    "parts of tables": ["train-a.csv", "train-b.csv", "validation.csv"],
    "a subfolder": ["data/train-0-of-2.parquet", "data/train-1-of-2.parquet", "data/validation.parquet"],
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
    assert sizes(tmp_path) == {"train": 6, "validation": 2}
    labels = load_data(get_task("cola"), tmp_path)[1]["train"]["label"][:]
    assert list(map(int, labels)) == [0, 1, 0, 0, 1, 0]


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
        assert sizes(tmp_path / name) == {"train": 8, "validation": 4}
        train = load_data(get_task("cola"), tmp_path / name)[1]["train"]
        assert train[:2] == {"sentence": ["the boy 0 sleeps", "the boy 1 sleeps"], "label": [0, 1]}


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
    (tmp_path / "copy.csv").write_bytes((tmp_path / "file" / "reviews.csv").read_bytes())
    for options, file in ((), "file/reviews.csv"), (("--data-dir", "copy.csv"), "copy.csv"):
        refused = cli("evaluate", "out-file/", *options)
        assert_sentence(refused, 1, f"out-file was trained on rows of {file}: use --data-dir")
    assert_sentence(cli("predict", "out-file/"), 1, "or `attnreg predict RUN FILE` to predict some")
    ran(cli("predict", "out-file/", "copy.csv"))
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
        load_data(choose_task("custom", text_columns="sentence"), tmp_path / "train.json.gz")
    made.write_rows(tmp_path / "test" / "0.csv", rows(1))
    with pytest.raises(InputError, match=r"No validation file in .*, which has test/, .*\.$"):
        load_data(get_task("hans"), tmp_path)


def test_files_that_do_not_fit_are_named(cli, tmp_path):
    def refused(place, says):
        assert_sentence(cli("recipe", "finetune", "--data-dir", place), 1, says)

    made.write_rows(tmp_path / "notes.txt", rows())
    refused("notes.txt", "Expected --data-dir to be a folder or a .*.parquet file, got notes.txt")
    datasets.DatasetDict(train=table()).save_to_disk(tmp_path / "saved")
    refused(
        "saved", "No validation split in saved, which has train: use --data-dir to give a folder that has it, or score"
    )
    (tmp_path / "saved" / "train" / "state.json").unlink()
    refused("saved", "Cannot read saved as a saved data set: No such file")
    other = [{"sentence": "a", "label": "acceptable"}]
    made.write_splits(tmp_path / "data", **{"train-1": rows(), "train-2": other, "dev": rows()})
    refused("data", "Cannot read train-1.jsonl, train-2.jsonl as one table, their columns or types differ: ")
    (tmp_path / "data" / "train-2.jsonl").write_text("{")
    refused("data", "Line 1 of data/train-2.jsonl must be one JSON object")
    (tmp_path / "data" / "train-2.jsonl").unlink()
    (tmp_path / "data" / "dev.jsonl").rename(tmp_path / "data" / "dev.json").write_text('[{"sentence": "a"},')
    refused("data", "Line 1 of data/dev.json must be one JSON object, but cannot be read: ")


def test_columns_given_one_by_one():
    args = ["--task", "custom", "--data-dir", "data", "--text-columns", "a", "--text-columns", "b"]
    settings = load_command("finetune").settings(args)
    assert settings.text_columns == "a,b"


def test_numbers_that_json_lacks_are_null(tmp_path):
    save_rows([{"n": math.nan, "all": [math.inf, 0.1]}], tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == '{"n": null, "all": [null, 0.1]}\n'
