"""TokenDropout, UniDrop, and HiddenKey, which are the compositions that they are called."""

import pytest
import torch
import transformers as hf

import attnreg
from tests.cases import BERT
from tests.reference import close
from tests.test_contract import run, same

SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
SITE = attnreg.AttentionSite(shape=(2000, 4, 20, 20))


def drawn(p=0.3, keep_whole=0.4, site=SITE, seed=0):
    torch.manual_seed(seed)
    provider = attnreg.TokenDropout(p, keep_whole)
    provider.prepare({})
    return provider, provider(site).scores


def test_a_sequence_is_whole_or_loses_tokens_at_their_rate():
    _, keep = drawn()
    assert keep.shape == (2000, 1, 1, 20)
    keep = keep[:, 0, 0]
    assert keep[:, 0].all()
    whole = keep.all(-1)
    # One that is not to be kept whole may lose nothing all the same.
    assert close(whole.float().mean(), 0.4 + 0.6 * 0.7**19, 2000)
    rate = (~keep[:, 1:]).float().mean()
    assert abs(float(rate) - 0.6 * 0.3) < 0.02
    assert abs(float((~keep[~whole, 1:]).float().mean()) - 0.3 / (1 - 0.7**19)) < 0.02


def test_all_layers_drop_the_same_tokens_and_another_pass_others():
    provider, keep = drawn()
    for layer in range(3):
        again = attnreg.AttentionSite(shape=SITE.shape, layer=layer, num_layers=3)
        assert torch.equal(provider(again).scores, keep)
    cross = attnreg.AttentionSite(shape=(2000, 4, 7, 20), stack="cross")
    assert torch.equal(provider(cross).scores, keep)
    decoder = attnreg.AttentionSite(shape=SITE.shape, stack="decoder")
    assert not torch.equal(provider(decoder).scores, keep)
    provider.prepare({})
    assert not torch.equal(provider(SITE).scores, keep)
    assert torch.equal(drawn()[1], keep)


@pytest.mark.parametrize(("p", "keep_whole", "rate"), [(0.0, 0.0, 0.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)])
def test_the_ends_of_the_ranges(p, keep_whole, rate):
    _, keep = drawn(p, keep_whole)
    assert (~keep[..., 1:]).float().mean() == rate


class Recorder(attnreg.TokenDropout):
    def __init__(self):
        super().__init__(0.5, 0.0)
        self.masks = []

    def forward(self, site):
        self.masks.append(super().forward(site).scores[:, 0, 0])
        return attnreg.Mask(scores=self.masks[-1][:, None, None])


def test_the_first_tokens_state_does_not_depend_on_a_dropped_token():
    torch.manual_seed(0)
    config = hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, provider = hf.BertModel(config, add_pooling_layer=False).double().train(), Recorder()
    ids = torch.arange(1, 13).view(2, 6)
    with attnreg.attach(model, provider):
        torch.manual_seed(2)
        state = model(ids).last_hidden_state
        keep = provider.masks[0]
        assert 0 < (~keep).sum() < keep.numel()
        torch.manual_seed(2)
        other = model(torch.where(keep, ids, 29)).last_hidden_state
    # Nor does that of any other token that was kept.
    torch.testing.assert_close(state[keep], other[keep], rtol=0, atol=1e-12)
    assert not torch.allclose(state[~keep], other[~keep])


def test_unidrop_is_the_composition_of_its_parts():
    torch.manual_seed(0)
    config = hf.BertConfig(**SIZES)
    model, ids = hf.BertModel(config).train(), torch.arange(1, 13).view(2, 6)
    parts = attnreg.AttentionDropout(0.2) & attnreg.LayerDrop(0.4) & attnreg.TokenDropout(0.5, keep_whole=0.3)
    states = []
    for provider in (attnreg.UniDrop(0.2, 0.4, 0.5, 0.3), parts):
        for seed in range(5):
            with attnreg.attach(model, provider):
                torch.manual_seed(seed)
                states.append(model(ids).last_hidden_state)
    assert all(torch.equal(a, b) for a, b in zip(states[:5], states[5:], strict=True))


def test_unidrop_in_eval_mode_does_nothing():
    provider = attnreg.UniDrop(1.0, 1.0, 1.0, 0.0).eval()
    assert provider(SITE) is None
    assert provider.skip_at(SITE, SITE.draws) is None


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
