"""`attnreg fit` of labels that are numbers, and the regressor that it is made of, with a tiny model."""

import pickle

import numpy as np
import pytest
import transformers as hf
from scipy import stats
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.fit.answers import Answers, score_of
from attnreg.experiments.fit.choice import bias_corrected, widened
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.fit.table import choose_columns
from tests.helpers.bench import sentences
from tests.helpers.commands import assert_sentence, invoke, ran, read_csv, write_csv


@pytest.fixture(scope="module")
def rows():
    """Sentences, and a number that falls with their length."""
    texts = sentences(90)
    return texts, [round(140 - 3.7 * len(text.split()), 1) for text in texts]


@pytest.fixture(scope="module")
def fitted(tiny, rows, tmp_path_factory):
    """The folder in which a csv was fitted, and what the command said."""
    place = tmp_path_factory.mktemp("fitted")
    write_csv(place / "rows.csv", [["said", "how much"], *zip(*rows, strict=True), ["", 3.5], ["the boy", ""]])
    done = ran(invoke("fit", place / "rows.csv", "--model", tiny, "--budget", "2s", "--output-dir", place / "out"))
    return place, done.output


def test_numbers_with_fractions_are_predicted_as_numbers(fitted, rows, cli):
    place, output = fitted
    assert "90 rows: texts in said, numbers in how much." in output
    assert "of 1 in Pearson's correlation (95 % interval" in output
    assert "The mean of all labels scores 0.00" in output
    report = (place / "out" / "report.md").read_text()
    assert "A regressor of 90 rows" in report
    assert "They are off by" in report
    assert (place / "out" / "plots" / "predictions.png").is_file()
    write_csv(place / "new.csv", [["said"], *([text] for text in rows[0][:20]), [""]])
    ran(cli("predict", place / "out", place / "new.csv"))
    made = read_csv(place / "new.predicted.csv")
    assert [row["cannot_judge"] for row in made] == [""] * 20 + ["no text"]
    predicted = np.array([float(row["prediction"]) for row in made[:20]])
    assert abs(predicted.mean() - np.mean(rows[1])) < 3 * np.std(rows[1])  # of the data's size, not standardized
    model, tokenizer = (
        each.from_pretrained(place / "out" / "model")
        for each in (hf.AutoModelForSequenceClassification, hf.AutoTokenizer)
    )
    logits = model.eval()(**tokenizer(rows[0][:20], padding=True, return_tensors="pt")).logits
    np.testing.assert_allclose(predicted, logits[:, 0].detach().numpy(), rtol=1e-4)


def test_a_regressor_is_one_of_scikit_learn(tiny, rows, tmp_path):
    texts, numbers = rows
    regressor = attnreg.TextRegressor(tiny, budget="1s")
    assert regressor.get_params()["metric"] is None
    assert len(cross_val_score(clone(regressor), texts, numbers, cv=2)) == 2
    fitted = regressor.fit(texts, numbers)
    predicted = fitted.predict(texts)
    assert fitted.score(texts, numbers) == pytest.approx(
        1 - np.square(predicted - numbers).sum() / np.square(np.array(numbers) - np.mean(numbers)).sum()
    )
    np.testing.assert_allclose(pickle.loads(pickle.dumps(fitted)).predict(texts), predicted, rtol=1e-6)
    assert fitted.predict([]).shape == (0,)
    fitted.save(tmp_path / "model")
    loaded = attnreg.TextRegressor.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.predict(texts), predicted, rtol=1e-4)
    assert loaded.answers_.metric == "pearson"
    with pytest.raises(InputError, match="saved by TextRegressor, not TextClassifier"):
        attnreg.TextClassifier.load(tmp_path / "model")


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_correlations_are_those_of_scipy(metric):
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 9, 60).astype(float)
    predictions = labels + draw.normal(0, 3, 60).round()
    expected = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[metric](labels, predictions).statistic
    assert score_of(metric, labels, predictions, 1) == pytest.approx(expected)
    assert score_of(metric, labels, np.full(60, 0.1), 1) == 0


