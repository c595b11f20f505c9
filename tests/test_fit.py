"""`attnreg fit` and `predict`, and the classifier that they are made of, with a tiny model."""

import itertools
import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers as hf
from accelerate.state import PartialState
from datasets import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.fit import race
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.race import Race
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.fit.tries import Try
from attnreg.experiments.tasks.models.mean_layer import pool_mean, with_mean_layer
from tests.helpers.bench import sentences
from tests.helpers.cases import refused
from tests.helpers.commands import assert_sentence, invoke, ran, read_csv, write_csv


@pytest.fixture(scope="module")
def rows():
    """Sentences, and whether they begin with "the"."""
    texts = sentences(120)
    return texts, ["the" if text.split()[0] == "the" else "no" for text in texts]


@pytest.fixture(scope="module")
def fitted(tiny, rows, tmp_path_factory):
    """A command that has ended, in the folder that it was called in, with odd columns and rows."""
    place = tmp_path_factory.mktemp("my fit")
    texts, labels = rows
    lines = [
        [number, text, f" {label}" if number == 7 else label]
        for number, (text, label) in enumerate(zip(*rows, strict=True))
    ]
    lines[3][1], lines[4][1], lines[5][1] = "", 'the "boy" sleeps', " ".join(texts[:30])
    lines[7][2] = labels[7]
    lines[8][2] = ""
    write_csv(place / "my rows.csv", [["Nr.", "What, they said", "Begins?"], *lines])
    done = ran(invoke("fit", place / "my rows.csv", "--model", tiny, "--budget", "3s", "--output-dir", place / "out"))
    return place, done.output


def test_fit_makes_a_model_a_number_and_a_report(fitted):
    place, output = fitted
    assert "118 rows: texts in What, they said, labels in Begins?." in output
    assert "Left out, with no text: 1 (row 4)." in output
    assert "will score" in output
    assert f"New rows: attnreg predict '{place / 'out'}' FILE" in output
    assert "majority class" in (place / "out" / "report.md").read_text()
    assert "<html" in (place / "out" / "report.html").read_text()


def test_transformers_loads_the_model_alone(fitted, rows):
    place, _ = fitted
    folder, texts = place / "out" / "model", rows[0][:5]
    model, tokenizer = (
        each.from_pretrained(folder) for each in (hf.AutoModelForSequenceClassification, hf.AutoTokenizer)
    )
    logits = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    loaded = attnreg.TextClassifier.load(place / "out")
    np.testing.assert_allclose(loaded.predict_proba(texts), logits.softmax(-1).detach().numpy(), atol=1e-5)
    assert tokenizer.model_max_length == 64
    assert model.config.id2label == {0: "no", 1: "the"}


def test_probabilities_are_softened_by_the_temperature(tiny, rows, monkeypatch):
    logits = []
    for temperature in (1.0, 4.0):
        monkeypatch.setattr(race, "temperature_of", lambda *_, fixed=temperature: fixed)
        classifier = attnreg.TextClassifier(tiny, budget="1s").fit(*rows)
        assert classifier.best_.startswith("linear probe")
        logits.append(np.diff(np.log(classifier.predict_proba(rows[0][:5])))[:, 0])
    np.testing.assert_allclose(logits[1], logits[0] / 4, atol=1e-4)


def test_predict_writes_classes_probabilities_and_doubts(fitted, cli):
    place, _ = fitted
    texts = ["the boy sleeps", "", " ".join(["the boys sleep"] * 60), "qqq www zzz"]
    write_csv(place / "new.csv", [["What, they said", "other"], *([text, "x"] for text in texts)])
    output = ran(cli("predict", place / "out", place / "new.csv")).output
    assert "1 row: no text." in output
    made = read_csv(place / "new.predicted.csv")
    assert [row["cannot_judge"] for row in made] == [
        "",
        "no text",
        "cut at 64 tokens",
        "most of it is unknown to the tokenizer",
    ]
    assert all(row["prediction"] in ("no", "the") for row in made)
    for row in made:
        assert float(row["probability of no"]) + float(row["probability of the"]) == pytest.approx(1, abs=2e-4)
    assert made[0]["other"] == "x"


