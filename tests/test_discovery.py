"""What is found in models as people write them, and what it is taken for."""

import copy
import warnings

import pytest
import torch
from torch import nn

import attnreg
from attnreg.injection import CoverageWarning, NoAttentionError, discover
from tests import handwritten
from tests.handwritten import Layers
from tests.sweep.checks import CHECKS, Answer, attached
from tests.sweep.trace import no_trace


def ids(batch=2, length=7):
    return torch.randint(1, 20, (batch, length), generator=torch.Generator().manual_seed(0))


def layers(form, **options):
    torch.manual_seed(0)
    return Layers(form, **options).double()


INPUTS = {"input_ids": ids()}


def first(form, inputs=INPUTS):
    """The attention of the first layer."""
    found = discover(layers(form), inputs)
    return [site for site in found.sites if site.info.name.startswith("layers.0")], found


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
    assert site.info.shares_keys == (form is not handwritten.local)


FORMS = [
    *handwritten.SAME,
    *OTHERS,
    handwritten.pieces,
    handwritten.halves_of_values,
    handwritten.differential,
    handwritten.twice,
    handwritten.probabilities,
]


@pytest.mark.parametrize("check", [*CHECKS, "no trace"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_it_is_right(form, check):
    model, inputs = layers(form), {"input_ids": ids()}
    {**CHECKS, "no trace": no_trace}[check](model, inputs, {"example_inputs": inputs})


@pytest.mark.parametrize("form", [handwritten.differential, handwritten.twice], ids=lambda form: form.__name__)
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
        with pytest.raises(ValueError, match=r"needs all of an attention at once, and layers\.0 computes it in parts"):
            attnreg.attach(layers(form), provider, example_inputs=INPUTS)
        attnreg.attach(layers(form), provider, example_inputs=INPUTS, modules="layers.1").detach()


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


@pytest.mark.parametrize(
    "form", [handwritten.log_softmax, handwritten.sigmoid, handwritten.exp_over_sum], ids=lambda form: form.__name__
)
def test_attention_that_cannot_be_masked_is_said(form):
    with pytest.warns(CoverageWarning, match=r"Attention in 1 modules of Layers is not covered.*layers\.0"):
        handle = attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)
    assert [(each.name, each.is_attention) for each in handle.left_out] == [("layers.0", True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS, modules="layers.1")
    alone = layers(form)
    alone.layers[1] = nn.Identity()
    with pytest.raises(
        NoAttentionError, match=r"No attention that can be masked .* layers\.0 \(attention: its weights"
    ):
        attnreg.attach(alone, attnreg.AttentionDropout(0.1), example_inputs=INPUTS)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (handwritten.gate, "its scores are no products of queries and keys"),
        (handwritten.probabilities, "its scores are no products of queries and keys"),
    ],
    ids=["gate", "probabilities"],
)
def test_what_only_looks_like_attention_is_left_out_and_listed(form, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)
    assert [(each.name, each.reason, each.is_attention) for each in handle.left_out] == [("layers.0", reason, False)]


@pytest.mark.parametrize("form", [handwritten.pooling, handwritten.convolution], ids=lambda form: form.__name__)
def test_what_is_called_attention_and_is_none_is_said(form):
    with pytest.warns(CoverageWarning, match=r"layers\.0 \(softmax of 3 dimensions: its scores are no products"):
        attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)


@pytest.mark.parametrize("form", [handwritten.shuffled, handwritten.sorted_keys], ids=lambda form: form.__name__)
def test_queries_in_another_order_are_refused_in_all_modules_of_the_class(form):
    with pytest.raises(NoAttentionError, match=r"layers\.1 \(.*: its queries are in another order than its keys"):
        attnreg.attach(layers(form), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)


def test_a_softmax_over_queries_is_no_attention():
    with pytest.warns(CoverageWarning, match="its weights are not multiplied with values"):
        handle = attnreg.attach(layers(handwritten.slots), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)
    assert [site.name for site in handle.sites] == ["layers.1"]


def test_scores_that_are_used_beside_their_softmax_are_said():
    with pytest.warns(CoverageWarning, match=r"layers\.0 \(logsumexp: .* still counts what a mask drops"):
        handle = attnreg.attach(
            layers(handwritten.gated_by_scores), attnreg.AttentionDropout(0.1), example_inputs=INPUTS
        )
    assert [site.name for site in handle.sites] == ["layers.0", "layers.1"]


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
        with pytest.raises(NoAttentionError, match="attach with `example_inputs` as long as yours"):
            model(torch.randn(2, 8, 8))


