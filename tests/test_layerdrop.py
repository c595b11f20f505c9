"""LayerDrop: whole blocks are skipped, and nothing else changes."""

import copy
import functools

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.injection import discover
from tests.helpers.cases import MODELS, model_case, output, refused
from tests.helpers.handwritten import Attention, fused, merge
from tests.helpers.models import encoder
from tests.helpers.passes import models, run, same, without_dropout

CROSS = [case for case in MODELS if "cross" in case.stacks]


class Skip(attnreg.MaskProvider):
    """Skips the blocks of some self-attentions, by their label."""

    def __init__(self, *labels):
        super().__init__()
        self.labels = labels

    def forward(self, site):
        return None

    def skips_block(self, site, draws):
        return torch.tensor(site.label in self.labels)


def self_attentions(case):
    return [f"{stack}.{i}" for stack, depth in case.stacks.items() for i in range(depth) if stack != "cross"]


def identity_of_hidden_states(block, *args, **kwargs):
    """A block that computes everything and then gives its first argument back: the slow truth."""
    out = type(block).forward(block, *args, **kwargs)
    hidden = args[0] + 0.0 * sum(parameter.sum() for parameter in block.parameters())
    return hidden if isinstance(out, torch.Tensor) else (hidden, *out[1:])


def layers_without(case, model, skipped):
    """Make the forward of some blocks the identity, by a count of their calls: ALBERT's shared one has two."""
    calls = iter(range(100))

    def forward(block, *args, **kwargs):
        run = identity_of_hidden_states if next(calls) in skipped else type(block).forward
        return run(block, *args, **kwargs)

    for block in case.blocks(model):
        block.forward = functools.partial(forward, block)


@models
def test_a_skipped_block_gives_back_what_it_was_given(case):
    labels = self_attentions(case)
    for skipped in ([len(labels) - 1], list(range(len(labels)))):
        model, batch = case.build(), case.batch()
        without_dropout(model)
        reference = copy.deepcopy(model)
        layers_without(case, reference, skipped)
        expected = run(reference, batch)
        with attnreg.attach(model, Skip(*[labels[i] for i in skipped])) as handle:
            got = run(model, batch)
            rates = handle.drop_rates()
        torch.testing.assert_close(got[0], expected[0])
        for ours, theirs in zip(got[1], expected[1], strict=True):
            assert ours is not None or theirs is None
            if ours is not None:
                torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)
        assert rates == {label: float(i in skipped) for i, label in enumerate(labels)}


@pytest.mark.parametrize("case", CROSS, ids=str)
def test_cross_attention_of_a_skipped_block_counts_as_dropped_where_it_was_chosen(case):
    model = case.build()
    with attnreg.attach(model, Skip("decoder.1"), stacks=list(case.stacks)) as handle:
        output(model, case.batch())
    assert {label for label, rate in handle.drop_rates().items() if rate} == {"decoder.1", "cross.1"}
    assert set(handle.drop_rates()) == {site.label for site in handle.sites}


@pytest.mark.parametrize("wraps_first", [True, False])
def test_a_shared_block_keeps_count_of_the_layers_that_were_skipped(wraps_first):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "embedding_size": 8, "num_hidden_layers": 5, "num_attention_heads": 2}
    config = hf.AlbertConfig(vocab_size=20, intermediate_size=16, **sizes)
    model = hf.AlbertModel(config).train()
    batch = {"input_ids": torch.arange(1, 7).view(2, 3)}
    group = model.encoder.albert_layer_groups[0]
    provider = Skip("encoder.1", "encoder.2") & attnreg.OnLayers(attnreg.AttentionDropout(0.9), [0, 3])
    with attnreg.attach(model, provider) as handle:
        expected = run(model, batch)
        rates = handle.drop_rates()
    if wraps_first:
        group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
    with attnreg.attach(model, provider) as handle:
        if not wraps_first:
            group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
        for _ in range(2):
            assert same(run(model, batch), expected)
            assert handle.drop_rates() == rates
    assert [label for label, rate in rates.items() if rate == 1] == ["encoder.1", "encoder.2"]
    assert [label for label, rate in rates.items() if 0 < rate < 1] == ["encoder.0", "encoder.3"]
    assert rates["encoder.4"] == 0