@pytest.mark.parametrize(
    ("table", "options", "says"),
    [
        ([["id", "n"], [1, 2]], [], "Which column holds the texts.*none of 'id', 'n' seems to"),
        (
            [["title", "body"], ["a b c", "d e f"]],
            [],
            "Which column holds the texts.*title, body could: use .* NAME, or --text-columns NAME,NAME for pairs",
        ),
        ([["text", "prediction"], ["a b c", "x"]], [], "have a column 'prediction', which the predictions would have"),
        ([["text"]], [], "has no rows"),
        ([["text"], ["a b c"]], ["--output", "rows.csv"], "would change .*rows.csv: choose another place"),
        ([["text"], ["a b c"]], ["--output", "no/such.csv"], "There is no folder no for such.csv"),
        ([["text"], ["a b c"]], ["--output", "new.xlsx"], "Expected --output to be a .csv or .jsonl file"),
        ([["text"], ["a b c"]], ["--text-columns", "txt"], "no column 'txt', only 'text'. Did you mean text"),
    ],
)
def test_rows_that_cannot_be_predicted(table, options, says, fitted, cli, tmp_path):
    write_csv(tmp_path / "rows.csv", table)
    result = cli("predict", fitted[0] / "out", tmp_path / "rows.csv", *options)
    assert_sentence(result, result.exit_code, says)
    assert result.exit_code
    assert not [*tmp_path.glob("*predicted*")]


def test_predict_keeps_empty_lines_of_a_single_column(fitted, cli, tmp_path):
    (tmp_path / "rows.v2.csv").write_text('text\nthe boy\n\n   \n""\nthe girl\n\n')
    output = ran(cli("predict", fitted[0] / "out", tmp_path / "rows.v2.csv")).output
    assert "Predictions of 5 rows" in output
    assert [row["cannot_judge"] for row in read_csv(tmp_path / "rows.v2.predicted.csv")] == ["", *["no text"] * 3, ""]


def test_predict_says_which_other_column_it_read(fitted, cli, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"n": 1, "text": null}\n{"n": 2, "text": "the boy"}\n')
    output = ran(cli("predict", fitted[0] / "out", tmp_path / "rows.jsonl")).output
    assert "Predictions of 2 rows, texts in text, saved to" in output
    assert "1 row: no text." in output


def test_a_read_only_folder_is_refused_before_predictions(fitted, cli, tmp_path, monkeypatch):
    write_csv(tmp_path / "rows.csv", [["text"], ["the boy"]])
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != (tmp_path, os.W_OK))  # root may do all
    result = cli("predict", fitted[0] / "out", tmp_path / "rows.csv")
    assert_sentence(result, 1, f"Cannot write to the folder {tmp_path}: choose another place with --output")


