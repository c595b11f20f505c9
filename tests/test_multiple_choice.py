"""Multiple-choice data as it is published: forms of choices, forms of answers, and what is refused."""

import pytest

from attnreg.errors import InputError
from attnreg.experiments.tasks import choose_task, load_data
from attnreg.experiments.tasks.kinds import kind_class
from tests.helpers import task_data as made

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


def text_of(texts, right):
    return texts[right]


def letter_of(texts, right):
    return "ABC"[right]


LISTED, NAMED = {"choice_columns": "choices"}, {"choice_columns": "x,y,z"}
FORMS = {
    "numbers": (listed, lambda texts, right: right, LISTED),
    "numbers as text": (columns, lambda texts, right: str(right), NAMED),
    "letters": (columns, letter_of, NAMED),
    "small letters": (listed, lambda texts, right: "abc"[right], LISTED),
    "texts": (listed, text_of, LISTED),
    "texts of columns": (columns, text_of, NAMED),
    "marks": (marked, lambda texts, right: "CAB"[right], LISTED),
    "marks of objects": (objects, lambda texts, right: str(right + 1), LISTED),
    "names of columns": (columns, lambda texts, right: "xyz"[right], NAMED),
    "texts of marked choices": (marked, text_of, LISTED),
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


READINGS = "may give a choice number from 0 to 2 or the text of one choice, which differ"
NUMBERS = [["7", "1", "0"], ["2", "0", "1"]]  # the second row alone could also be a number, of another choice


def test_all_splits_are_read_alike(tmp_path):
    rows = rows_of(listed, text_of, NUMBERS, [0, 2])
    task, splits = load(tmp_path / "data", rows, rows[1:], **LISTED)
    assert kind_class("multiple-choice")(task).gold(splits["validation"]) == [2]


def changed(**change):
    first, second, *others = rows_of(listed, letter_of)
    return [first, {**second, **change}, *others]


def plain(choices, *answers):
    return [{"q": "the", "choices": choices, "answer": answer} for answer in answers]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (rows_of(listed, text_of, NUMBERS, [0, 2])[1:], f"Column answer {READINGS} in row 1 of split train .*: write letters instead"),
        # a text that two choices have is still one reading
        ([*plain(["2", "1", "0"], "1", "2"), *plain(["1", "0", "0"], "0")], f"{READINGS} in row 2"),
        (changed(answer=None), "Expected a letter from A to C in column answer, got None in row 2 of split train"),
        (changed(answer="AB"), "Expected a letter from A to C in column answer, got 'AB' in row 2 of split train"),
        (changed(answer="D"), "Expected a letter from A to C in column answer, got 'D' in row 2 of split train"),
        (changed(choices=["a", "b"]), "Expected 3 choices, as in the first row, in column choices, got 2 in row 2 of split train .*: remove rows with another number of choices .2 of 8.\\.$"),
        (changed(choices=["a", None, "c"]), r"Expected a list of texts, or .*, instead of column choices, got \['a', None, 'c'\] in row 2 of split train"),
        (rows_of(listed, text_of, [["red", "red", "blue"], ["one", "two", "two"]], [2, 1]),
         "Column answer gives the text of one choice, but two choices have the same text in row 2 of split train"),
        # a missing answer is no label, no text and no number
        (plain({"text": ["a", "b", "c"], "label": ["None", "Some", "All"]}, *[None] * 4), "Expected a choice number .* got None in row 1 of split train"),
        (plain(["None", "Some", "All"], *[None] * 4), "Expected a choice number .* got None in row 1 of split train"),
        (plain(["", "Some", "All"], *[""] * 4), "Expected a choice number .* got '' in row 1 of split train"),
        (plain("a/b", "?"), "Expected a list of texts, or two or more --choice-columns, instead of column choices, got 'a/b'"),
        (plain(["a", "b"], "?"), r"Expected a choice number from 0 to 1, a letter from A to B or the text of one choice in column answer, got '\?' in row 1 of split train"),
    ],
    ids=range(13),
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, rows, says):
    with pytest.raises(InputError, match=says):
        load(tmp_path / "data", rows, **LISTED)
