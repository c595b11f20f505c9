"""Metrics of tasks against slow formulas."""

import math
import random
from collections import Counter

import evaluate
import numpy as np
import pytest

from attnreg.experiments.tasks import METRICS, get_task
from attnreg.experiments.tasks.kinds import kind_class
from tests.helpers.light import COMPUTED


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    """Metrics as they are, with the tables that ``evaluate`` makes."""
    monkeypatch.setattr(evaluate.EvaluationModule, "compute", COMPUTED[0])


def score(name, predictions, references):
    return METRICS[name](keep_in_memory=True).compute(predictions=predictions, references=references)[name]


def spans(tags):
    """The entities of a row, as CoNLL's script finds them: type, first and last word."""
    found, start, of = [], None, None
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if start is not None and (prefix != "I" or kind != of):
            found.append((of, start, place - 1))
            start = None
        if prefix != "O" and start is None:
            start, of = place, kind
    return found


def test_entity_f1_against_spans_matched_by_hand():
    rng = random.Random(0)
    tags = ["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    for _ in range(20):
        gold = [[rng.choice(tags) for _ in range(rng.randint(1, 7))] for _ in range(6)]
        given = [[tag if rng.random() < 0.7 else rng.choice(tags) for tag in row] for row in gold]
        ours, theirs = ({(i, *span) for i, row in enumerate(rows) for span in spans(row)} for rows in (given, gold))
        right = len(ours & theirs)
        expected = 2 * right / (len(ours) + len(theirs)) if ours or theirs else 0.0
        assert score("entity_f1", given, gold) == pytest.approx(expected)


def test_entity_f1_without_entities():
    assert score("entity_f1", [["O", "O"]], [["B-PER", "O"]]) == 0
    assert score("entity_f1", [["O"]], [["O"]]) == 0


def ranks(values):
    """Ranks, ties sharing their mean."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]


def test_correlations_against_numpy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=40), rng.integers(0, 5, 40).astype(float)
    assert score("pearson", a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert score("spearman", a, b) == pytest.approx(np.corrcoef(ranks(a), ranks(b))[0, 1])
    for name in ("pearson", "spearman"):
        assert score(name, [2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == 0
        assert score(name, [2.0], [1.0]) == 0


def bleu(predictions, references):
    """Papineni's formula, without smoothing, on words with spaces between them."""
    logs, long, short = 0.0, 0, 0
    for n in range(1, 5):
        right = total = 0
        for ours, theirs in zip(predictions, references, strict=True):
            a, b = (Counter(zip(*(row.split()[i:] for i in range(n)))) for row in (ours, theirs))  # noqa: B905
            right, total = right + sum((a & b).values()), total + sum(a.values())
        logs += math.log(right / total) / 4
    for ours, theirs in zip(predictions, references, strict=True):
        long, short = long + len(theirs.split()), short + len(ours.split())
    return 100 * min(1.0, math.exp(1 - long / short)) * math.exp(logs)


def test_bleu_against_its_formula():
    rng = random.Random(0)
    references = [" ".join(rng.choice("abcdefgh") for _ in range(rng.randint(8, 14))) for _ in range(30)]
    predictions = [" ".join(w if rng.random() < 0.85 else "x" for w in row.split()[:-1]) for row in references]
    assert score("bleu", predictions, references) == pytest.approx(bleu(predictions, references))
    assert score("bleu", references, references) == pytest.approx(100)


def test_f1_by_counting():
    rng = np.random.default_rng(0)
    labels, given = rng.integers(0, 2, (2, 50))
    right = int((labels & given).sum())
    assert score("f1", given, labels) == pytest.approx(2 * right / (labels.sum() + given.sum()))
    assert score("f1", [0, 0], [0, 0]) == 0
    labels, given = rng.integers(0, 3, (2, 50))
    each = [2 * ((labels == c) & (given == c)).sum() / ((labels == c).sum() + (given == c).sum()) for c in range(3)]
    assert score("macro_f1", given, labels) == pytest.approx(np.mean(each))


@pytest.mark.parametrize(
    ("name", "predictions", "references", "expected"),
    [
        ("accuracy", [1, 0, 1, 1], [1, 0, 0, 1], 3 / 4),
        ("matthews_correlation", [1, 0, 1, 1], [1, 0, 0, 1], 1 / math.sqrt(3)),  # 2 1 0 1: (2*1 - 1*0) / sqrt(3*2*1*2)
        ("exact_match", ["a b", "a"], ["a b", "A"], 1 / 2),
        ("answer_f1", ["the red house", "a"], ["house", "b"], 1 / 3),
    ],
)
def test_metrics_by_hand(name, predictions, references, expected):
    assert score(name, predictions, references) == pytest.approx(expected)


def test_metrics_need_no_folder_in_a_home(tmp_path, monkeypatch):
    (tmp_path / "home").touch()  # nothing can be written below it
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "home" / "cache"))
    kind = kind_class("classification")(get_task("cola"))
    assert kind.score([{"prediction": 1, "label": 1}, {"prediction": 0, "label": 0}]) == {
        "matthews_correlation": 1,
        "accuracy": 1,
    }
