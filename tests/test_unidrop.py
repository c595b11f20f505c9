"""TokenDropout, UniDrop, and HiddenKey, which are the compositions that they are called."""

import pytest
import torch

import attnreg
from attnreg import AttentionDropout, DropKey, HiddenDropout, HiddenKey, LayerDrop, OnLayers, TokenDropout, UniDrop
from tests.helpers.cases import BERT
from tests.helpers.passes import run, same
from tests.helpers.reference import close

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


def test_padding_on_the_left_does_not_change_what_is_dropped():
    provider, keep = drawn()
    valid = torch.ones(2000, 1, 1, 23, dtype=torch.bool)
    valid[..., :3] = False
    for stack, queries in (("encoder", 23), ("cross", 7)):
        padded = attnreg.AttentionSite(shape=(2000, 4, queries, 23), valid=valid, stack=stack)
        assert torch.equal(provider(padded).scores[..., 3:], keep)


@pytest.mark.parametrize(("p", "keep_whole", "rate"), [(0.0, 0.0, 0.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)])
def test_the_ends_of_the_ranges(p, keep_whole, rate):
    _, keep = drawn(p, keep_whole)
    assert (~keep[..., 1:]).float().mean() == rate


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_schedule_over_depth_gives_each_layer_its_rates(kernel):
    model = BERT.build()
    model.set_attn_implementation(kernel)
    rates = {"p": [(0, 0.0), (1, 1.0)], "keep_whole": [(0, 1.0), (1, 0.0)]}
    provider = attnreg.Scheduled(TokenDropout(), over="depth", **rates)
    with attnreg.attach(model, provider) as handle:
        model(torch.ones(2, 6, dtype=torch.long))
    assert handle.drop_rates() == pytest.approx({"encoder.0": 0.0, "encoder.1": 5 / 6})


@pytest.mark.parametrize(
    ("provider", "parts", "of_states"),
    [
        (UniDrop(0.2, 0.4, 0.5, 0.3), AttentionDropout(0.2) & LayerDrop(0.4) & TokenDropout(0.5, keep_whole=0.3), []),
        (
            UniDrop(output=0.2),
            AttentionDropout(0.1) & LayerDrop(0.1) & TokenDropout(0.1, 0.5) & OnLayers(HiddenDropout(0.2), [-1]),
            ["encoder.1.output"],
        ),
        (
            HiddenKey(0.3),
            DropKey(0.3, share_queries=True) & HiddenDropout(0.3),
            ["encoder.0.output", "encoder.1.output"],
        ),
    ],
    ids=["UniDrop", "UniDrop of the output", "HiddenKey"],
)
def test_each_is_the_composition_of_its_parts(provider, parts, of_states):
    passes = []
    for each in (provider, parts):
        model = BERT.build()
        with attnreg.attach(model, each) as handle:
            passes.append([run(model, BERT.batch(), seed) for seed in range(5)])
        assert [site.label for site in handle.sites] == ["encoder.0", "encoder.1", *of_states]
    assert all(map(same, *passes))
