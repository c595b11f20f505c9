"""The report of a fit, made of an outcome that is changed by hand."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import attnreg
from attnreg.experiments.fit.choice import Estimate
from attnreg.experiments.fit.report import Report


@pytest.fixture(scope="module")
def fitted(tiny):
    """A classifier, its texts, and its labels as numbers."""
    nouns, verbs = ("boy", "girl", "boys", "girls"), ("sleeps", "sleep", "sees", "see", "laughs")
    texts = [f"the {noun} {verb}" + " sleeps" * times for noun in nouns for verb in verbs for times in range(3)]
    classifier = attnreg.TextClassifier(tiny, budget="1s").fit(texts, ["yes"] * 40 + ["no"] * 20)
    return classifier, texts, np.array([1] * 40 + [0] * 20)


@pytest.fixture
def report(fitted, tmp_path):
    classifier, texts, labels = copy.copy(fitted[0]), *fitted[1:]

    def make(metric="accuracy", **changes):
        classifier.outcome_ = replace(classifier.outcome_, **changes)
        classifier.answers_ = replace(classifier.answers_, metric=metric)
        return Report(classifier, SimpleNamespace(rows=SimpleNamespace(labels=labels, texts=texts)), tmp_path, "")

    return make


@pytest.mark.parametrize(("metric", "trivial"), [("accuracy", 40 / 60), ("macro_f1", 0.8 / 2)])
def test_a_score_no_higher_than_the_majority_class_is_told(metric, trivial, report):
    for score in (trivial - 0.1, trivial + 1e-15, trivial + 0.01):
        promise = report(metric, estimate=Estimate(score, 0.0, 1.0)).promise
        assert ("nothing was learned that this metric shows" in promise) == (score < trivial + 0.005)
        assert ("(for rare classes, use --metric macro_f1)" in promise) == (
            metric == "accuracy" and score < trivial + 0.005
        )


def test_classes_count_the_rows_that_were_scored(report):
    scored = report(rows=np.arange(10, 50), logits=np.zeros((40, 2)))
    assert [row[:2] for row in scored._classes().rows] == [["no", "10"], ["yes", "30"]]