def to_itself_and_memory(a, x, memory):
    """Self- and cross-attention in one call of the module."""
    return fused(a, x, x) + fused(a, x, memory)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([SharingBlock(to_itself_and_memory)])

    def forward(self, x, memory):
        for _ in range(4):
            x = self.blocks[0](x, memory)
        return x


def test_a_shared_block_counts_one_call_for_two_attentions_of_a_module():
    torch.manual_seed(0)
    model = Recurrent().train()
    inputs = {"x": torch.randn(2, 5, 16), "memory": torch.randn(2, 3, 16)}
    provider = Skip("encoder.0", "encoder.2") & attnreg.OnLayers(attnreg.AttentionDropout(0.9), [1])
    with attnreg.attach(model, provider, example_inputs=inputs, stacks=["encoder", "cross"]) as handle:
        for _ in range(2):
            model(**inputs)
            rates = handle.drop_rates()
            for stack in ("encoder", "cross"):
                assert [rates[f"{stack}.{layer}"] for layer in (0, 2, 3)] == [1, 1, 0]
                assert 0 < rates[f"{stack}.1"] < 1


def rates_of(model, provider, **options):
    with attnreg.attach(model, provider, **options) as handle:
        model(torch.randn(2, 3, 8))
        return handle.drop_rates()


def test_layers_and_composition_are_those_of_every_provider():
    drop, first = attnreg.LayerDrop(1.0), attnreg.OnLayers(attnreg.LayerDrop(1.0), [0])
    none = dict.fromkeys([f"encoder.{i}" for i in range(3)], 0.0)
    all_skipped, only_first = dict.fromkeys(none, 1.0), {**none, "encoder.0": 1.0}
    assert rates_of(encoder(), drop) == all_skipped
    assert rates_of(encoder(), drop, layers=[-1]) == {"encoder.2": 1.0}
    assert rates_of(encoder(), first) == only_first
    assert rates_of(encoder(), attnreg.LayerDrop(0.0) & first) == only_first
    cross = attnreg.CrossTuning(drop)
    for epoch, rates in ((0, {}), (1, all_skipped)):
        cross.on_epoch(epoch)
        assert rates_of(encoder(), cross) == rates
    assert rates_of(encoder(), drop.eval() & attnreg.AttentionDropout(0.0)) == none


def test_a_single_block_may_be_the_model():
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train(), torch.randn(2, 3, 8)
    with attnreg.attach(model, attnreg.LayerDrop(1.0)):
        assert torch.equal(model(x), x)
        assert torch.equal(model(src=x), x)


def test_a_frozen_block_and_no_gradient():
    model, x = encoder(1), torch.randn(2, 3, 8)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with attnreg.attach(model, attnreg.LayerDrop(1.0)) as handle:
        assert torch.equal(model(x), x)
        assert not model(x).requires_grad
        with torch.no_grad():
            assert not torch.equal(model(x), x)
            with handle.probing():
                assert torch.equal(model(x), x)


def test_hidden_states_and_caches_can_still_be_asked_for():
    model = model_case("gpt2").build()
    model.set_attn_implementation("eager")
    ids = torch.arange(1, 9).view(2, 4)
    with attnreg.attach(model, Skip("decoder.0")):
        out = model(ids, output_hidden_states=True, output_attentions=True, use_cache=True)
        model.config.output_attentions = True
        assert len(model(ids).attentions) == 2
    assert len(out.hidden_states) == 3
    assert len(out.attentions) == 2
    assert torch.equal(out.hidden_states[0], out.hidden_states[1])