class Scripted(nn.Module):
    """A model whose encoder computes attention in a compiled function, beside a decoder that does not."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(50, handwritten.C)
        self.encoder = nn.ModuleList([handwritten.Attention(handwritten.sigmoid) for _ in range(2)])
        self.decoder = nn.ModuleList([handwritten.Attention(handwritten.plain) for _ in range(2)])

    def forward(self, input_ids):
        x = self.embeddings(input_ids)
        for layer in (*self.encoder, *self.decoder):
            x = x + layer(x)
        return x


def test_a_whole_list_of_blocks_is_not_left_out_by_default():
    with pytest.raises(NoAttentionError, match=r"All of encoder would be left out, for example encoder\.0"):
        attnreg.attach(Scripted(), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)
    handle = attnreg.attach(Scripted(), attnreg.AttentionDropout(0.1), example_inputs=INPUTS, modules="decoder")
    assert [site.name for site in handle.sites] == ["decoder.0", "decoder.1"]


def test_modules_are_chosen_by_name_or_pattern():
    model = layers(handwritten.differential)
    for modules, names in [
        ("layers.0", ["layers.0", "layers.0@2"]),
        ("layers.*", ["layers.0", "layers.0@2", "layers.1"]),
        (["*.1"], ["layers.1"]),
        ("layers", ["layers.0", "layers.0@2", "layers.1"]),
    ]:
        with attnreg.attach(model, attnreg.AttentionDropout(0.1), modules=modules, example_inputs=INPUTS) as handle:
            assert [site.name for site in handle.sites] == names
            assert all(each.reason.startswith("it is not among") for each in handle.left_out)
    for modules, sentence in [
        ("blocks.*", r"No attention of the model is in modules called 'blocks\.\*'; there are layers\.0"),
        ([], "Expected `modules` to be a name or pattern"),
        ([1], "Expected `modules` to be a name or pattern"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            attnreg.attach(model, attnreg.AttentionDropout(0.1), modules=modules, example_inputs=INPUTS)


def test_modules_choose_cross_attention_too():
    inputs = {"input_ids": ids(), "context_ids": ids(2, 4)}
    model = layers(handwritten.plain)
    with attnreg.attach(model, attnreg.AttentionDropout(0.1), modules="layers", example_inputs=inputs) as handle:
        assert [site.label for site in handle.sites] == ["cross.0", "encoder.1"]
    with attnreg.attach(model, attnreg.AttentionDropout(0.1), example_inputs=inputs) as handle:
        assert [site.label for site in handle.sites] == ["encoder.1"]
        assert [str(each) for each in handle.left_out] == [
            "layers.0 (cross.0: it is not among the `stacks`, `layers` and `modules` that were asked for)"
        ]


class Hybrid(nn.Module):
    """Attention in every third block, as in models that are mostly recurrent."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [handwritten.Attention(handwritten.plain) if i % 3 == 2 else nn.Linear(16, 16) for i in range(6)]
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_layer_numbers_are_those_of_the_models_blocks():
    x = torch.randn(2, 5, 16)
    with attnreg.attach(Hybrid(), attnreg.AttentionDropout(0.1), example_inputs=(x,)) as handle:
        assert [(site.layer, site.num_layers) for site in handle.sites] == [(2, 6), (5, 6)]
    with attnreg.attach(Hybrid(), attnreg.AttentionDropout(0.1), layers=[-1], example_inputs=(x,)) as handle:
        assert [site.name for site in handle.sites] == ["blocks.5"]
    with pytest.raises(ValueError, match=r"Expected layers among \[2, 5\]"):
        attnreg.attach(Hybrid(), attnreg.AttentionDropout(0.1), layers=[1], example_inputs=(x,))


def test_one_sample_does_not_show_the_order_of_samples_and_heads():
    one = {"input_ids": ids(1)}
    model = Layers(handwritten.samples_times_heads)
    with pytest.raises(NoAttentionError, match=r"Samples and heads share a dimension at layers\.0.*two samples"):
        attnreg.attach(model, attnreg.AttentionDropout(0.1), example_inputs=one)
    for form in (handwritten.plain, handwritten.heads_after_queries, handwritten.fused):
        (site,), _ = first(form, one)
        assert site.layout.dims.replace("h", "").replace("b", "") == "qk"


