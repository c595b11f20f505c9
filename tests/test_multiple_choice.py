"""Multiple-choice data: forms of choices, forms of answers, and what is refused."""

import pytest

from attnreg.errors import InputError
from attnreg.experiments.tasks import choose_task, load_data
from attnreg.experiments.tasks.kinds import kind_class
from tests.helpers import task_data as made

TEXTS = [["one", "red", "blue"], ["two", "near", "far"], ["three", "go", "green"]]
RIGHT = [1, 0, 2]
LISTED, NAMED = {"choice_columns": "choices"}, {"choice_columns": "x,y,z"}
FORMS = {
    "numbers": (LISTED, lambda right: right),
    "numbers as text": (NAMED, str),
    "letters": (NAMED, lambda right: "ABC"[right]),
    "small letters": (LISTED, lambda right: "abc"[right]),
}


def rows_of(options, answer, texts=TEXTS, right=RIGHT):
    choices = [{"choices": row} if options is LISTED else dict(zip("xyz", row, strict=True)) for row in texts]
    return [{"q": "the", **row, "answer": answer(number)} for row, number in zip(choices, right, strict=True)]


def load(folder, rows, dev=None, **options):
    task = choose_task("custom", kind="multiple-choice", text_columns="q", label_column="answer", **options)
    return load_data(task, made.write_splits(folder, train=rows, validation=rows if dev is None else dev))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_means_the_same(tmp_path, form):
    options, answer = FORMS[form]
    task, splits = load(tmp_path / "data", rows_of(options, answer), **options)
    for rows in splits.values():
        assert kind_class("multiple-choice")(task).gold(rows) == RIGHT
        assert [[row[column] for column in task.choices] for row in rows] == TEXTS


def changed(**change):
    first, second, *others = rows_of(LISTED, lambda right: "ABC"[right])
    return [first, {**second, **change}, *others]


EXPECTED = "Expected a choice number from 0 to 2 or a letter from A to C in column answer, got"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer": None}, f"{EXPECTED} None in row 2 of split train"),
        ({"answer": ""}, f"{EXPECTED} '' in row 2 of split train"),
        ({"answer": "AB"}, f"{EXPECTED} 'AB' in row 2 of split train"),
        ({"answer": "D"}, f"{EXPECTED} 'D' in row 2 of split train"),
        ({"answer": "near"}, f"{EXPECTED} 'near' in row 2 of split train"),
        ({"choices": ["a", "b", "A"]}, "has 'A' in row 2 of split train .*, which is the number or letter of one choice and the text of another"),
        ({"choices": ["a", "b"]}, "Expected 3 choices, as in the first row, in column choices, got 2 in row 2 of split train .*: remove rows with another number of choices"),
        ({"choices": ["a", None, "c"]}, r"Expected a list of texts, or .*, instead of column choices, got \['a', None, 'c'\] in row 2 of split train"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, change, says):
    with pytest.raises(InputError, match=says):
        load(tmp_path / "data", changed(**change), **LISTED)


def test_choices_that_are_no_list(tmp_path):
    rows = [{"q": "the", "choices": "a/b", "answer": 0}]
    with pytest.raises(InputError, match=r"Expected a list of texts, or two or more --choice-columns, .* got 'a/b'"):
        load(tmp_path / "data", rows, **LISTED)
