"""Fits train the embeddings of the tokens that their rows have, as training of the whole model would."""

import pickle

import numpy as np
import pytest
import torch
import transformers as hf

import attnreg
from attnreg.experiments.fit.tries import Bench, Try
from attnreg.experiments.fit.used_tokens import UsedTokens
from tests.helpers.bench import bench_with

SIZES = {"vocab_size": 700, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
CONFIGURATIONS = {
    "BERT": lambda: hf.BertConfig(**SIZES),
    "a decoder": lambda: hf.LlamaConfig(**SIZES),
    "scaled embeddings": lambda: hf.GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=4),
    "positions from ids": lambda: hf.RobertaConfig(**SIZES),
}


def weights_of(network):
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}


@pytest.fixture(params=CONFIGURATIONS)
def bench(request, tiny, tmp_path):
    return bench_with(CONFIGURATIONS[request.param](), tiny, tmp_path)


@pytest.mark.parametrize("more", [{}, {"contrasts": True}, {"fits_head": True, "ad_drop": True}], ids=str)
def test_training_is_that_of_the_whole_model(bench, more):
    which, rows, before = Try(2, 1e-3, **more), np.arange(80), weights_of(bench.tokens.model)
    small = bench.trained(which, rows, 0, lambda: None)
    found = weights_of(bench.tokens.whole(small))
    name = next(name for name, weight in bench.tokens.model.named_parameters() if len(weight) == SIZES["vocab_size"])
    used = sorted({0, *(token for row in bench.encoded[0].rows["input_ids"] for token in row)})  # 0 is padding
    assert len(small.get_parameter(name)) == len(used) < SIZES["vocab_size"] / 2
    heads = {module: name for name, module in bench.model.named_modules()}
    bench.model, bench.head = bench.tokens.model, bench.tokens.model.get_submodule(heads[bench.head])
    expected = weights_of(bench.trained(which, rows, 0, lambda: None))
    others = np.setdiff1d(np.arange(SIZES["vocab_size"]), used)
    assert found.keys() == expected.keys()
    assert found[name][others].equal(before[name][others])
    for key, weight in expected.items():
        seen = used if key == name else slice(None)
        torch.testing.assert_close(found[key][seen], weight[seen], atol=1e-5, rtol=1e-4)
    assert not found[name][used].equal(before[name][used])
    assert all(weight.equal(before[key]) for key, weight in weights_of(bench.tokens.model).items())


def test_the_whole_network_predicts_as_the_small_one(bench):
    """Also after more tokens were read, as in a fit that lacks the memory to read all of the longer texts."""
    small = bench.trained(Try(1, 1e-3), np.arange(80), 0, lambda: None)
    with bench.tokens.watched():
        bench.tokens.model(input_ids=torch.tensor([[600, 601]]))
    rows = bench.encoded[0].rows
    np.testing.assert_array_equal(bench.logits(bench.tokens.whole(small), rows), bench.logits(small, rows))


def test_more_tokens_of_longer_texts_are_added(bench):
    count = len(bench.model.get_input_embeddings().weight)
    bench.texts = bench.texts.map(lambda row: {**row, "text": f"{row['text']} {' '.join('abcdefg')}"})
    assert bench.read_longer(64)
    weight = bench.model.get_input_embeddings().weight
    assert len(weight) > count
    assert bench.head in {*bench.model.modules()}
    logits = bench.out_of_fold(Try(1, 1e-3, max_length=64), np.arange(80), np.arange(80, 120), 0, lambda: None)
    assert np.isfinite(logits).all()


def test_other_processes_get_the_small_model_alone(bench):
    again: Bench = pickle.loads(pickle.dumps(bench))
    assert again.tokens is None
    which = Try(1, 1e-3), np.arange(80), np.arange(80, 120), 0, lambda: None
    np.testing.assert_array_equal(again.out_of_fold(*which), bench.out_of_fold(*which))


def test_masks_are_attached_to_a_model_of_few_tokens():
    """Whose dry run reads other tokens."""
    model = hf.BertForSequenceClassification(hf.BertConfig(**SIZES))
    tokens = UsedTokens(model, padding=0)
    with tokens.watched():
        model(torch.tensor([[600, 601]]))
    small = tokens.small().train()
    assert len(small.get_input_embeddings().weight) == 3
    with attnreg.attach(small, attnreg.DropKey(0.5)) as handle:
        small(torch.tensor([[600, 601]]))
        assert len(handle.sites) == 2


@pytest.mark.parametrize(
    "made",
    [
        lambda: hf.T5ForSequenceClassification(hf.T5Config(vocab_size=90, d_model=8, d_kv=4, d_ff=8, num_layers=1)),
        lambda: torch.nn.Linear(2, 2),
        lambda: hf.CanineForSequenceClassification(
            hf.CanineConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        ),
    ],
    ids=["embeddings of two modules", "no transformers model", "no embedding of tokens"],
)
def test_a_model_is_left_whole_if_its_embeddings_are_not_of_one_module(made):
    model = made()
    tokens = UsedTokens(model, padding=0)
    with tokens.watched():
        pass
    assert tokens.small() is model
    assert tokens.whole(model) is model
