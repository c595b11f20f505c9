"""What a dry run leaves out, how it is chosen from and numbered, and that it leaves no trace."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.errors import AttnRegWarning
from attnreg.injection import NoAttentionError
from tests.helpers import handwritten
from tests.helpers.cases import NO_DROPOUT, SMALL, TEXT
from tests.helpers.handwritten import INPUTS, Layers, first, ids, layers
from tests.sweep.checks import Answer


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
    with pytest.raises(NoAttentionError, match=r"All attention in encoder would be left out, for example encoder\.0"):
        attnreg.attach(Scripted(), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)
    handle = attnreg.attach(Scripted(), attnreg.AttentionDropout(0.1), example_inputs=INPUTS, modules="decoder")
    assert [site.name for site in handle.sites] == ["decoder.0", "decoder.1"]


class WithTower(Scripted):
    """A model of texts and images, whose tower for images no text runs."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList()
        self.tower = nn.ModuleList([handwritten.Attention(handwritten.plain) for _ in range(2)])


def test_what_the_example_inputs_do_not_run_is_warned_of():
    with pytest.warns(attnreg.injection.CoverageWarning, match=r"tower.0 .*: it did not run.*To mask what did"):
        handle = attnreg.attach(WithTower(), attnreg.AttentionDropout(0.1), example_inputs=INPUTS)
    assert [site.name for site in handle.sites] == ["decoder.0", "decoder.1"]
    assert [omission.name for omission in handle.left_out] == ["tower.0", "tower.1"]


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
            assert all(each.reason.startswith("it is not selected") for each in handle.left_out)
    for modules, sentence in [
        ("blocks.*", r"No attention is in modules that match 'blocks\.\*'\. Modules with attention: layers\.0"),
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
            "layers.0 (cross.0: it is not selected by `stacks`, `layers` or `modules`)"
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


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class OfHeads(nn.ModuleList):
    def forward(self, x):
        return x + torch.cat([head(x) for head in self], -1)


def test_heads_that_are_modules_count_as_layers_which_is_warned_of():
    model = nn.Sequential(*(OfHeads([Head(), Head()]) for _ in range(2)))
    options = {"provider": attnreg.DropKey(0.1), "example_inputs": (torch.randn(2, 5, 16),)}
    with pytest.warns(AttnRegWarning, match=r"^In Sequential, 0\.0 and 0\.1 are heads .* each counts as a layer"):
        handle = attnreg.attach(model, **options)
    assert [site.label for site in handle.sites] == [f"encoder.{i}" for i in range(4)]
    handle.detach()
    handle = attnreg.attach(model, **options, modules="0.*")  # without a warning, which would be an error here
    assert [site.name for site in handle.sites] == ["0.0", "0.1"]


def test_one_sample_does_not_show_the_order_of_samples_and_heads():
    one = {"input_ids": ids(1)}
    model = Layers(handwritten.samples_times_heads)
    with pytest.raises(NoAttentionError, match=r"Samples and heads share a dimension at layers\.0.*two samples"):
        attnreg.attach(model, attnreg.AttentionDropout(0.1), example_inputs=one)
    for form in (handwritten.plain, handwritten.heads_after_queries, handwritten.fused):
        (site,), _ = first(form, one)
        assert site.layout.dims.replace("h", "").replace("b", "") == "qk"


class Mutable(nn.Module):
    """Changes itself, and its inputs, in every way that a module can when it runs."""

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
        return self.attention(x.mul_(2))


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
        with pytest.raises(
            NoAttentionError, match=r"attention is called more often in this forward pass .*\(calls then: 1\)"
        ):
            model(x)
    inside = nn.Sequential(handwritten.Attention(handwritten.plain))
    with attnreg.attach(inside, attnreg.AttentionDropout(0.1), example_inputs=(x,)):
        inside[0].form = handwritten.differential
        with pytest.raises(NoAttentionError, match=r"0 computes more attention in this forward pass"):
            inside(x)
        inside[0].form = handwritten.sigmoid
        with pytest.raises(NoAttentionError, match=r"0 computes less attention in this forward pass than when"):
            inside(x)


class TwoInOneCall(nn.Module):
    """Attends to an image, if there is one, and then to itself, in one forward of its own."""

    def forward(self, x, image=None):
        for memory in (image, x):
            if memory is not None:
                q, k, v = (part[:, None] for part in (x, memory, memory))
                x = x + nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]
        return x


class OneModuleTwice(nn.Module):
    """Attends by one module to an image, if there is one, and then to itself."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(handwritten.C, 2, batch_first=True)

    def forward(self, x, image=None):
        for memory in (image, x):
            if memory is not None:
                x = x + self.attention(x, memory, memory, need_weights=False)[0]
        return x


@pytest.mark.parametrize("stacks", [["cross"], ["encoder"], None])
@pytest.mark.parametrize("make", [TwoInOneCall, OneModuleTwice])
def test_an_attention_does_not_get_the_mask_of_one_that_is_skipped(make, stacks):
    model, x, image = make().train(), torch.randn(2, 5, handwritten.C), torch.randn(2, 7, handwritten.C)
    x.requires_grad_()
    inputs = {"x": x, "image": image}
    with attnreg.attach(model, attnreg.DropKey(0.5), stacks=stacks, example_inputs=inputs) as handle:
        model(x, image)
        assert handle.drop_rates()
        with pytest.raises(NoAttentionError, match=r"computes less attention|is called 1 times"):
            model(x)
        with torch.no_grad():
            model(x)


def test_a_shared_block_that_is_called_less_often_is_refused_if_few_of_its_calls_are_chosen():
    model = hf.AlbertModel(hf.AlbertConfig(**{**TEXT, **SMALL, **NO_DROPOUT, "num_hidden_layers": 3})).train()
    attnreg.attach(model, attnreg.HiddenDropout(0.5), layers=[-1])
    model(input_ids=ids())
    model.encoder.config.num_hidden_layers = 2
    with pytest.raises(NoAttentionError, match=r"is called 2 times .* 3 times when"):
        model(input_ids=ids())


def test_a_block_that_runs_less_often_is_masked_unless_its_calls_differ():
    x = torch.randn(2, 5, 16)
    for chosen in (None, [-1]):
        model = Counting().train()
        model.times = 3
        with attnreg.attach(model, attnreg.DropKey(0.5), layers=chosen, example_inputs=(x,)) as handle:
            model.times = 2
            if chosen is None:
                model(x)
                assert list(handle.drop_rates()) == ["encoder.0", "encoder.1"]
            else:
                with pytest.raises(NoAttentionError, match=r"attention is called 2 times .* 3 times when"):
                    model(x)


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
