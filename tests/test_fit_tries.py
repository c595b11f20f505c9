"""What a fit tries, trained on some rows, and how long that takes, with a tiny model."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from sklearn.linear_model import LogisticRegression

import attnreg
from attnreg.errors import AttnRegWarning
from attnreg.experiments.fit import tries
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.tries import Bench, Try
from attnreg.experiments.setup.batches import TrainBatches
from tests.helpers.bench import bench_with, tiny_bench
from tests.sweep.zoo import configuration

SMALL = {"vocab_size": 500, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def bench_of(tiny, tmp_path):
    """A bench with a model of a configuration."""
    return lambda config: bench_with(config, tiny, tmp_path)


@pytest.mark.parametrize(
    "which",
    [Try(), *(Try(2, 1e-3, **more) for more in ({}, {"fits_head": True}, {"contrasts": True}, {"ad_drop": True}))],
    ids=str,
)
def test_a_decoder_is_trained_by_its_last_token(which, bench_of):
    bench = bench_of(hf.LlamaConfig(**SMALL))
    assert bench.ad_drop_layer == 0
    train, held = np.arange(0, 80), np.arange(80, 120)
    logits = bench.out_of_fold(which, train, held, 0, lambda: None)
    network = bench.trained(which, train, 0, lambda: None)
    for row in held[:5]:  # alone, without padding
        alone = bench.encoded[0].rows.select([int(row)])
        np.testing.assert_allclose(bench.logits(network, alone)[0], logits[row - 80], atol=1e-4)
    ids = torch.tensor([bench.encoded[0].rows[0]["input_ids"]])
    states = network.base_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(network.score.weight @ states[0, -1], network(input_ids=ids).logits[0])
    assert network.score.bias is None


def test_a_decoder_of_text_and_images_knows_the_padding(bench_of):
    bench = bench_of(configuration("qwen3_5"))
    assert bench.model.config.text_config.pad_token_id == bench.kind.tokenizer.pad_token_id == 0


def test_a_decoder_finds_the_padding_of_its_tokenizer(bench_of, tmp_path):
    config = bench_of(hf.LlamaConfig(**SMALL)).model.config
    config.pad_token_id = 7
    config.save_pretrained(tmp_path)
    assert tiny_bench(tmp_path).model.config.pad_token_id == 0


def test_ad_drop_masks_the_first_layer_that_has_attention(bench_of):
    bench = bench_of(configuration("qwen3_next"))  # whose other layers are recurrent
    assert bench.ad_drop_layer == 1
    logits = bench.out_of_fold(Try(2, 1e-3, ad_drop=True), np.arange(80), np.arange(80, 120), 0, lambda: None)
    assert np.isfinite(logits).all()


def test_ad_drop_is_not_tried_where_a_model_has_no_attention(bench_of):
    bench = bench_of(hf.FNetConfig(**{name: size for name, size in SMALL.items() if name != "num_attention_heads"}))
    with pytest.warns(
        AttnRegWarning,
        match=r"^AD-DROP is not tried: No attention that can be masked.* kernels such as flash attention\.$",
    ):
        assert bench.ad_drop_layer is None


def test_models_that_cannot_compute_in_bfloat16_do_not(bench_of, monkeypatch):
    bench = bench_of(hf.DebertaConfig(**SMALL))
    monkeypatch.setattr(tries, "times_float32", lambda dtype: 1.0)
    bench.measure()
    assert not bench.in_bfloat16
    assert np.isfinite(bench.out_of_fold(Try(1, 1e-3), np.arange(80), np.arange(80, 120), 0, lambda: None)).all()


@pytest.mark.parametrize("biased", [True, False])
def test_a_probe_as_a_model_says_what_its_regression_says(biased, bench):
    train, held = np.arange(0, 80), np.arange(80, 120)
    if not biased:  # as of a decoder
        bench.head.bias = None
    center, spread = (
        bench.encoded[0].states[train].mean(0) * biased,
        bench.encoded[0].states[train].std(correction=0).item(),
    )
    for penalty in (0.1, 1.0):
        probe = LogisticRegression(C=penalty, max_iter=1000, fit_intercept=biased)
        probe.fit((bench.encoded[0].states[train] - center) / spread, bench.labels[train])
        expected = probe.decision_function((bench.encoded[0].states[held] - center) / spread)
        logits = bench.out_of_fold(Try(penalty=penalty), train, held, 0, lambda: None)
        network = bench.trained(Try(penalty=penalty), train, 0, lambda: None)
        for found in (logits, bench.logits(network, bench.encoded[0].rows.select(held))):
            np.testing.assert_allclose(np.diff(found)[:, 0], expected, atol=1e-2)


def test_balanced_classes_weigh_as_if_rows_of_the_rarer_were_repeated(bench, monkeypatch):
    common, rare = (np.flatnonzero(bench.labels == label) for label in (0, 1))
    few, repeated = np.concatenate([common[:36], rare[:12]]), np.concatenate([common[:36], *[rare[:12]] * 3])
    bench.balanced, made = True, []
    monkeypatch.setattr("attnreg.experiments.fit.tries.FineTuning", lambda *args, **kwargs: made.append(kwargs))
    with pytest.raises(AttributeError):  # there is no method to train by
        bench.trained(Try(1, 1e-3), few, 0, lambda: None)
    logits, labels = torch.randn(48, 2), torch.arange(48) // 36
    loss = made[0]["loss_function"](SimpleNamespace(logits=logits), {"labels": labels})
    terms = [-logits[n].log_softmax(0)[labels[n]] for n in (*range(36), *[*range(36, 48)] * 3)]
    torch.testing.assert_close(loss, torch.stack(terms).mean())
    center, spread = bench.encoded[0].states[few].mean(0), bench.encoded[0].states[few].std(correction=0).item()
    probe = LogisticRegression(C=48 / 72, max_iter=1000)  # the sum of 72 losses, not of as much weight as 48 rows
    probe.fit((bench.encoded[0].states[repeated] - center) / spread, bench.labels[repeated])
    expected = probe.decision_function((bench.encoded[0].states[common[36:]] - center) / spread)
    logits = bench.out_of_fold(Try(penalty=1.0), few, common[36:], 0, lambda: None)
    np.testing.assert_allclose(np.diff(logits)[:, 0], expected, atol=1e-2)


@pytest.mark.parametrize(("metric", "balanced"), [("macro_f1", True), ("accuracy", False), (None, False)])
def test_only_macro_f1_balances_classes(metric, balanced, tiny, monkeypatch):
    races = []
    monkeypatch.setattr("attnreg.experiments.fit.race.Race.run", lambda race: races.append(race))  # returns no outcome
    with pytest.raises(AttributeError):
        attnreg.TextClassifier(tiny, metric=metric).fit([f"the boy {n}" for n in range(8)], [0, 1] * 4)
    assert [race.bench.balanced for race in races] == [balanced]


@pytest.mark.parametrize("biased", [True, False])
def test_outputs_are_rescaled_by_the_head(biased, bench):
    if not biased:
        bench.head.bias = None
    network, held = (
        bench.trained(Try(penalty=0.1), np.arange(0, 80), 0, lambda: None),
        bench.encoded[0].rows.select(range(80, 120)),
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
    rounded = bench.logits(network, bench.encoded[0].rows.select(held))
    assert 1e-5 < np.abs(rounded - exact).max() < 0.2


@pytest.mark.parametrize(
    ("times", "product", "taken"), [(0.5, 1.0, True), (0.95, 1.0, False), (np.inf, 1.0, False), (0.1, 3.0, False)]
)
def test_bfloat16_is_taken_where_it_is_faster(times, product, taken, bench, monkeypatch):
    """It is not tried where a product of matrices is very slow."""
    monkeypatch.setattr(Bench, "seconds_with", lambda self, *given, **more: times if self.in_bfloat16 else 1.0)
    monkeypatch.setattr(tries, "times_float32", lambda dtype: product)
    bench.measure()
    assert (bench.in_bfloat16, bench.seconds) == (taken, times if taken else 1.0)


def test_the_longest_texts_do_not_measure_the_time_of_all(bench):
    widths = [
        batch["input_ids"].shape[1]
        for batch in TrainBatches(bench.encoded[0].rows, 16, bench.kind, 0, bench.device).epoch(0)
    ]
    assert [batch["input_ids"].shape[1] for batch in bench._measured_batches] == widths[1:]
    assert widths[0] == max(widths)


def test_more_tokens_count_by_the_time_that_their_reading_takes(bench, monkeypatch):
    time = itertools.count()
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: float(next(time))))
    bench.encoded[256] = bench.encoded[0]._replace(seconds=3 * bench.encoded[0].seconds)
    assert [bench.slowness(Try(1, 1e-3, max_length=length)) for length in (0, 256)] == [1.0, pytest.approx(3.0)]
    for length, slowness in ((0, 1), (256, 3)):  # a training of one second
        bench.seconds = np.nan
        bench.trained(Try(1, 1e-3, max_length=length), np.arange(80), 0, lambda: None)
        assert bench.seconds == pytest.approx(1 / (80 * slowness))


def test_a_first_pass_which_takes_longer_is_not_measured(tiny, monkeypatch):
    sizes, inputs = [], Bench._head_inputs

    def watched(bench, network, rows, *given):
        sizes.append(len(rows))
        return inputs(bench, network, rows, *given)

    monkeypatch.setattr(Bench, "_head_inputs", watched)
    tiny_bench(tiny)
    assert sizes == [2, 120]


def test_the_probe_of_half_precision_draws_nothing():
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert tries.times_float32(torch.bfloat16) > 0
    assert torch.equal(torch.get_rng_state(), state)
