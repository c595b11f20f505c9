"""What is found in models as people write them, and what it is taken for."""

import itertools
import warnings

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.attribution import METHODS, explain
from attnreg.injection import CoverageWarning, NoAttentionError, discover
from tests.helpers import handwritten
from tests.helpers.cases import sample
from tests.helpers.handwritten import INPUTS, first, ids, layers
from tests.sweep.checks import CHECKS, attached
from tests.sweep.trace import no_trace


@pytest.mark.parametrize("form", handwritten.SAME, ids=lambda form: form.__name__)
def test_one_mathematics_in_many_layouts(form):
    (site,), found = first(form)
    assert site.layout.dims == handwritten.SAME[form]
    assert (site.info.stack, site.info.heads, site.info.layer, site.info.num_layers) == ("encoder", 4, 0, 2)
    assert found.left_out == ()
    keep = torch.rand(3, 4, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    outputs = []
    for each in (form, handwritten.plain):
        model = layers(each)
        with attached(model, lambda site: attnreg.Mask(scores=keep), {"example_inputs": INPUTS}) as (handle, provider):
            outputs.append(model(ids(3, 5)))
            assert {site.shape for site in provider.asked} == {(3, 4, 5, 5)}
            assert handle.drop_rates()["encoder.0"] == pytest.approx(1 - float(keep.float().mean()), abs=1e-6)
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12


@pytest.mark.filterwarnings("ignore::attnreg.injection.CoverageWarning")
def test_weights_are_contiguous_as_softmax_gives_them():
    model, inputs = layers(handwritten.windows_of_heads).train(), {"input_ids": ids(2, 6)}
    plain = model(**inputs)
    for mask in (
        attnreg.Mask(weights=torch.ones(1, 4, 1, 1).double()),
        attnreg.Mask(normalized=torch.ones(1, 4, 1, 1)),
    ):
        with attached(model, lambda site, mask=mask: mask, {"example_inputs": inputs}):
            assert (model(**inputs) - plain).abs().max() < 1e-12


OTHERS = {
    # form: dimensions, stack, sinks, heads
    handwritten.sink_after: ("bhqk", "encoder", (0, 1), 4),
    handwritten.sink_before: ("bhqk", "encoder", (1, 0), 4),
    handwritten.memory: ("bhqk", "encoder", (2, 0), 4),
    handwritten.gate: ("bhqk", "encoder", (0, 1), 4),
    handwritten.talking_heads: ("bhqk", "encoder", (0, 0), 4),
    handwritten.bias_in_two_parts: ("bhqk", "encoder", (0, 0), 4),
    handwritten.additive: ("bqk", "encoder", (0, 0), 1),
    handwritten.pooled_queries: ("bhqk", "encoder", (0, 0), 4),
    handwritten.windows: ("bhqk", "encoder", (0, 0), 4),
    handwritten.local: ("bbh1k", "encoder", (0, 0), 4),
    handwritten.padded: ("bhqk", "encoder", (0, 0), 4),
    handwritten.blocks: ("bhqk", "encoder", (0, 0), 4),
    handwritten.learned_queries: ("bhqk", "cross", (0, 0), 4),
}


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.__name__)
def test_attention_that_is_not_square(form):
    (site,), _ = first(form)
    dims, stack, sinks, heads = OTHERS[form]
    assert site.layout.dims == dims
    assert (site.layout.sinks_before, site.layout.sinks_after) == sinks
    assert (site.info.stack, site.info.heads) == (stack, heads)
    assert site.info.shares_keys == (form not in (handwritten.local, handwritten.blocks))


FORMS = [*handwritten.SAME, *OTHERS, handwritten.pieces, handwritten.halves_of_values, handwritten.differential, handwritten.twice, handwritten.joined, handwritten.averaged, handwritten.probabilities]  # fmt: skip


USUAL = ("dropped key", "nothing leaks", "no trace")


