"""A label is the same class in each file and spelling; what is none is refused."""

import datasets
import pytest

from attnreg.errors import InputError
from attnreg.experiments.tasks import choose_task, load_data
from attnreg.experiments.tasks.columns import Classes, names_of
from attnreg.experiments.tasks.loading.reading import read_files


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        ("true false half", "False True half"),
        ("+1 -1 1.0", "-1 1"),
        ("1.1 a 1.2", "1.1 1.2 a"),
        ("TRUE FALSE 1_2", "1_2 False True"),
    ],
)
def test_a_split_with_fewer_labels_has_the_same_classes(tmp_path, words, classes):
    for name, some in (("train", words.split()), ("validation", words.split()[:2])):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(f"a {each},{each}\n" for each in some))
    task, splits = load_data(choose_task("custom", text_columns="text"), tmp_path)
    assert task.labels == tuple(classes.split())
    assert splits["validation"]["label"][:] == words.split()[:2]


def test_labels_with_an_exponent_do_not_become_others(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.csv").write_text("text,label\na,1E2\nb,100\nc,7\n")
    with pytest.raises(InputError, match=r"Expected .*7.*100.*, got '1E2' in row 1 of split train"):
        load_data(choose_task("custom", text_columns="text"), tmp_path)


@pytest.mark.parametrize(
    ("names", "labels", "numbers"),
    [
        (["1.0", "0.0"], ["1.0", "0.0", "1", 0.0], [0, 1, 0, 1]),  # declared names before numbers
        (["false", "true"], ["true", "TRUE", True, "false"], [1, 1, 1, 0]),
        (["no", "yes"], ["yes", "1", 1.0, "true", "01"], [1, 1, 1, None, None]),
        (["2", "10"], ["10", "+10", " 2", "2.00", "1_0", "9" * 5000], [1, 1, 0, 0, None, None]),
    ],
)
def test_a_label_is_its_class_in_each_spelling(names, labels, numbers):
    assert [Classes(names).number(each) for each in labels] == numbers


@pytest.mark.parametrize(
    ("labels", "names"),
    [("1.0 0.0 NaN", "0 1"), ("5e3 E11 a", "5e3 E11 a"), ("1 1.5 2", "1 2"), ("007 008", "007 008")],
)
def test_fractions_are_classes_only_beside_words(labels, names):
    assert names_of(labels.split()) == names.split()


def test_numbers_do_not_take_the_names_of_another_split(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "a {n}", "label": {n}}}\n' for n in (0, 1, 2)))
    named = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["pos", "neu", "neg"])}
    )
    datasets.Dataset.from_dict({"text": ["a"], "label": [1]}, named).save_to_disk(tmp_path / "validation")
    with pytest.raises(InputError, match=r"Label '0' in column label of split train of .* is none of the classes"):
        load_data(choose_task("custom", text_columns="text"), tmp_path)


def test_numbers_that_floats_do_not_tell_apart_are_names(tmp_path):
    ids = ["12345678901234567890", "12345678901234567891", "3"]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"a,{each}\n" for each in ids))
    assert read_files([tmp_path / "train.csv"])["label"][:] == ids