def test_predict_takes_the_present_folder(fitted, cli, tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    write_csv(tmp_path / "rows" / "test.csv", [["text"], ["the boy"]])
    monkeypatch.chdir(tmp_path / "rows")
    ran(cli("predict", fitted[0] / "out", "."))
    assert len(read_csv(tmp_path / "rows.predicted.csv")) == 1  # beside the folder
    monkeypatch.chdir(fitted[0] / "out")
    assert_sentence(cli("predict", "."), 1, r"out.predicted.csv would change \.: choose another place with --output")


def test_a_stopped_fit_goes_on_and_repeats_no_fold(fitted, tiny, cli):
    place, _ = fitted
    out, command = place / "out", ("fit", place / "my rows.csv", "--model", tiny, "--budget", "3s")
    assert "This fit has ended" in ran(cli(*command, "--output-dir", out)).output
    assert_sentence(cli("evaluate", out), 1, "Expected a run folder, got .*: use `attnreg predict`")
    assert "This fit has ended" in ran(cli(*command, "--output-dir", out, "--budget", "2s")).output
    (out / "result.json").unlink()
    files = sorted((out / "folds").glob("*.npz"))
    files.pop().unlink()
    before = {path: path.stat().st_mtime_ns for path in files}
    assert "will score" in ran(cli(*command, "--output-dir", out)).output
    assert before == {path: path.stat().st_mtime_ns for path in files}
    shutil.copytree(out, place / "unfinished", ignore=shutil.ignore_patterns("model", "result.json"))
    result = cli("predict", place / "unfinished", place / "my rows.csv")
    assert_sentence(result, 1, "unfinished has not finished: repeat its `attnreg fit` command to continue it")
    other = ran(cli(*command, "--output-dir", out, "--seed", 1)).output
    assert "holds a fit with other settings (seed)" in other
    assert (place / "out-2" / "model").is_dir()


def test_a_full_disk_stops_a_fit_with_a_sentence(tiny, rows, tmp_path, cli, monkeypatch):
    write_csv(tmp_path / "rows.csv", [["text", "label"], *zip(*rows, strict=True)])
    for error in (OSError("No space left on device"), SafetensorError("No space left on device")):
        monkeypatch.setattr(attnreg.TextClassifier, "save", Mock(side_effect=error))
        fit = cli("fit", tmp_path / "rows.csv", "--model", tiny, "--budget", "1s", "--output-dir", tmp_path / "out")
        assert (fit.exit_code, type(fit.exception)) == (1, SystemExit)
        assert "No space left on device. The same command continues the fit in" in fit.output


def test_a_classifier_in_the_way_of_scikit_learn(tiny, rows, monkeypatch):
    from sklearn.base import clone
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    texts, labels = np.array(rows[0]), np.array(rows[1]) == "the"
    classifier = attnreg.TextClassifier(tiny, budget="2s")
    assert clone(classifier).get_params() == classifier.get_params()
    scores = cross_val_score(make_pipeline(FunctionTransformer(), classifier), texts, labels, cv=2)
    assert scores.mean() > 0.5
    # The device of accelerate is that of the first training in the process.
    monkeypatch.setattr(PartialState, "__init__", None)
    classifier.fit(texts, labels)
    assert classifier.classes_.tolist() == [False, True]
    assert set(classifier.predict(texts[:4]).tolist()) <= {True, False}
    score, low, high = classifier.score_
    assert low <= score <= high
    again = pickle.loads(pickle.dumps(classifier))
    enable_progress_bars()  # as in a new process
    np.testing.assert_array_equal(again.predict_proba(texts[:4]), classifier.predict_proba(texts[:4]))
    assert are_progress_bars_disabled()


def test_a_folder_of_other_rows_or_of_another_model_is_refused(tiny, rows, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    classifier = attnreg.TextClassifier(model, budget="1s", folder=tmp_path / "out")
    classifier.fit(*rows)
    with pytest.raises(InputError, match=r"holds a fit with other settings \(rows\)"):
        classifier.fit(rows[0][:-1], rows[1][:-1])
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    with pytest.raises(InputError, match=r"holds a fit with other settings \(model files\)"):
        classifier.fit(*rows)


NEED_NO_ROWS = [
    "estimator_cloneable", "estimator_repr", "estimator_tags_renamed", "valid_tag_types", "mixin_order", "set_params",
    "no_attributes_set_in_init", "parameters_default_constructible", "get_params_invariance", "estimators_unfitted",
    "do_not_raise_errors_in_init_or_set_params",
]  # fmt: skip


@pytest.mark.parametrize("name", NEED_NO_ROWS)
def test_checks_of_scikit_learn_that_need_no_rows(name, tiny):
    # All others fit to numbers; `check_estimator` skips them for an estimator of texts, as for its own vectorizers.
    from sklearn.utils import estimator_checks

    if (check := getattr(estimator_checks, f"check_{name}", None)) is None:
        pytest.skip("this scikit-learn lacks the check")
    check("TextClassifier", attnreg.TextClassifier(tiny))


def test_pairs_of_texts(tiny, rows):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": rows[0], "b": rows[0][::-1]})
    classifier = attnreg.TextClassifier(tiny, budget="1s").fit(frame, rows[1])
    assert classifier.predict_proba(frame[:3]).shape == (3, 2)
    with pytest.raises(InputError, match="Expected 2 texts per row, got 1"):
        classifier.predict(["one"])


test_what_has_no_answer_is_refused = refused(
    (lambda: Rows.checked(["a", "b"], ["x", "x"]), "All 2 rows have the label x"),
    (lambda: Rows.checked([f"{n} a" for n in range(9)], ["x"] * 6 + ["y"] * 3), r"at least 4 rows that differ, but too few have y \(3\)"),
    (lambda: Rows.checked(["a b"] * 9, ["x"] * 5 + ["y"] * 4), r"too few have x \(1\), y \(1\)"),
    (lambda: Rows.checked(["a", 3], ["x", "y"]), "Expected texts, got 3 in row 1"),
    (lambda: Rows.checked(["a", "b"], [0.5, 1.5]), "numbers, such as 0.5, not classes"),
    (lambda: Rows.checked(["a", "b"], ["4", "3.5"]), "numbers, such as 3.5, not classes"),
    (lambda: Rows.checked(["a", "b"], [["x"], ["x", "y"]]), "Expected one label per row, got lists"),
    (lambda: Rows.checked("text", ["x"]), "Expected a list of texts"),
    (lambda: Rows.checked(["a", ("a", "b")], ["x", "y"]), "Expected one text or two per row, got 2"),
    error=InputError,
)  # fmt: skip


def test_folds_part_no_group_and_no_repeated_text():
    texts = [f"text {n % 37}" for n in range(120)]
    rows = Rows.checked(texts, [n % 37 % 2 for n in range(120)], [n % 37 // 3 for n in range(120)])
    for folds in rows.repeats(0):
        assert sorted(row for _, held in folds for row in held) == list(range(120))
        for train, held in folds:
            assert not {*rows.units[train]} & {*rows.units[held]}
            assert {*rows.labels[train]} == {0, 1}


def entrants(rows, budget, folder=None):
    return race_of(rows, budget, folder)._entrants(Try(penalty=0.1))


def race_of(rows, budget, folder=None):
    bench = SimpleNamespace(seconds=0.01, width=384, batch_size=16, slowness=lambda which: 1.0)
    return Race(bench, Rows.checked(*rows), Clock(budget, lambda text: None), 0, folder)


def test_a_larger_budget_plans_anew(rows, tmp_path):
    assert entrants(rows, 0.5, tmp_path) == []
    assert [each.epochs for each in entrants(rows, 35, tmp_path)] == [7, 7]
    contrastive, with_head, plain = entrants(rows, 1e5, tmp_path)
    assert (contrastive.epochs, with_head.epochs, plain.epochs) == (10, 10, 20)
    assert entrants(rows, 1e3, tmp_path) == [contrastive, with_head, plain]  # the same, also where less time is left
    (tmp_path / "plan").write_text("10 100 0")  # of a smaller budget on a faster machine
    assert [each.epochs for each in entrants(rows, 35, tmp_path)] == [10]
    (tmp_path / "plan").write_text("10 100")  # of an earlier version
    assert [each.epochs for each in entrants(rows, 35, tmp_path)] == [7, 7]
    paths = [race_of(rows, 35, tmp_path)._path(Try(4, penalty=c, fits_head=True), (0, 0)) for c in (0.1, 1.0)]
    assert len({*paths}) == 2  # another linear probe may lead then


def test_three_ways_enter_where_there_is_time_for_a_fold_of_all_and_another_of_one(rows, tmp_path):
    budget = next(each for each in range(10, 1000) if len(entrants(rows, each)) == 3)
    race = race_of(rows, budget, tmp_path)
    some, (first, second, *_) = race._entrants(Try(penalty=0.1)), race.all_folds
    assert race.is_time_for([*itertools.product(some, [first]), (some[1], second)])
    assert not race.is_time_for(itertools.product(some, [first, second]))
    race.clock.resume(budget / 2)
    race.done[some[1]] = {race.all_folds[0]: None}  # as in a fit that goes on
    assert race._entrants(Try(penalty=0.1)) == some[:2]


@pytest.mark.parametrize(("classes", "contrasts"), [(2, True), (8, True), (9, False)])
def test_states_are_contrasted_where_a_batch_has_pairs_of_all_classes(classes, contrasts):
    rows = [f"text {number}" for number in range(90)], [number % classes for number in range(90)]
    assert any(each.contrasts for each in entrants(rows, 1e5)) == contrasts


@pytest.mark.parametrize(("count", "epochs", "contrasted"), [
    (999, 400, [True, False, False]), (999, 4, [True]), (1000, 400, [False, False, True]), (1000, 4, [False]),
])  # fmt: skip
def test_contrasts_come_first_of_few_rows_and_last_of_many(count, epochs, contrasted):
    rows = [f"text {number}" for number in range(count)], [number % 2 for number in range(count)]
    assert [each.contrasts for each in entrants(rows, 0.01 * count * epochs)] == contrasted


@pytest.mark.parametrize(
    ("header", "options", "says"),
    [
        (["a", "b", "c"], [], "Which column holds the labels. Of the data's columns, b, c could: use --label-column"),
        (["a", "b", "c"], ["--label-column", "bb"], "there is no column 'bb', only 'a', 'b', 'c'. Did you mean b"),
        (["a", "b", "c"], ["--label-column", "c", "--text-columns", "c"], "cannot hold texts and labels"),
    ],
)
def test_columns_are_asked_for(header, options, says, cli, tiny, tmp_path, rows):
    lines = [[text, label, number % 3] for number, (text, label) in enumerate(zip(*rows, strict=True))]
    write_csv(tmp_path / "rows.csv", [header, *lines])
    assert_sentence(cli("fit", tmp_path / "rows.csv", "--model", tiny, *options), 2, says)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--budget", "soon"], "Expected a budget such as 15m"), (["--model", "nowhere"], "No model nowhere")],
)
def test_wrong_options_are_refused_in_a_sentence(options, says, cli, tiny, tmp_path, rows):
    lines = [json.dumps({"text": text, "label": label}) for text, label in zip(*rows, strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    result = cli("fit", tmp_path / "rows.jsonl", "--model", tiny, *options)
    assert result.exit_code != 0
    assert says in result.output


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
def test_a_further_layer_computes_the_mean(family):
    sizes = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = getattr(hf, f"{family}Config")(**sizes, pad_token_id=0, num_labels=3)
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForSequenceClassification")(config).eval()
    ids = torch.randint(2, 30, (3, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6])}
    states = model.base_model(**inputs).last_hidden_state
    means = torch.stack(
        [row[: int(length)].mean(0) for row, length in zip(states, inputs["attention_mask"].sum(1), strict=True)]
    )
    assert pool_mean(model)
    pooled = model.base_model(**inputs).last_hidden_state[:, 0]
    alike = torch.cosine_similarity(pooled, means - means.mean(1, keepdim=True))
    assert alike.min() > 0.999
    made = with_mean_layer(model)
    torch.testing.assert_close(made(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=1e-4)
    assert len(made.base_model.encoder.layer) == 3
    assert not made.base_model._forward_hooks
    assert not pool_mean(
        hf.DistilBertForSequenceClassification(hf.DistilBertConfig(n_layers=1, dim=8, n_heads=1, hidden_dim=8))
    )