class Pairs(nn.Module):
    """A model that adds the residuals itself, so that none of its modules may be left out."""

    def __init__(self, wrap):
        super().__init__()
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList([wrap(attention)])

    def forward(self, x):
        for layer in self.layers:
            attention = layer[0] if isinstance(layer, nn.ModuleList) else layer
            x = x + attention(x, x, x)[0]
        return x.mean(1)


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: nn.ModuleList([a, nn.Linear(8, 8)])])
def test_a_model_without_blocks_is_refused_before_anything_changes(wrap):
    model, inputs = Pairs(wrap), (torch.zeros(1, 7, 8),)
    says = r"needs every self-attention to be inside a Transformer block, .*layers.0"
    for provider in (attnreg.LayerDrop(0.1), attnreg.AttentionDropout(0.1) & attnreg.LayerDrop(0.1)):
        with pytest.raises(ValueError, match=says):
            attnreg.attach(model, provider, example_inputs=inputs)
    assert not attnreg.is_attached(model)
    attnreg.attach(model, attnreg.AttentionDropout(0.1), example_inputs=inputs)


class Nested(nn.Module):
    """Stages of blocks, as in hierarchical models; the stages change the shape."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.stages = nn.ModuleList(nn.Sequential(copy.deepcopy(layer), nn.AvgPool1d(2)) for _ in range(2))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
            x = torch.cat([x, x], -1)
        return x


def test_the_block_is_found_within_stages_that_change_the_shape():
    model = Nested()
    sites = discover(model, (torch.zeros(1, 7, 8),)).sites
    assert [site.block.module for site in sites] == [stage[0] for stage in model.stages]


def sharing(a, x, shared):
    """The first block keeps its keys for later ones, which attend to these."""
    q, *kept = a.heads(x, x)
    k, v = shared.setdefault("keys", kept)
    return a.o(merge((q @ k.mT).softmax(-1) @ v))


class SharingBlock(nn.Module):
    def __init__(self, form=sharing):
        super().__init__()
        self.attention = Attention(form)

    def forward(self, x, shared):
        return x + self.attention(x, shared)


class Sharing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SharingBlock() for _ in range(3))

    def forward(self, x):
        shared = {}
        for block in self.blocks:
            x = block(x, shared)
        return x


def test_what_a_skipped_block_leaves_for_later_ones_is_computed():
    torch.manual_seed(0)
    model, x = Sharing().train(), torch.randn(2, 5, 16)
    with attnreg.attach(model, attnreg.LayerDrop(1.0), example_inputs=(x,)) as handle:
        assert torch.equal(model(x), x)
        assert handle.drop_rates() == {site.label: 1.0 for site in handle.sites}
    reference = copy.deepcopy(model)
    reference.blocks[0].forward = functools.partial(identity_of_hidden_states, reference.blocks[0])
    with attnreg.attach(model, Skip("encoder.0"), example_inputs=(x,)):
        assert same(run(model, {"x": x}), run(reference, {"x": x}))


class Wrong(Skip):
    def skips_block(self, site, draws):
        return torch.tensor([True])


test_what_skips_no_block_is_refused = refused(
    (lambda: rates_of(model_case("bart").build(), attnreg.LayerDrop(0.1), stacks=["cross"]), "but all sites are cross-attention"),
    (lambda: rates_of(encoder(), Wrong()), "`skips_block` of Wrong to return a 0-d bool"),
)  # fmt: skip


class Everything(attnreg.MaskProvider):
    """Holds another provider, and skips all blocks itself."""

    def __init__(self):
        super().__init__()
        self.provider = attnreg.AttentionDropout(0.1)

    def forward(self, site):
        return self.provider(site)

    def skips_block(self, site, draws):
        return torch.tensor(True)


def test_a_provider_that_holds_another_may_skip_blocks_itself():
    assert rates_of(encoder(2), attnreg.OnLayers(Everything(), [0, 1])) == {"encoder.0": 1.0, "encoder.1": 1.0}
