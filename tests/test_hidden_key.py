"""HiddenKey and UniDrop's output dropout are the compositions that they are called."""

import torch

import attnreg
from tests.cases import MODELS
from tests.test_contract import run, same

BERT = MODELS[0]


def both(provider, other):
    results = []
    for each in (provider, other):
        model = BERT.build()
        with attnreg.attach(model, each) as handle:
            results.append((run(model, BERT.batch()), [site.label for site in handle.sites]))
    return results


def test_hidden_key_is_drop_key_and_hidden_dropout():
    got, expected = both(attnreg.HiddenKey(0.3), attnreg.DropKey(0.3, share_queries=True) & attnreg.HiddenDropout(0.3))
    assert same(got[0], expected[0])
    assert got[1] == expected[1] == ["encoder.0", "encoder.1", "encoder.0.output", "encoder.1.output"]


def test_the_output_of_unidrop_is_that_of_the_last_block():
    parts = attnreg.AttentionDropout(0.1) & attnreg.LayerDrop(0.1) & attnreg.TokenDropout(0.1, 0.5)
    torch.manual_seed(0)
    got, expected = both(attnreg.UniDrop(output=0.2), parts & attnreg.OnLayers(attnreg.HiddenDropout(0.2), [-1]))
    assert same(got[0], expected[0])
    assert got[1] == ["encoder.0", "encoder.1", "encoder.1.output"]