def test_the_best_of_many_correlations_is_flattered_and_the_estimate_is_not():
    answers, naive, corrected = Answers("pearson"), [], []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        labels = draw.normal(size=100)
        tries = 0.6 * labels + 0.8 * draw.normal(size=(15, 1, 100))  # a correlation of 0.6, all of them
        naive.append(max(answers(labels, each[0]) for each in tries))
        corrected.append(bias_corrected(answers, labels, tries, resamples=50, seed=seed)[0].score)
    assert np.mean(naive) > 0.65
    assert np.mean(corrected) == pytest.approx(0.6, abs=3 * np.std(corrected) / 20**0.5 + 0.01)


@pytest.mark.parametrize(("metric", "least"), [("accuracy", 0), ("pearson", -1)])
def test_an_interval_ends_where_scores_do(metric, least):
    answers, labels = Answers(metric, None if metric == "pearson" else np.arange(2)), np.arange(6) % 2
    for seed in range(10):
        tries = np.random.default_rng(seed).integers(0, 2, (4, 1, 6))
        estimate, _ = bias_corrected(answers, labels, tries, resamples=50, seed=seed)
        low, high = (estimate if metric == "pearson" else widened(estimate, 6))[1:]
        assert least <= low <= high <= 1


def test_an_interval_holds_its_estimate_where_few_samples_lie_far_below_it():
    labels = np.arange(40.0)

    def score(labels, predictions):  # of all samples but one of two hundred alike
        return -1.0 if labels.sum() == lowest else 0.9

    counts = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), 200)
    lowest = labels[counts[0] == 0].sum()
    estimate, _ = bias_corrected(score, labels, labels[None, None], resamples=200, seed=0)
    assert estimate.low <= estimate.score <= estimate.high


def test_no_fold_lacks_high_numbers():
    texts, numbers = [f"text {number}" for number in range(60)], np.arange(60) ** 2 / 7
    found = Rows.checked(texts, numbers, numbers=True)
    np.testing.assert_allclose(found.answers.real(found.labels), numbers, atol=1e-9)
    assert (found.labels.mean(), found.labels.std()) == pytest.approx((0, 1))
    for folds in found.repeats(0):
        for _, held in folds:
            assert held.min() < 10
            assert held.max() >= 50


@pytest.mark.parametrize(
    ("labels", "options", "says"),
    [
        ([0.5] * 30, [], "All 30 rows have the label 0.5: there is nothing to learn"),
        ([n / 4 for n in range(9)], [], "To learn numbers takes at least 20 rows that differ, got 9"),
        ([*range(29), "many"], ["--metric", "pearson"], "Expected numbers as labels, got 'many' in row 31"),
        ([n / 4 for n in range(30)], ["--metric", "accuracy"], "not classes: predict them as they are with --metric pearson"),
        ([*range(30)], ["--label-column", "is"], "all 30 rows have different labels"),
        ([n // 2 for n in range(30)], [], "or predict them as they are with --metric pearson"),
    ],
)  # fmt: skip
def test_numbers_from_which_nothing_can_be_learned(labels, options, says, cli, tiny, tmp_path):
    lines = [[f"this is text {number}", label] for number, label in enumerate(labels)]
    write_csv(tmp_path / "rows.csv", [["said", "is"], ["", labels[0]], *lines])  # the first row is left out, but counts
    assert_sentence(cli("fit", tmp_path / "rows.csv", "--model", tiny, *options), 1, says)


def test_classes_and_numbers_are_told_apart():
    texts = [f"this is text number {number}" for number in range(30)]
    columns = {"text": texts, "kind": [*"abc"] * 10, "price": [n / 7 for n in range(30)]}
    assert choose_columns(columns, None, None, None, "accuracy") == (["text"], "kind")
    assert choose_columns(columns, None, None, None, "pearson") == (["text"], "price")
    with pytest.raises(InputError, match="kind, price could: use --label-column"):
        choose_columns(columns, None, None, None)