@pytest.mark.parametrize(
    ("form", "check"),
    sample(itertools.product(FORMS, [*CHECKS, "no trace"]), lambda form, check: check in USUAL or form in FORMS[:2]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_it_is_right(form, check):
    model, inputs = layers(form), {"input_ids": ids()}
    {**CHECKS, "no trace": no_trace}[check](model, inputs, {"example_inputs": inputs})


@pytest.mark.parametrize("form", [handwritten.differential, handwritten.twice, handwritten.joined, handwritten.averaged], ids=lambda form: form.__name__)  # fmt: skip
def test_two_attentions_in_one_forward_are_two_sites(form):
    sites, _ = first(form)
    assert [site.info.name for site in sites] == ["layers.0", "layers.0@2"]
    with attached(layers(form), lambda site: None, {"example_inputs": INPUTS}) as (handle, _):
        assert [site.label for site in handle.sites] == ["encoder.0", "encoder.1", "encoder.2"]


def test_attention_in_parts_is_one_site():
    keep = torch.rand(5, 4, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.5
    outputs, rates = [], []
    for form in (handwritten.fused, handwritten.pieces, handwritten.halves_of_values):
        masks = iter(keep.split(1) if form is handwritten.pieces else [keep])

        def answer(site, masks=masks):
            return attnreg.Mask(scores=next(masks)) if site.layer == 0 else None

        model = layers(form)
        with attached(model, answer, {"example_inputs": INPUTS}) as (handle, _):
            outputs.append(model(ids(5)))  # another number of parts than in the dry run
            rates.append(handle.drop_rates()["encoder.0"])
            assert handle.sites[0].in_parts == (form != handwritten.fused)
            assert len(handle.sites) == 2
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12
    assert (outputs[0] - outputs[2]).abs().max() < 1e-12
    assert rates == pytest.approx([1 - float(keep.float().mean())] * 3, abs=1e-6)


@pytest.mark.parametrize("form", [handwritten.pieces, handwritten.halves_of_values], ids=lambda form: form.__name__)
def test_what_needs_an_attention_at_once_is_refused_where_it_is_in_parts(form):
    for provider in (attnreg.AttributionProvider(), attnreg.HeadMask(1, by="importance"), attnreg.TokenDropout(0.1)):
        with pytest.raises(ValueError, match=r"needs the whole attention at once, but layers\.0 computes it in parts"):
            attnreg.attach(layers(form), provider, example_inputs=INPUTS)
        attnreg.attach(layers(form), provider, example_inputs=INPUTS, modules="layers.1").detach()
    model = layers(form)
    with attnreg.attach(model, attnreg.DropKey(0.1), example_inputs=INPUTS) as handle:
        for method in METHODS:
            with pytest.raises(ValueError, match=r"layers\.0 computes its attention in parts .* so it has no one A"):
                explain(model, INPUTS, handle, ["encoder.0"], method=method)


def test_cross_attention_is_known_though_the_lengths_are_the_same():
    inputs = {"input_ids": ids(), "context_ids": ids().flip(0)}
    for form in (handwritten.plain, handwritten.fused, handwritten.additive, handwritten.time_first):
        (site,), _ = first(form, inputs)
        assert site.info.stack == "cross"
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, position = torch.randn(2, 5, 8), torch.randn(1, 5, 8)

    class Positions(nn.Module):
        def __init__(self, position):
            super().__init__()
            self.attention, self.position = attention, nn.Parameter(position)

        def forward(self, x):
            return self.attention(x + self.position, x + self.position, x)[0]

    assert [site.info.stack for site in discover(Positions(position), (x,)).sites] == ["encoder"]
    assert [site.info.stack for site in discover(attention, (x, x, x)).sites] == ["encoder"]
    assert [site.info.stack for site in discover(attention, (x, x.clone(), x)).sites] == ["cross"]


@pytest.mark.parametrize("form", [handwritten.log_softmax, handwritten.sigmoid, handwritten.exp_over_sum], ids=lambda form: form.__name__)  # fmt: skip
def test_attention_that_cannot_be_masked_is_said_unless_others_are_chosen(form):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS, modules="layers.1")
    alone = layers(form)
    alone.layers[1] = nn.Identity()
    with pytest.raises(
        NoAttentionError, match=r"No attention that can be masked .* layers\.0 \(attention: its weights"
    ):
        attnreg.attach(alone, attnreg.AttentionDropout(0.1), example_inputs=INPUTS)


@pytest.mark.parametrize("form", [handwritten.gate, handwritten.probabilities], ids=lambda form: form.__name__)
def test_what_only_looks_like_attention_is_left_out_and_listed(form):
    reason = "its scores are not products of queries and keys"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)
    assert [(each.name, each.reason, each.is_attention) for each in handle.left_out] == [("layers.0", reason, False)]


@pytest.mark.parametrize("form", [handwritten.shuffled, handwritten.sorted_keys], ids=lambda form: form.__name__)
def test_queries_in_another_order_are_refused_in_all_modules_of_the_class(form):
    with pytest.raises(NoAttentionError, match=r"layers\.1 \(.*: its queries are ordered differently from its keys"):
        attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)


UNMASKED = r"Attention is not masked in 1 module\(s\) of Layers: layers\.0"
SAID = {
    # what the warning says, and the sites
    handwritten.log_softmax: (UNMASKED, ["layers.1"]),
    handwritten.sigmoid: (UNMASKED, ["layers.1"]),
    handwritten.exp_over_sum: (UNMASKED, ["layers.1"]),
    handwritten.pooling: (r"layers\.0 \(softmax of 3 dimensions: its scores are not products", ["layers.1"]),
    handwritten.convolution: (r"layers\.0 \(softmax of 3 dimensions: its scores are not products", ["layers.1"]),
    handwritten.slots: ("its weights are not multiplied by values", ["layers.1"]),
    handwritten.gated_by_scores: (
        r"layers\.0 \(logsumexp: .* still counts dropped positions",
        ["layers.0", "layers.1"],
    ),
}


