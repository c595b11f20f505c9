"""Reading tasks' data: columns, labels, splits, and what is wrong with them."""

import math
from dataclasses import replace

import datasets
import pytest

from attnreg.errors import InputError
from attnreg.experiments.tasks import choose_task, get_task, load_data
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.loading.data import load_inputs
from tests.helpers import task_data as made


def test_labels_by_name_by_number_and_as_the_data_names_them(tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in ("not_entailment", "entailment")]
    folder = made.write_splits(tmp_path / "names", train=rows, validation=rows)
    kind = kind_class("classification")(get_task("rte"))
    assert kind.gold(load_data(get_task("rte"), folder)[1]["train"]) == [1, 0]
    names = datasets.ClassLabel(names=["not_entailment", "entailment"])  # in another order than the task's
    table = datasets.Dataset.from_list(rows).cast_column("label", names)
    folder = made.write_splits(tmp_path / "parquet", train=table, validation=table)
    task, splits = load_data(get_task("rte"), folder)
    assert list(splits["train"]["label"]) == [0, 1]
    assert kind_class("classification")(task).gold(splits["train"]) == [1, 0]


def test_the_hubs_integer_tags_mean_the_same_as_their_names(tmp_path):
    names = list(get_task("conll2003").labels)
    tags = ["B-PER", "I-PER", "O"]
    numbers = {"tokens": ["Anna", "Smith", "went"], "ner_tags": [names.index(tag) for tag in tags], "id": "0"}
    feature = datasets.List(datasets.ClassLabel(names=names))
    named = datasets.Dataset.from_list([numbers]).cast_column("ner_tags", feature)
    task, kind = get_task("conll2003"), kind_class("tokens")(get_task("conll2003"))
    for number, table in enumerate(([numbers], [{**numbers, "ner_tags": tags}], named)):
        folder = made.write_splits(tmp_path / str(number), train=table, validation=table)
        assert kind.gold(load_data(task, folder)[1]["train"]) == [[1, 2, 0]]


def custom(**options):
    return choose_task("custom", text_columns="text", **options)


def labelled(*labels):
    return [{"text": ["a"] * len(label) if isinstance(label, list) else "a", "label": label} for label in labels]


@pytest.mark.parametrize(
    ("train", "dev", "names", "gold"),
    [
        ((10, 2, 5), 5, ("2", "5", "10"), [2, 0, 1]),
        ((10, 2, 5), "5", ("2", "5", "10"), [2, 0, 1]),
        (("good", "bad", "so-so"), "so-so", ("bad", "good", "so-so"), [1, 0, 2]),
        ((True, False), True, ("False", "True"), [1, 0]),
        ((1.0, 3.0), 1.0, ("1", "3"), [0, 1]),
    ],
)
def test_labels_of_ones_own_set_are_read_off_all_of_it(tmp_path, train, dev, names, gold):
    folder = made.write_splits(tmp_path, train=labelled(*train), validation=labelled(dev))
    task, splits = load_data(custom(), folder)
    assert task.labels == names
    assert kind_class("classification")(task).gold(splits["train"]) == gold
    assert kind_class("classification")(task).gold(splits["validation"]) == [names.index(str(dev).removesuffix(".0"))]


PAIRS, SIMILAR, TRANSLATED = (made.make(maker, 4, 0) for maker in (made.pair, made.similarity, made.translation))
REVIEWS = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]
COLA = {"train": [{"sentence": "a", "label": label} for label in (0, 1)], "validation": [{"sentence": "a", "label": 1}]}
BOTH = {"train": 4, "validation": 4}


@pytest.mark.parametrize(
    ("task", "given", "expected"),
    [
        ("mnli", {"train": PAIRS, "validation_matched": PAIRS[:3], "validation_mismatched": PAIRS[:2]},
         {"train": 4, "validation": 3, "validation_mismatched": 2}),
        ("mnli", {"train": PAIRS, "validation": PAIRS}, BOTH),
        ("imdb", {"train": REVIEWS, "test": REVIEWS[:1]}, {"train": 2, "validation": 1}),
        ("hans", {"validation": [{"premise": "a", "hypothesis": "b", "label": "non-entailment"}]}, {"validation": 1}),
        # a test split without labels is left alone
        ("stsb", {"train": SIMILAR, "validation": SIMILAR, "test": [{**row, "label": -1.0} for row in SIMILAR]}, BOTH),
        ("wmt16-en-ro", {"train": TRANSLATED, "validation": TRANSLATED, "test": [{"translation": {"en": "red"}}]}, BOTH),
        *(("cola", {**COLA, "test": [{"sentence": "a", **label}]}, {"train": 2, "validation": 1})
          for label in ({}, {"label": None}, {"label": ""})),
    ],
)  # fmt: skip
def test_splits_by_the_hubs_names(tmp_path, task, given, expected):
    splits = load_data(get_task(task), made.write_splits(tmp_path / "data", **given))[1]
    assert {name: len(rows) for name, rows in splits.items()} == expected


