"""Multiple-choice data as it is published: forms of choices, forms of answers, and what is refused."""

import random

import pytest

from attnreg.errors import InputError
from attnreg.experiments.tasks import choose_task, load_data
from attnreg.experiments.tasks.kinds import kind_class
from tests import task_data as made
from tests.commands import ran, read_lines

TEXTS = [["one", "red", "blue"], ["two", "near", "far"], ["three", "go", "green"], ["a", "b", "c"]]
RIGHT = [1, 0, 2, 1]


def listed(texts, right):
    return {"choices": texts}


def marked(texts, right):
    return {"choices": {"text": texts, "label": ["C", "A", "B"]}}  # in an order of its own


def objects(texts, right):
    return {"choices": [{"label": number, "text": text} for number, text in enumerate(texts, 1)]}


def columns(texts, right):
    return dict(zip("xyz", texts, strict=True))


LISTED = {"choice_columns": "choices"}
FORMS = {
    "numbers": (listed, lambda texts, right: right, LISTED),
    "numbers as text": (columns, lambda texts, right: str(right), {"choice_columns": "x,y,z"}),
    "letters": (columns, lambda texts, right: "ABC"[right], {"choice_columns": "x,y,z"}),
    "small letters": (listed, lambda texts, right: "abc"[right], LISTED),
    "texts": (listed, lambda texts, right: texts[right], LISTED),
    "texts of columns": (columns, lambda texts, right: texts[right], {"choice_columns": "x,y,z"}),
    "marks": (marked, lambda texts, right: "CAB"[right], LISTED),
    "marks of objects": (objects, lambda texts, right: str(right + 1), LISTED),
    "names of columns": (columns, lambda texts, right: "xyz"[right], {"choice_columns": "x,y,z"}),
    "texts of marked choices": (marked, lambda texts, right: texts[right], LISTED),
}


def rows_of(choices, answer, texts=TEXTS, right=RIGHT):
    pairs = list(zip(texts, right, strict=True))
    return [{"q": "the", **choices(*pair), "answer": answer(*pair)} for pair in pairs]


def load(folder, rows, dev=None, **options):
    task = choose_task("custom", kind="multiple-choice", text_columns="q", label_column="answer", **options)
    return load_data(task, made.write_splits(folder, train=rows, validation=rows if dev is None else dev))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_means_the_same(tmp_path, form):
    choices, answer, options = FORMS[form]
    texts, right = TEXTS[:3], RIGHT[:3]  # without the row in which letters are texts, too
    task, splits = load(tmp_path / "data", rows_of(choices, answer, texts, right), **options)
    for rows in splits.values():
        assert kind_class("multiple-choice")(task).gold(rows) == right
        assert [[row[column] for column in task.choices] for row in rows] == texts


def test_all_splits_are_read_alike(tmp_path):
    texts = [["7", "1", "0"], ["2", "0", "1"]]
    rows = rows_of(listed, lambda texts, right: texts[right], texts, [0, 2])
    # The second row alone could also be a number, of another choice.
    task, splits = load(tmp_path / "data", rows, rows[1:], **LISTED)
    assert kind_class("multiple-choice")(task).gold(splits["validation"]) == [2]
    says = "Column answer may give a choice number from 0 to 2 or the text of one choice, which differ in row 1 of split train .*: write letters instead"
    with pytest.raises(InputError, match=says):
        load(tmp_path / "other", rows[1:], **LISTED)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer": None}, "Expected a letter from A to C in column answer, got None in row 2 of split train"),
        ({"answer": "AB"}, "Expected a letter from A to C in column answer, got 'AB' in row 2 of split train"),
        ({"answer": "D"}, "Expected a letter from A to C in column answer, got 'D' in row 2 of split train"),
        ({"choices": ["a", "b"]}, "Expected 3 choices, as in the first row, in column choices, got 2 in row 2 of split train .*: remove rows with another number of choices .2 of 8.\\.$"),
        ({"choices": ["a", None, "c"]}, r"Expected a list of texts, or .*, instead of column choices, got \['a', None, 'c'\] in row 2 of split train"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, change, says):
    rows = rows_of(listed, lambda texts, right: "ABC"[right])
    rows[1] = {**rows[1], **change}
    with pytest.raises(InputError, match=says):
        load(tmp_path / "data", rows, **LISTED)