@pytest.mark.parametrize("form", SAID, ids=lambda form: form.__name__)
def test_attention_that_is_not_wholly_masked_is_said(form):
    sentence, sites = SAID[form]
    with pytest.warns(CoverageWarning, match=sentence):
        handle = attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)
    assert [site.name for site in handle.sites] == sites
    assert [(each.name, each.is_attention) for each in handle.left_out] == [("layers.0", True)]


@pytest.mark.parametrize("form", [handwritten.convolution, handwritten.sigmoid], ids=lambda form: form.__name__)
def test_what_comes_after_other_products_is_known_for_what_it_is(form):
    model = layers(form)
    model.layers.append(handwritten.Attention(handwritten.gate).double())
    plain_forward = type(model).forward

    def forward(input_ids):
        return model.layers[2](plain_forward(model, input_ids))

    model.forward = forward
    found = discover(model, INPUTS)
    assert [(site.info.name, site.layout.dims) for site in found.sites] == [("layers.1", "bhqk"), ("layers.2", "bhqk")]
    assert [each.name for each in found.left_out if each.seen == "softmax of 4 dimensions"] == ["layers.2"]


@torch.library.custom_op("attnreg_tests::experts", mutates_args=())
def experts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear map that torch has no name for, as kernels of experts are."""
    return x @ weight


class OverDepth(nn.Module):
    """Attention residuals: each token asks, by learned queries, its own states of earlier layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, handwritten.C)
        self.queries = nn.ParameterList(torch.randn(n, handwritten.C) for n in (1, 3))
        self.weight = nn.Parameter(torch.randn(handwritten.C, handwritten.C))
        self.attention = handwritten.Attention(handwritten.plain)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        states = torch.stack([x, 2 * x], 2)
        for queries in self.queries:
            asked = queries.expand(*states.shape[:2], -1, -1) @ states.transpose(-1, -2)
            y = experts((asked.softmax(-1) @ states).sum(2), self.weight)
            states = torch.stack([x, x + y], 2)
        return self.attention(states.sum(2))


def test_attention_of_a_token_over_its_own_states_is_left_out():
    found = discover(OverDepth(), INPUTS)
    assert [site.info.name for site in found.sites] == ["attention"]
    assert {each.reason for each in found.left_out} == {"its scores are not products of queries and keys"}


class Windows(nn.Module):
    """Swin's first stage: pieces of an image in windows, heads in a dimension of their own."""

    def __init__(self):
        super().__init__()
        self.pieces = nn.Conv2d(3, handwritten.C, 4, 4)
        self.attention = handwritten.Attention(handwritten.plain)

    def forward(self, pixel_values):
        x = self.pieces(pixel_values)
        windows = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 4, 5, 1)
        return self.attention(windows.reshape(-1, 4, handwritten.C))


def test_windows_of_an_image_are_no_heads():
    (site,) = discover(Windows(), {"pixel_values": torch.randn(2, 3, 32, 32)}).sites
    assert (site.layout.dims, site.info.heads, site.info.stack) == ("bhqk", 4, "encoder")


def test_a_dimension_of_one_entry_is_not_guessed():
    class Staged(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):  # (B, N, C), in blocks of four
            q, k, v = (
                f(x).unflatten(1, (-1, 4)).unflatten(-1, (2, 4)).permute(0, 3, 1, 2, 4)
                for f in (self.q, self.k, self.v)
            )
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    model = Staged()
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=(torch.randn(2, 8, 8),)) as handle:
        model(torch.randn(2, 4, 8))
        assert handle.drop_rates()
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=(torch.randn(2, 4, 8),)):
        model(torch.randn(2, 4, 8))
        with pytest.raises(NoAttentionError, match="Attach with `example_inputs` as long as your inputs"):
            model(torch.randn(2, 8, 8))


def test_latent_vectors_that_ask_are_no_tokens():
    class Latents(attnreg.MaskProvider):
        def forward(self, site):
            seen.append(site.queries)

    seen = []
    config = hf.PerceiverConfig(num_latents=5, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=1,
                                num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=20,
                                max_position_embeddings=8)  # fmt: skip
    model = hf.PerceiverForMaskedLM(config)
    inputs = {"inputs": torch.ones(3, 5, dtype=torch.long), "attention_mask": (torch.arange(5) < 2).int().repeat(3, 1)}
    with attnreg.attach(model, Latents(), stacks=["cross"], example_inputs=inputs):
        model.train()
        model(**inputs)
    assert seen
    assert all(each is None for each in seen)