@pytest.mark.parametrize(
    ("task", "change", "says"),
    [
        ("stsb", {"label": math.nan}, "Expected finite numbers in column label, got nan in row 2 of split train"),
        ("stsb", {"label": None}, "Expected finite numbers in column label, got None in row 2 of split train"),
        ("conll2003", {"tokens": "Anna went"}, "Expected a list in column tokens, got .*split train .*: use .jsonl or .parquet, because .csv and .tsv cannot store lists"),
        ("conll2003", {"ner_tags": ["O"]}, "Expected one label in column ner_tags per word .* got 2 words and 1 labels in row 2"),
        ("conll2003", {"tokens": [], "ner_tags": []}, "got 0 words and 0 labels in row 2"),
        ("conll2003", {"tokens": ["a", None]}, "Expected words in column tokens, got None in row 2"),
        ("conll2003", {"ner_tags": ["O", "B-DOG"]}, r"Expected labels 0 \(O\), 1 \(B-PER\), .* got 'B-DOG' in row 2"),
        ("swag", {"label": 4}, "Expected a choice number from 0 to 3 or a letter from A to D in column label, got 4 in row 2"),
        ("swag", {"ending2": None}, "Expected text in column ending2, got None in row 2"),
        ("codah", {"sent2": None}, "Expected text in column sent2, got None in row 2"),
        ("wmt16-en-ro", {"translation": {"en": "red"}}, "Expected text in column translation.ro, got None in row 2"),
        ("mnli", {"label": 3}, r"Expected labels 0 \(entailment\), 1 \(neutral\), 2 \(contradiction\), got 3 in row 2"),
        ("mnli", {"label": "maybe"}, "got"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, task, change, says):
    makers = {name: maker for name, (maker, _) in made.KINDS.items()} | {"codah": made.endings}
    makers["conll2003"] = lambda rng: {"tokens": ["Anna", "went"], "ner_tags": ["B-PER", "O"]}
    rows = made.make(makers[task], 3, 0)
    if isinstance(change.get("tokens"), str):  # a column of text, as .csv has it
        rows = [{**row, "tokens": " ".join(row["tokens"])} for row in rows]
    if change.get("label") == "maybe":
        rows = [{**row, "label": "neutral"} for row in rows]
    bad = [rows[0], {**rows[1], **change}, rows[2]]
    folder = made.write_splits(tmp_path / "data", train=bad, validation=rows)
    with pytest.raises(InputError, match=says):
        load_data(get_task(task), folder)


def in_both(*rows):
    return {"train": [*rows], "validation": [*rows]}


UNTRAINED = "of .* does not occur in split train"


@pytest.mark.parametrize(
    ("task", "splits", "says"),
    [
        # columns are missing
        (get_task("conll2003"), in_both({"tokens": ["a"], "tags": ["O"]}), "ner_tags. Task 'conll2003' needs tokens, ner_tags; the data has 'tokens', 'tags'"),
        (get_task("wmt16-en-ro"), in_both({"en": "red", "ro": "rot"}), "translation. Task 'wmt16-en-ro' needs translation; the data has 'en', 'ro'"),
        # labels do not fit the metric
        (custom(metric="f1"), in_both(*labelled("a", "b", "c")), "Metric f1 needs two classes, got 3 in column label .* --metric macro_f1"),
        (custom(), in_both(*labelled("a", "a")), "Column label of .* needs at least two classes, got a"),
        (custom(), in_both(*labelled(0.5, 1.5)), "Column label of .* needs at least two classes, got none: numbers are of --kind regression"),
        (custom(), in_both(*labelled(0.5, 1.0, 2.0)), r"Expected labels 1, 2 \(to predict numbers, use --kind regression\), got 0.5"),
        (custom(), in_both({"text": "a", "label": ["NN"]}, {"text": "a", "label": ["VB"]}), "needs at least two classes, got none: .* lists of labels of --kind tokens"),
        (custom(), in_both(*labelled({"x": 1}, {"x": 2})), "Column label of .* needs at least two classes, got none"),
        (custom(kind="tokens", metric="entity_f1"), in_both(*labelled(["NN"], ["VB"])), "Metric entity_f1 needs labels such as O, B-PER, I-PER, got 'NN'"),
        (custom(kind="tokens"), in_both(*labelled(["NN"], ["NN"])), "Column label of .* needs at least two classes, got NN"),
        # a class is not trained on
        (custom(), {"train": labelled(True, False), "validation": labelled(0, 1)}, f"^Label '0' .* of split validation {UNTRAINED}"),
        (custom(), {"train": labelled("x", "y"), "validation": labelled("x"), "test": labelled("x", "z")}, f"^Label 'z' .* of split test {UNTRAINED}"),
        (custom(kind="tokens"), {"train": labelled(["X", "Y"]), "validation": labelled(["Z"])}, f"^Label 'Z' in column label of split validation {UNTRAINED}"),
    ],
)  # fmt: skip
def test_splits_that_do_not_fit_the_task(tmp_path, task, splits, says):
    with pytest.raises(InputError, match=says):
        load_data(task, made.write_splits(tmp_path, **splits))


def test_a_class_that_the_data_names_may_be_absent_from_train(tmp_path):
    named = datasets.ClassLabel(names=["x", "y", "z"])
    tables = [datasets.Dataset.from_list(rows).cast_column("label", named) for rows in (labelled("x", "y"), labelled("z"))]  # fmt: skip
    folder = made.write_splits(tmp_path, train=tables[0], validation=tables[1])
    assert load_data(custom(), folder)[0].labels == ("x", "y", "z")


def test_a_number_that_no_class_has_is_refused_also_where_classes_are_renamed(tmp_path):
    rows = datasets.Dataset.from_list(
        [{"text": text, "label": label} for text, label in zip("abc", (0, 1, -1), strict=True)]
    )
    rows = rows.cast_column("label", datasets.ClassLabel(names=["x", "y"]))
    folder = made.write_splits(tmp_path, train=rows, validation=rows.select([0, 1]))
    task = custom()
    with pytest.raises(InputError, match=r"^Expected a class of x, y, got label -1 in row 3 of split train\.$"):
        load_data(task, folder, classes={"x": "bad"})
    with pytest.raises(InputError, match=r"got label -1 in row 3 of split train of"):
        load_data(task, folder)


def test_classes_are_matched_by_the_names_that_each_file_declares(tmp_path):
    names = {"train": ["no", "yes"], "validation": ["yes", "no", "maybe"]}
    tables = {
        split: datasets.Dataset.from_list(labelled("yes", "no")).cast_column("label", datasets.ClassLabel(names=each))
        for split, each in names.items()
    }
    task, splits = load_data(custom(), made.write_splits(tmp_path / "a", **tables))
    assert [list(splits[name]["label"]) for name in names] == [[1, 0], [0, 1]]
    assert [kind_class("classification")(task).gold(splits[name]) for name in names] == [[1, 0], [1, 0]]
    rows = datasets.Dataset.from_list(labelled("yes", "maybe"))
    tables["validation"] = rows.cast_column("label", datasets.ClassLabel(names=names["validation"]))
    folder = made.write_splits(tmp_path / "b", **tables)
    with pytest.raises(
        InputError, match=r"Expected labels 0 \(no\), 1 \(yes\), got 'maybe' in row 2 of split validation"
    ):
        load_data(custom(), folder)


def test_parts_of_a_split_that_declare_other_class_names_are_refused(tmp_path):
    rows = datasets.Dataset.from_list(labelled("yes", "no"))
    for part, names in (("a", ["no", "yes"]), ("b", ["yes", "no"])):
        rows.cast_column("label", datasets.ClassLabel(names=names)).to_parquet(tmp_path / f"train-{part}.parquet")
    rows.to_parquet(tmp_path / "validation.parquet")
    with pytest.raises(
        InputError,
        match=r"train-b.* as one table, their columns or types differ: .* the key label of features .* has unexpected type",
    ):
        load_data(custom(), tmp_path)


def test_tags_are_matched_by_the_names_that_each_file_declares_and_can_be_renamed(tmp_path):
    def tagged(names):
        rows = datasets.Dataset.from_list(labelled(["O", "B-X"], ["B-X", "O"]))
        feature = datasets.List(datasets.ClassLabel(names=names))
        return made.write_splits(tmp_path / names[0], validation=rows.cast_column("label", feature))

    task = replace(custom(kind="tokens"), labels=("B-X", "O"), evaluation_only=True)
    folder = tagged(["B-W", "O", "B-X"])
    assert kind_class("tokens")(task).gold(load_data(task, folder)[1]["validation"]) == [[1, 0], [0, 1]]
    task = replace(task, labels=("B-Y", "O"))
    with pytest.raises(InputError, match=r"Expected labels 0 \(B-Y\), 1 \(O\), got 'B-X' in row 1 of split validation"):
        load_data(task, folder)
    renamed = load_data(task, folder, classes={"B-X": "B-Y"})[1]["validation"]
    assert kind_class("tokens")(task).gold(renamed) == [[1, 0], [0, 1]]
    with pytest.raises(InputError, match=r"No row has the label 'B-Z' .*: column label has B-X, O\.$"):
        load_data(task, folder, classes={"B-Z": "B-Y"})


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_the_bad_label_of_a_column_is_the_one_that_is_named(tmp_path, suffix):
    good, bad = ([{"sentence": "red", "label": label} for label in labels] for labels in ("01", "0110?"))
    folder = made.write_splits(tmp_path / "cola", suffix, train=bad, validation=good)
    with pytest.raises(InputError, match=r"Expected labels 0 \(unacceptable\), .* got '\?' in row 5 of split train"):
        load_data(get_task("cola"), folder)
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in ("1.5", "2", "?")]
    folder = made.write_splits(tmp_path / "stsb", suffix, train=rows, validation=rows[:2])
    with pytest.raises(InputError, match=r"Expected finite numbers in column label, got '\?' in row 3 of split train"):
        load_data(get_task("stsb"), folder)


def test_labels_that_are_numbers_as_text(tmp_path):
    for name, rows in (("cola", COLA["train"]), ("stsb", SIMILAR), ("swag", made.make(made.endings, 4, 0))):
        text = [{**row, "label": str(row["label"])} for row in rows]
        splits = load_data(get_task(name), made.write_splits(tmp_path / name, train=text, validation=rows))[1]
        assert kind_class(get_task(name).kind)(get_task(name)).gold(splits["train"]) == [row["label"] for row in rows]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_columns_of_numbers_are_text_where_text_is_wanted(tmp_path, suffix):
    options = {"text_columns": "question", "label_column": "answer"}
    texts = {"question": ["007", "12"], "a": ["1", "NA"], "b": ["2.50", "-4"]}
    rows = datasets.Dataset.from_dict({**texts, "answer": ["0", "1"]}).to_list()
    folder = made.write_splits(tmp_path / "data", suffix, train=rows, validation=rows)
    custom = choose_task("custom", kind="multiple-choice", choice_columns="a,b", **options)
    train = load_data(custom, folder)[1]["train"]
    assert train[:] == {**texts, "answer": [0, 1]}
    train = load_data(choose_task("custom", kind="seq2seq", **options), folder)[1]["train"]
    assert list(train["answer"]) == ["0", "1"]


@pytest.mark.parametrize(("strange", "hint"), [("", r" \(remove rows without a label\)"), ("maybe", "")])
def test_only_a_row_without_label_is_to_be_removed(tmp_path, strange, hint):
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in ("0", strange, "")]
    folder = made.write_splits(tmp_path / "data", "csv", train=rows, validation=rows)
    with pytest.raises(InputError, match=rf"1 \(equivalent\){hint}, got '{strange}' in row 2"):
        load_data(get_task("mrpc"), folder)


def test_inputs_without_a_text_column_are_not_sent_where_they_come_from(tmp_path):
    made.write_rows(tmp_path / "test.csv", [{"hypothesis": "a", "id": "1"}])
    with pytest.raises(InputError, match=r"Missing columns .*: premise\..*; the data has 'hypothesis', 'id'\.$"):
        load_inputs(get_task("hans"), "test", tmp_path / "test.csv")
