"""The rows that `attnreg fit` reads of a file: which columns hold texts and labels, and which rows are left out."""

import json

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from attnreg.errors import InputError, UsageError
from attnreg.experiments.fit.table import choose_columns, labelled_rows, read_table
from tests.helpers.commands import assert_sentence, ran, write_csv


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["x"], "All 30 rows have the label x: there is nothing to learn."),
        ([f"class {number}" for number in range(30)], "A class needs at least 4 rows that differ, but all 30 rows"),
        ([f"{number:030d}" for number in range(30)], "give the column of labels, not of row numbers"),
    ],
)
def test_the_only_other_column_holds_the_labels(labels, says, cli, tiny, tmp_path):
    lines = [[number, f"this is text {number}", labels[number % len(labels)]] for number in range(30)]
    begin = 0 if len(labels) == 1 else 1  # with the numbers of rows, or without
    write_csv(tmp_path / "rows.csv", [line[begin:] for line in [["no", "said", "is"], *lines]])
    assert_sentence(cli("fit", tmp_path / "rows.csv", "--model", tiny), 1, says)


def test_files_that_cannot_be_read_are_told(cli, tiny, tmp_path):
    (tmp_path / "rows.csv").write_text("text;label\na b c;x\n")
    assert_sentence(cli("fit", tmp_path / "rows.csv", "--model", tiny), 1, "separate columns by commas, not by ';'")
    assert_sentence(cli("fit", tmp_path / "none.csv", "--model", tiny), 1, "Expected DATA to be a folder or a file")
    (tmp_path / "empty").mkdir()
    assert_sentence(cli("fit", tmp_path / "empty", "--model", tiny), 1, "No train file in")


def test_columns_are_found_by_a_word_of_their_names():
    days, stars = [f"{day} May" for day in range(1, 10)] * 4, ["1", "5"] * 18
    texts = [f"The item number {number} is here" for number in range(36)]
    columns = {"Date": days, "Headline": [text.upper() for text in texts], "Review Text": texts, "Rating": stars}
    assert choose_columns(columns, None, None, None) == (["Review Text"], "Rating")
    headless = {"The item was here": texts, "5": stars}
    with pytest.raises(InputError, match="The first line should name the columns, but '5' there is also a label"):
        choose_columns(headless, None, None, None)
    assert choose_columns(headless, None, "5", None) == (["The item was here"], "5")
    spam = {"Review Text": texts, "spam": ["spam", "ham"] * 18}
    assert choose_columns(spam, None, None, None) == (["Review Text"], "spam")


@pytest.mark.parametrize("group", [None, "author"])
def test_rows_of_rare_classes_are_left_out_where_asked_for(group, cli, tiny, tmp_path, capsys):
    """A class with four rows of which two are alike is rare, too, and so is one with four rows of two authors."""
    labels = ["a"] * 6 + ["b"] * 5 + ["c"] * 4 + ["d"] * 3 + ["e"]
    lines = [[f"This is text {n}", label, f"author {n}"] for n, label in enumerate(labels)]
    lines[12][0 if group is None else 2] = lines[11][0 if group is None else 2]
    path = write_csv(tmp_path / "rows.csv", [["said", "is", "author"], *lines])
    given = (path, "said", "is", group, None)
    units = "rows that differ" if group is None else "groups"
    with pytest.raises(InputError, match=r"too few have c \(3\), d \(3\), e \(1\): .*fit --drop-rare`\)"):
        labelled_rows(*given)
    table = labelled_rows(*given, drop_rare=True)
    assert table.labelled.row_numbers == [*range(1, 12)]
    assert [table.rows.answers.classes[n] for n in table.rows.labels] == labels[:11]
    assert len({*table.rows.units.tolist()}) == 11
    assert f"Left out, with a class of fewer than 4 {units} (c, d, e): 8 (row 12, 13," in capsys.readouterr().out
    lines[6:] = []
    write_csv(path, [["said", "is", "author"], *lines, ["One more text", "b", "someone"]])
    asked = ("--label-column", "is", "--text-columns", "said", "--drop-rare")
    assert_sentence(cli("fit", path, "--model", tiny, *asked), 1, "All 6 rows have the label a: there is nothing")


def test_numbers_have_no_rare_classes(tmp_path):
    path = write_csv(tmp_path / "rows.csv", [["said", "stars"], *([f"This is text {n}", n / 4] for n in range(20))])
    with pytest.raises(
        UsageError, match="--drop-rare is for classes, but the labels in stars are predicted as numbers"
    ):
        labelled_rows(path, None, None, None, None, drop_rare=True)


@pytest.mark.parametrize(
    ("header", "labels", "says"),
    [
        ("text,label", ["a", "b", "c"], "On the 3 rows of the test split, it scores"),
        ("text,label", ["a", "", "b"], "On the 2 rows of the test split, it scores"),
        ("text,label", ["", "", ""], None),
        ("text,label", ["-1", "-1", "-1"], None),  # as GLUE hides them
        ("text,no", ["a", "b", "c"], None),
        ("words,label", ["a", "b", "c"], "The test split has no column text, so it is not scored."),
    ],
)
def test_a_test_split_is_scored_where_it_can_be(header, labels, says, cli, tiny, tmp_path):
    lines = [f"this is text {number},{'ab'[number % 2]}" for number in range(30)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines[:20]]))
    (tmp_path / "dev.csv").write_text("\n".join(["text,label", *lines[20:]]))
    (tmp_path / "test.csv").write_text("\n".join([header, *(f"this is new {label},{label}" for label in labels)]))
    args = ("fit", tmp_path, "--model", tiny, "--budget", "1s", "--output-dir", tmp_path / "out")
    output = ran(cli(*args, "--label-column", "label", "--text-columns", "text")).output
    assert "30 rows: texts in text" in output  # those of dev are learned from, too
    assert (tmp_path / "out" / "result.json").is_file()
    assert says in output if says else "test split" not in output


def test_numbers_of_a_test_split_are_checked_before_the_fit(cli, tiny, tmp_path):
    lines = [f"this is text {number},{number / 4}" for number in range(30)]
    (tmp_path / "train.csv").write_text("\n".join(["text,price", *lines]))
    (tmp_path / "test.csv").write_text("text,price\nthis is new,?\n")
    told = "In the test split: Expected numbers as labels, got '\\?' in row 1"
    assert_sentence(cli("fit", tmp_path, "--model", tiny, "--output-dir", tmp_path / "out"), 1, told)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_missing_group_is_told_with_its_row(suffix, tmp_path):
    lines = [{"said": f"This is text {n}", "is": "ab"[n % 2], "author": f"{n}"} for n in range(20)]
    lines[1]["is"], lines[5]["author"] = ("", "") if suffix == "csv" else (None, None)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        path.write_text("\n".join([",".join(lines[0]), *(",".join(line.values()) for line in lines)]))
    else:
        path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InputError, match="Row 6 has no group: give it one of its own"):
        labelled_rows(path, "said", "is", "author", None)


@pytest.mark.parametrize(("write", "name"), [(Dataset.to_parquet, "train.parquet"), (Dataset.save_to_disk, "train")])
def test_classes_have_the_names_that_a_file_declares(write, name, tmp_path):
    columns = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    write(Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, columns), tmp_path / name)
    assert read_table(tmp_path) == {"text": ["a", "b", "c"], "label": ["pos", "neg", -1]}
