"""The content of data files as people have it: encodings, separators, missing and odd values; and what is refused."""

import bz2
import gzip
import json

import datasets
import pyarrow
import pytest

from attnreg.errors import InputError
from attnreg.experiments.tasks import choose_task, get_task, load_data, load_splits
from tests.commands import assert_sentence

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


ZST = pyarrow.Codec("zstd").compress(lines(GOOD[:1]).encode(), asbytes=True)
SAME = {
    "a mark at the start": ("train.csv", "\ufefftext,label\na b,neg\nc d,pos\n"),
    "a mark before JSON": ("train.jsonl", "\ufeff" + lines(GOOD)),
    "a mark before a field": ("train.json", "\ufeff" + json.dumps({"data": GOOD})),
    "ends of lines": ("train.tsv", "text\tlabel\r\na b\tneg\r\nc d\tpos\r\n"),
    "old ends of lines": ("train.csv", "text,label\ra b,neg\rc d,pos\r"),
    "quotes": ("train.csv", '"text","label"\n"a b",neg\n"c d","pos"\n\n'),
    "a column of numbers": ("train.csv", ",text,label\n0,a b,neg\n1,c d,pos\n"),
    "names of rows": ("train.csv", "text,label\n1,a b,neg\n2,c d,pos\n"),  # as R writes them
    "a field of rows": ("train.json", json.dumps({"version": "1.0", "tags": ["x"], "data": GOOD}, indent=1)),
    "lines in .json": ("train.json", lines(GOOD)),
    "one array in .jsonl": ("train.jsonl", json.dumps(GOOD)),
    "packed lines": ("train.jsonl.gz", gzip.compress(lines(GOOD).encode())),
    "a packed field": ("train.json.gz", gzip.compress(json.dumps({"rows": GOOD}).encode())),
    "packed in two frames": (
        "train.jsonl.zst",
        ZST + pyarrow.Codec("zstd").compress(lines(GOOD[1:]).encode(), asbytes=True),
    ),
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
    _, rows = load(tmp_path, "train.csv", 'text,label\n"NA",neg\nnull,pos\n')
    assert rows["text"][:] == ["NA", "null"]
    (tmp_path / "train.csv").unlink()
    _, rows = load(tmp_path, "train.tsv", 'text\tlabel\n"a "b" c\tneg\nd", e\tpos\nNA\tneg\n')
    assert rows["text"][:] == ['"a "b" c', 'd", e', "NA"]


REFUSED = [
    ("train.csv", "text,label\ncafé,neg\n".encode("latin1"), r"Line 2 of .*train.csv is not UTF-8: convert the file, for example with `iconv -f latin1 -t utf-8`\.$"),
    ("train.jsonl", lines([{"text": "é", "label": "neg"}]).encode() + '{"text": "é", "label": "pos"}\n'.encode("latin1"), "Line 2 of .*train.jsonl is not UTF-8"),
    ("train.json", '[{"text": "é", "label": "neg"}]'.encode("latin1"), "Line 1 of .*train.json is not UTF-8"),
    ("train.csv", "text,label\na,neg\n".encode("utf-16"), "Line 1 of .*train.csv is not UTF-8: .* -f utf-16 -t"),
    ("train.csv.bz2", bz2.compress(b"text,label\n\xe9,neg\n"), "Line 2 of .*train.csv.bz2 is not UTF-8"),
    ("train.csv", "text;label\na b;neg\n", "train.csv has semicolons between its columns: a .csv file needs commas"),
    ("train.csv", '"text"\t"label"\na b\tneg\n', "train.csv has tabs between its columns: a .csv file needs commas"),
    ("train.tsv", "text,label\na b,neg\n", "train.tsv has commas between its columns: a .tsv file needs tabs"),
    ("train.csv", "text,label\na, b,neg\nc,pos\n", "Line 2 of .*train.csv has 3 fields instead of 2: put a text with a comma in double quotes"),
    ("train.csv", "text,label\na,neg\nb, c,pos\n", "Line 3 of .*train.csv has 3 fields instead of 2: put a text with a comma in double quotes"),
    ("train.tsv", "text\tlabel\na\tneg\nb\tc\tpos\n", "Line 3 of .*train.tsv has 3 fields instead of 2: replace a tab in a text by a space"),
    ("train.csv", "text,text,label\na,b,neg\nc,d,pos\n", "train.csv has two columns named text: rename one of them"),
    ("train.csv", "fine,pos\nb,neg\n", "the data has 'fine', 'pos'. The first line of a .csv or .tsv file must hold the column names"),
    ("train.csv", "text, label\na, neg\nb, pos\n", "Missing columns in split train .*: label. .*the data has 'text', ' label'. Did you mean  label"),
    ("train.csv", "text,label\na,neg\nb,\nc,pos\n", "Expected labels 0 .neg., 1 .pos., got '' in row 2 of split train"),
    ("train.tsv", 'text\tlabel\n"a\nb"\tneg\nc\tpos\n', "Expected labels 0 .neg., 1 .pos., got '' in row 1 of split train"),
    ("train.json", json.dumps({"text": ["a"], "label": ["neg"]}), r'train.json must be an array of objects, one for each row, or have it as in \{"data": \[...\]\}\.$'),
    ("train.json", json.dumps({"1": GOOD[0], "2": GOOD[1]}), "train.json must be an array of objects, one for each row"),
    ("train.json", json.dumps({"train": GOOD, "validation": GOOD}), "train.json has rows in train and validation: write each of them as a file"),
    ("train.json", "3", "Line 1 of .*train.json must be one JSON object, got '3'"),
    ("train.json", "[1]", "train.json must be an array of objects, one for each row"),
    ("train.csv", 'text,label\na,neg\n"b,pos\n', r"Cannot read the row in line 3 of .*train.csv: a double quote in it is never closed\.$"),
    ("train.csv", "text,label\na,neg,\nc,pos,\n", "Line 2 of .*train.csv has 3 fields instead of 2: remove the comma at its end, or put"),
    ("train.jsonl", '{"text": "a", "text": "b", "label": "neg"}\n', "Line 1 of .*train.jsonl must be one JSON object, but cannot be read: it has 'text' twice"),
    ("train.jsonl", "3\n", "Line 1 of .*train.jsonl must be one JSON object, got '3'"),
    ("train.jsonl", '{"text": "a"\n', "Line 1 of .*train.jsonl must be one JSON object, but cannot be read: "),
    ("train.jsonl.gz", lines(GOOD), r"Cannot read .*train.jsonl.gz: zlib inflate failed"),
    ("train.jsonl.gz", gzip.compress(lines(GOOD * 500).encode(), 0)[:-60], r"Cannot read .*train.jsonl.gz: Truncated compressed stream"),
    *(("train.jsonl.zst", each, r"Cannot read .*train.jsonl.zst: ") for each in (b"junk", ZST[:-3], ZST + ZST[:-3])),
    ("train.csv", "\n\n", r"train.csv has no rows\.$"),
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


def test_columns_that_change_far_down(tmp_path):
    rows = [f"{number},a b,{number % 2}" for number in range(10_000)]  # pandas infers types from so many rows
    labels, table = load(tmp_path, "train.csv", "\n".join(["id,text,label", *rows, "x1,c,1", ""]), [{"text": "a", "label": 1}])  # fmt: skip
    assert labels == ("0", "1")
    assert len(table) == 10_001
    labels, table = load(tmp_path, "train.csv", "\n".join(["id,text,label", *rows, "x1,c,yes", ""]), [{"text": "a", "label": 1}])  # fmt: skip
    assert labels == ("0", "1", "yes")


def test_labels_of_all_types_are_the_same_classes(tmp_path):
    for truth in ("True,False", "true,false"):
        content = "text,label\n" + "".join(f"a,{word}\n" for word in truth.split(","))
        assert load(tmp_path, "train.csv", content, [{"text": "a", "label": False}])[0] == ("False", "True")
    for number in ("0,1", "0.0,1.0"):
        content = "text,label\n" + "".join(f"a,{word}\n" for word in number.split(","))
        assert load(tmp_path, "train.csv", content, [{"text": "a", "label": "1"}])[0] == ("0", "1")


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
    before = sorted(tmp_path.rglob("*"))
    assert_sentence(cli("recipe", "finetune", *args), 1, "Line 1 of my data .1./größe/train.jsonl is not UTF-8")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_parquet_file_with_other_types(tmp_path):
    import pandas as pd

    table = pd.DataFrame({"sentence": ["a", "b", "c"], "label": [0, 1, 1], "idx": [0, 1, 2]})
    table.astype({"sentence": "category", "label": "int8"}).to_parquet(tmp_path / "train.parquet")
    datasets.Dataset.from_pandas(table).to_parquet(tmp_path / "dev.parquet")
    splits = load_splits(get_task("cola"), tmp_path)
    assert splits["train"]["sentence"][:] == ["a", "b", "c"]
    assert splits["train"]["label"][:] == [0, 1, 1]