def test_the_text_of_two_choices_is_no_answer(tmp_path):
    rows = rows_of(listed, lambda texts, right: texts[right], [["red", "red", "blue"], ["one", "two", "two"]], [2, 1])
    says = "Column answer gives the text of one choice, but two choices have the same text in row 2 of split train"
    with pytest.raises(InputError, match=says):
        load(tmp_path / "data", rows, **LISTED)


def test_a_text_that_two_choices_have_is_still_one_reading(tmp_path):
    texts = [["2", "1", "0"], ["2", "1", "0"], ["1", "0", "0"]]
    rows = [{"q": "", "choices": choices, "answer": answer} for choices, answer in zip(texts, "120", strict=True)]
    says = "may give a choice number from 0 to 2 or the text of one choice, which differ in row 2"
    with pytest.raises(InputError, match=says):
        load(tmp_path / "data", rows, **LISTED)


@pytest.mark.parametrize(
    ("choices", "missing", "expected"),
    [
        ({"text": ["a", "b", "c"], "label": ["None", "Some", "All"]}, None, r"a choice number .* got None in row 1"),
        (["None", "Some", "All"], None, r"a choice number .* got None in row 1"),
        (["", "Some", "All"], "", r"a choice number .* got '' in row 1"),
    ],
)
def test_a_missing_answer_is_no_label(tmp_path, choices, missing, expected):
    rows = rows_of(lambda *_: {"choices": choices}, lambda *_: missing)
    with pytest.raises(InputError, match=f"Expected {expected} of split train"):
        load(tmp_path / "data", rows, **LISTED)


def test_columns_that_hold_no_choices(tmp_path):
    rows = [{"q": "the", "choices": "a/b", "answer": "?"}]
    with pytest.raises(InputError, match="Expected a list of texts, or two or more --choice-columns, instead of column choices, got 'a/b'"):  # fmt: skip
        load(tmp_path / "text", rows, **LISTED)
    rows = [{"q": "the", "choices": ["a", "b"], "answer": "?"}]
    says = r"Expected a choice number from 0 to 1, a letter from A to B or the text of one choice in column answer, got '\?' in row 1 of split train"
    with pytest.raises(InputError, match=says):
        load(tmp_path / "answers", rows, **LISTED)


def test_a_run_on_lists_with_letters(cli, tmp_path):
    made.tiny_bert(tmp_path / "bert")
    rng = random.Random(0)
    for split in ("train", "test"):
        rows = []
        for _ in range(32):
            right, cue = rng.randrange(3), rng.choice(["red", "green", "blue"])
            texts = [cue if number == right else "one" for number in range(3)]
            rows.append({"q": cue, "choices": {"text": texts, "label": ["A", "B", "C"]}, "answerKey": "ABC"[right]})
        made.write_rows(tmp_path / "data" / f"{split}.json", rows)
    args = ["--task", "custom", "--kind", "multiple-choice", "--text-columns", "q", "--choice-columns", "choices", "--label-column", "answerKey"]  # fmt: skip
    ran(cli("recipe", "ad-drop", *args, "--data-dir", "data", "--validation-rows", 8, "--label-noise", 0.25, "--model", "bert", "--epochs", 1, "--max-length", 16, "--device", "cpu", "--output-dir", "out"))  # fmt: skip
    assert {record["label"] for record in read_lines(tmp_path / "out" / "predictions.jsonl")} == {0, 1, 2}
    assert "test, 32 rows" in ran(cli("evaluate", "out", "--split", "test", "--device", "cpu")).output
