"""What a fit tries, trained on some rows, and how long that takes, with a tiny model."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from attnreg.experiments.fit.tries import Bench, Try
from attnreg.experiments.setup.batches import TrainBatches
from tests.helpers.bench import tiny_bench


@pytest.fixture
def bench(tiny):
    return tiny_bench(tiny)


@pytest.mark.parametrize("biased", [True, False])
def test_a_probe_as_a_model_says_what_its_regression_says(biased, bench):
    train, held = np.arange(0, 80), np.arange(80, 120)
    if not biased:  # as of a decoder
        bench.head.bias = None
    center, spread = bench.states[train].mean(0) * biased, bench.states[train].std(correction=0).item()
    for penalty in (0.1, 1.0):
        probe = LogisticRegression(C=penalty, max_iter=1000, fit_intercept=biased)
        probe.fit((bench.states[train] - center) / spread, bench.labels[train])
        expected = probe.decision_function((bench.states[held] - center) / spread)
        logits = bench.out_of_fold(Try(penalty=penalty), train, held, 0, lambda: None)
        network = bench.trained(Try(penalty=penalty), train, 0, lambda: None)
        for found in (logits, bench.logits(network, bench.rows.select(held))):
            np.testing.assert_allclose(np.diff(found)[:, 0], expected, atol=1e-2)


@pytest.mark.parametrize("biased", [True, False])
def test_outputs_are_rescaled_by_the_head(biased, bench):
    if not biased:
        bench.head.bias = None
    network, held = (
        bench.trained(Try(penalty=0.1), np.arange(0, 80), 0, lambda: None),
        bench.rows.select(range(80, 120)),
    )
    plain = bench.logits(network, held)
    bench.rescale(network, 0.5, 3.0 * biased)
    np.testing.assert_allclose(bench.logits(network, held), plain / 2 + 3.0 * biased, atol=1e-4)


@pytest.mark.parametrize(
    "more", [{}, {"fits_head": True}, {"contrasts": True}, {"ad_drop": True}, {"r_drop": True}], ids=str
)
def test_networks_train_in_bfloat16_and_are_in_float32(more, bench):
    which, train, held = Try(2, 1e-3, **more), np.arange(0, 80), np.arange(80, 120)
    exact = bench.out_of_fold(which, train, held, 0, lambda: None)
    bench.in_bfloat16 = True
    network = bench.trained(which, train, 0, lambda: None)
    assert {weight.dtype for weight in network.parameters()} == {torch.float32}
    assert "forward" not in vars(network)
    rounded = bench.logits(network, bench.rows.select(held))
    assert 1e-5 < np.abs(rounded - exact).max() < 0.2


@pytest.mark.parametrize(("times", "taken"), [(0.5, True), (0.95, False), (np.inf, False)])
def test_bfloat16_is_taken_where_it_is_faster(times, taken, bench, monkeypatch):
    monkeypatch.setattr(Bench, "seconds_with", lambda self, *given, **more: times if self.in_bfloat16 else 1.0)
    monkeypatch.setattr(Bench, "_seconds_of_product", lambda self, dtype: 1.0)
    bench.measure()
    assert (bench.in_bfloat16, bench.seconds) == (taken, times if taken else 1.0)


def test_bfloat16_is_not_tried_where_it_is_very_slow(bench, monkeypatch):
    monkeypatch.setattr(Bench, "seconds_with", lambda self, *given, **more: 0.1 if self.in_bfloat16 else 1.0)
    monkeypatch.setattr(Bench, "_seconds_of_product", lambda self, dtype: 1.0 if dtype == torch.float32 else 3.0)
    bench.measure()
    assert (bench.in_bfloat16, bench.seconds) == (False, 1.0)


def test_the_longest_texts_do_not_measure_the_time_of_all(bench):
    widths = [
        batch["input_ids"].shape[1] for batch in TrainBatches(bench.rows, 16, bench.kind, 0, bench.accelerator).epoch(0)
    ]
    assert [batch["input_ids"].shape[1] for batch in bench._measured_batches] == widths[1:]
    assert widths[0] == max(widths)
