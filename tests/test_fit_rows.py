"""The rows of a fit: labels, groups and frames as Python users have them, and the folds of odd data."""

import json
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import ParameterGrid

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.fit.race import Race
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.tasks import get_task, load_data


def texts(count):
    return [f"this is text {number}" for number in range(count)]


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, ""])
def test_a_missing_label_or_group_is_told_whatever_it_is(missing):
    labels = ["a", "b"] * 6
    for given in ([*labels, missing], pd.Series([*labels, missing], dtype="string")):
        with pytest.raises(InputError, match="Row 12 has no label: leave it out"):
            Rows.checked(texts(13), given)
    with pytest.raises(InputError, match="Row 12 has no group: give it one of its own"):
        Rows.checked(texts(13), [*labels, "a"], [*labels, missing])


@pytest.mark.parametrize("made", [np.array, pd.Series])
def test_labels_of_numpy_among_objects_are_saved(made):
    labels = made([np.int64(number % 2) for number in range(12)], dtype=object)
    rows = Rows.checked(texts(12), labels)
    assert json.dumps(rows.answers.classes.tolist()) == "[0, 1]"
    assert all(isinstance(label, np.int64) for label in labels)  # those that were given are as before
    rows.content()


# Of objects, and of numpy's dates, whose `tolist` are whole numbers.
@pytest.mark.parametrize("made", [list, pd.Series])
def test_dates_are_no_classes_since_a_saved_model_could_not_give_them(made):
    labels = made([pd.Timestamp(year=2020 + number % 2, month=1, day=1) for number in range(12)])
    with pytest.raises(InputError, match=r"texts or numbers, got .*2020-01-01.*: give their texts, `str\(label\)`"):
        Rows.checked(texts(12), labels)
    assert len(Rows.checked(texts(12), [*map(str, labels)])) == 12


def test_a_single_text_in_an_array_is_no_list():
    with pytest.raises(InputError, match="Expected a list of texts or of pairs of texts, got a ndarray"):
        Rows.checked(np.array("text"), ["x"])


def test_as_many_folds_as_groups():
    rows = Rows.checked(texts(80), [number % 2 for number in range(80)], [f"author {n // 2 % 4}" for n in range(80)])
    for folds in rows.repeats(0):
        assert len(folds) == 4
        assert all(len({*rows.units[held].tolist()}) == 1 for _, held in folds)


@pytest.mark.parametrize(("metric", "scored"), [("accuracy", 2000), ("macro_f1", 2400)])
def test_macro_f1_scores_all_rows_of_rare_classes(metric, scored):
    labels = np.where(np.arange(12_000) < 60, 2, np.arange(12_000) % 2)
    (folds,) = Rows.checked(texts(12_000), labels, metric=metric).repeats(0)
    assert {len(held) for _, held in folds} == {scored}
    if metric == "macro_f1":
        assert [int((labels[held] == 2).sum()) for _, held in folds] == [12] * 5


def test_columns_of_a_frame_are_read_by_name(tiny):
    sentences = load_data(get_task("agreement"))[1]["train"]["sentence"][:80]
    frame = pd.DataFrame({"q": sentences[:40], "a": sentences[40:]})
    fitted = attnreg.TextClassifier(tiny, budget="1s").fit(frame[["q", "a"]], ["x", "y"] * 20)
    assert fitted.columns_ == ["q", "a"]
    expected = fitted.predict_proba(frame[["q", "a"]])
    np.testing.assert_array_equal(fitted.predict_proba(frame[["a", "q"]]), expected)
    np.testing.assert_array_equal(fitted.predict_proba(frame.assign(more=1)), expected)
    swapped = [*zip(frame["a"], frame["q"], strict=True)]
    assert not np.array_equal(fitted.predict_proba(swapped), expected)
    fitted.columns_ = ["q", "q"]  # as after a fit to such a frame
    twice = fitted.predict_proba(frame.set_axis(["q", "q"], axis=1))  # by position, as no name tells them apart
    np.testing.assert_array_equal(twice, expected)


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(InputError, match=r"^There is no folder .*nope\.$"):
        attnreg.TextClassifier.load(tmp_path / "nope")


def test_seed_and_length_may_be_numbers_of_numpy(tiny, tmp_path):
    rows = [
        f"the {noun} {verb}" for noun in ("boy", "girl", "boys", "girls") for verb in ("sleeps", "sleep", "sees", "see")
    ]
    grid = ParameterGrid({"seed": np.arange(3, 4), "max_length": np.arange(8, 9)})  # as GridSearchCV sets it
    (fitted,) = (
        attnreg.TextClassifier(tiny, budget="1s", folder=tmp_path, **each).fit(rows, [0, 1] * 8) for each in grid
    )
    assert fitted.predict(rows[:2]).shape == (2,)
    with pytest.raises(InputError, match="Expected 1 text per row, got 2"):
        fitted.predict([("a", "b")])
    fitted.save(tmp_path / "model")
    for wrong, says in {"seed": -1, "max_length": 2}.items():
        with pytest.raises(InputError, match=f"Expected `{wrong}` to be at least .*, got {says}"):
            attnreg.TextClassifier(tiny, **{wrong: says}).fit(rows, [0, 1] * 8)


def test_a_fit_that_is_stopped_leaves_no_model_that_predicts(tiny, monkeypatch):
    sentences = [f"the {noun} sleeps" for noun in ("boy", "girl", "boys", "girls", "cat", "dog", "cats", "dogs")]
    classifier = attnreg.TextClassifier(tiny, budget="1s")
    classifier.network_ = "of an earlier fit"
    monkeypatch.setattr(Race, "run", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        classifier.fit(sentences, [0, 1] * 4)
    with pytest.raises(NotFittedError):
        classifier.predict(sentences)


def test_an_adapter_is_refused_since_a_fit_trains_whole_models(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base", "peft_type": "LORA"}')
    with pytest.raises(InputError, match=r"Expected the folder of a whole model, got an adapter in .*: merge it"):
        attnreg.TextClassifier(tmp_path).fit(texts(8), [0, 1] * 4)


def test_other_files_are_not_replaced_by_a_model(tmp_path):
    classifier = attnreg.TextClassifier()
    classifier.network_ = "any"
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for folder in (tmp_path, notes):
        with pytest.raises(InputError, match="holds other files than a model of a fit: save into another folder"):
            classifier.save(folder)
    assert notes.read_text() == "mine"


def test_of_many_rows_some_are_scored():
    rows = Rows.checked([f"text {number}" for number in range(12_000)], [number % 2 for number in range(12_000)])
    (folds,) = rows.repeats(0)
    assert [(len(train), len({*held} - {*train})) for train, held in folds] == [(9600, 2000)] * 5