class Mutable(nn.Module):
    """Changes itself in every way that a module can when it runs."""

    def __init__(self):
        super().__init__()
        self.attention = handwritten.Attention(handwritten.plain)
        self.register_buffer("running", torch.zeros(3))
        self.kind, self.calls, self.seen, self.table, self.names = "sparse", 0, [], {"a": [1]}, {"x"}
        self.plain_tensor = torch.zeros(2)
        self.settings = type("Settings", (), {})()
        self.settings.capacity = 1

    def forward(self, x):
        self.kind, self.calls = "full", self.calls + 1
        self.running += x.mean()
        self.plain_tensor.add_(1)
        self.seen.append(x.shape)
        self.table["a"].append(2)
        self.table["b"] = 1
        self.names.add("y")
        self.settings.capacity *= 2
        self.cache = x
        return self.attention(x)


def test_the_dry_run_leaves_no_trace():
    model, x = Mutable().double(), torch.randn(2, 5, 16).double()
    fired, given = [], x.clone()
    model.attention.register_forward_hook(lambda *args: fired.append("forward"))
    model.register_forward_pre_hook(lambda *args: fired.append("before"))
    before = copy.deepcopy({name: value for name, value in vars(model).items() if not name.startswith("_")})
    with attnreg.attach(model, attnreg.AttentionDropout(0.1), example_inputs=(x,)):
        assert fired == []
        for name, value in before.items():
            now = getattr(model, name)
            assert torch.equal(now, value) if isinstance(value, torch.Tensor) else name == "settings" or now == value
        assert model.settings.capacity == 1
        assert torch.equal(model.running, torch.zeros(3).double())
        assert not hasattr(model, "cache")
        assert torch.equal(x, given)
        model(x)
        assert fired == ["before", "forward"]


def test_a_model_that_overwrites_its_input_does_not_overwrite_the_examples():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = handwritten.Attention(handwritten.plain)

        def forward(self, x):
            return self.attention(x.mul_(2))

    x = torch.randn(2, 5, 16)
    before = x.clone()
    attnreg.attach(Overwriting(), attnreg.AttentionDropout(0.1), example_inputs=(x,))
    assert torch.equal(x, before)


class Counting(nn.Module):
    """Calls its attention as often as it is told."""

    def __init__(self):
        super().__init__()
        self.attention = handwritten.Attention(handwritten.plain)
        self.times = 1

    def forward(self, x):
        for _ in range(self.times):
            x = x + self.attention(x)
        return x


def test_more_attention_than_when_it_was_attached_is_an_error():
    model, x = Counting(), torch.randn(2, 5, 16)
    with attnreg.attach(model, attnreg.AttentionDropout(0.1), example_inputs=(x,)):
        model.times = 2
        with pytest.raises(NoAttentionError, match=r"attention is called more often in this forward pass .*\(1 times"):
            model(x)
    inside = nn.Sequential(handwritten.Attention(handwritten.plain))
    with attnreg.attach(inside, attnreg.AttentionDropout(0.1), example_inputs=(x,)):
        inside[0].form = handwritten.differential
        with pytest.raises(NoAttentionError, match=r"0 computes more attention in this forward pass"):
            inside(x)
        inside[0].form = handwritten.sigmoid
        with pytest.raises(NoAttentionError, match=r"0 hides its attention in this forward pass: 0 of 1"):
            inside(x)


def test_an_attention_inside_another_is_masked_once():
    class Around(nn.Module):
        """Computes attention itself, after a module in it has."""

        def __init__(self):
            super().__init__()
            self.inner, self.own = handwritten.Attention(handwritten.plain), handwritten.Attention(handwritten.plain)

        def forward(self, x):
            x = x + self.inner(x)
            q, k, v = self.own.heads(x, x)
            return handwritten.merge((q @ k.transpose(-1, -2)).softmax(-1) @ v)

    model, x = Around(), torch.randn(2, 5, 16)
    provider = Answer(lambda site: None)
    with attnreg.attach(model, provider, example_inputs=(x,)) as handle:
        assert [site.name for site in handle.sites] == ["inner", "Around"]
        model(x)
        assert [site.name for site in provider.asked] == ["inner", "Around"]
    provider.asked.clear()
    with attnreg.attach(model, provider, modules="Around", example_inputs=(x,)):
        model(x)
        assert [site.name for site in provider.asked] == ["Around"]
