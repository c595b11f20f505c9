"""Hidden-state sites: what providers see there, and what their answers do."""

import copy

import pytest
import torch
import transformers as hf
from packaging.version import Version
from torch import nn

import attnreg
from attnreg.errors import AttnRegWarning
from tests.helpers.cases import BERT, TRANSFORMERS, model_case, output
from tests.helpers.handwritten import Attention, fused
from tests.helpers.passes import models, run, same, without_dropout
from tests.helpers.regularizers import Scale

BLOCKS = ["embeddings", "input", "output"]


def blocks_by_label(case, model):
    """Blocks with their label, from the row of the model; ALBERT's is called twice."""
    labels = [f"{stack}.{i}" for stack, depth in case.stacks.items() if stack != "cross" for i in range(depth)]
    blocks = case.blocks(model)
    return dict(zip(labels, blocks * (len(labels) // len(blocks)), strict=True))


def recorded(case, model, batch):
    """What enters and leaves each block, by label, from plain hooks."""
    found, hooks, labels = {}, [], iter(blocks_by_label(case, model))
    order = {}

    def before(module, args, kwargs):
        order[module] = next(labels)
        found[f"{order[module]}.input"] = args[0] if args else kwargs["hidden_states"]

    def after(module, args, kwargs, out):
        found[f"{order[module]}.output"] = out if isinstance(out, torch.Tensor) else out[0]

    for block in set(case.blocks(model)):
        hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(block.register_forward_hook(after, with_kwargs=True))
    torch.manual_seed(0)
    output(model, batch)
    for hook in hooks:
        hook.remove()
    return found


@models
def test_a_provider_sees_what_enters_and_leaves_each_block(case):
    model, batch = case.build(), case.batch()
    expected = recorded(case, model, batch)
    provider = Scale(BLOCKS)
    plain = run(model, batch)
    with attnreg.attach(model, provider) as handle:
        assert same(run(model, batch), plain)
        provider.seen.clear()
        torch.manual_seed(0)
        output(model, batch)
    seen = {site.label: (site, states) for site, states in provider.seen}
    assert {*seen} == {site.label for site in handle.sites}
    for label, states in expected.items():
        assert torch.equal(seen[label][1], states)
    real = batch.get("attention_mask")
    for label, (site, states) in seen.items():
        assert site.shape == tuple(states.shape)
        if site.where == "embeddings":
            assert torch.equal(states, expected[label.replace("embeddings", "input")])
        if real is not None and not (case.inputs == "pair" and site.stack == "decoder"):
            assert torch.equal(site.tokens, real.bool())
        else:
            old = Version("5.16") > TRANSFORMERS  # T5 makes a mask of ones there
            assert site.valid is None or (old and site.valid.all())
            assert site.tokens.all()


@models
def test_the_answer_takes_the_place_of_the_states(case):
    model, batch = case.build(), case.batch()
    without_dropout(model)
    reference = copy.deepcopy(model)
    block = case.blocks(reference)[-1]

    def doubled(module, args, kwargs):
        if args:
            return (args[0] * 2, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}

    def halved(module, args, out):
        return out / 2 if isinstance(out, torch.Tensor) else type(out)((out[0] / 2, *out[1:]))

    block.register_forward_pre_hook(doubled, with_kwargs=True)
    block.register_forward_hook(halved)
    shared = len(case.blocks(model)) == 1
    stack = list(blocks_by_label(case, model))[-1].partition(".")[0]
    where = {"stacks": [stack]} if shared else {"layers": [-1], "stacks": [stack]}
    with attnreg.attach(model, Scale("input", 2.0) & Scale(["output"], 0.5), **where) as handle:
        got = run(model, batch)
    assert same(got, run(reference, batch))
    assert handle.drop_rates() == {site.label: 0.0 for site in handle.sites}


def test_embeddings_and_the_pooled_state():
    model, batch = BERT.build(), BERT.batch()
    without_dropout(model)
    reference = copy.deepcopy(model)
    reference.bert.embeddings.register_forward_hook(lambda module, args, out: out * 3)
    reference.classifier.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with attnreg.attach(model, Scale("embeddings", 3.0) & Scale("pooled", 2.0)) as handle:
        assert same(run(model, batch), run(reference, batch))
    assert [(site.label, site.name) for site in handle.sites] == [
        ("encoder.0.embeddings", "bert.encoder.layer.0"),
        ("pooled", "classifier"),
    ]
    assert handle.left_out == ()


class Last(attnreg.HiddenProvider):
    where = "pooled"

    def forward(self, site, states):
        assert site.shape == tuple(states.shape) == (3, 16)
        with pytest.raises(ValueError, match="The pooled state at classifier has no tokens"):
            _ = site.lengths
        return states[:, :3]


def test_states_of_another_shape_are_refused():
    model = BERT.build()
    with (
        attnreg.attach(model, Last()),
        pytest.raises(ValueError, match=r"Expected Last to return .*\(3, 16\), got \(3, 3\), at cl"),
    ):
        output(model, BERT.batch())


def labels(provider, **options):
    with attnreg.attach(BERT.build(), provider, **options) as handle:
        return [site.label for site in handle.sites]


def test_layers_stacks_modules_and_wrappers():
    assert labels(Scale("output"), layers=[-1]) == ["encoder.1.output"]
    assert labels(attnreg.OnLayers(Scale("output"), [0])) == ["encoder.0.output"]
    assert labels(Scale("input"), modules="bert.encoder.layer.1.*") == ["encoder.1.input"]
    both = attnreg.OnLayers(Scale("input") & attnreg.DropKey(0.1), [1]) & Scale("pooled")
    assert labels(both) == ["encoder.0", "encoder.1", "encoder.1.input", "pooled"]
    cross = attnreg.CrossTuning(Scale("output", 2.0))
    model, batch = BERT.build(), BERT.batch()
    without_dropout(model)
    plain = output(model, batch)
    with attnreg.attach(model, cross):
        for epoch in range(2):
            cross.on_epoch(epoch)
            assert torch.equal(output(model, batch), plain) is (epoch == 0)
    scheduled = attnreg.Scheduled(attnreg.HiddenDropout(), over="depth", p=[(0, 0), (1, 1)])
    with attnreg.attach(model, scheduled) as handle:
        output(model, batch)
        assert "encoder.1.output" in handle.report()
    assert handle.drop_rates() == {"encoder.0.output": 0.0, "encoder.1.output": 1.0}


@pytest.mark.parametrize(
    ("case", "provider", "options", "sentence"),
    [
        ("torch-encoder", Scale("pooled"), {}, "Scale acts on 'pooled', but TransformerEncoder has no such"),
        ("llama", Scale("pooled"), {}, "on the chosen layers .found: decoder.0.embeddings, .*one vector per sample"),
        ("bert", Scale("embeddings"), {"layers": [1]}, "Scale acts on 'embeddings', but .*They enter the first block"),
        ("bert", attnreg.OnLayers(Scale("embeddings"), [1]), {}, "Scale acts on 'embeddings'"),
        ("t5", Scale("output"), {"stacks": ["cross"]}, "Scale acts on 'output'"),
    ],
)  # fmt: skip
def test_what_a_model_does_not_have_is_refused(case, provider, options, sentence):
    model = model_case(case).build()
    with pytest.raises(ValueError, match=sentence):
        attnreg.attach(model, provider, **options)
    assert not attnreg.is_attached(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_skipped_block_is_not_computed_and_its_states_are_not_asked_about():
    model, provider = BERT.build(), Scale(BLOCKS)
    with attnreg.attach(model, attnreg.LayerDrop(1.0) & provider) as handle:
        for layer in model.bert.encoder.layer:
            layer.intermediate.forward = None  # it would raise
        output(model, BERT.batch())
    assert [site.label for site, _ in provider.seen] == ["encoder.0.embeddings"]
    assert {label for label, rate in handle.drop_rates().items() if rate} == {
        f"encoder.{i}{where}" for i in range(2) for where in ("", ".input", ".output")
    }


def test_only_some_layers_of_a_shared_block():
    case = model_case("albert")
    model, provider = case.build(), Scale(["input"])
    with attnreg.attach(model, provider, layers=[1]) as handle:
        output(model, case.batch())
    assert [site.label for site in handle.sites] == ["encoder.1.input"] == [site.label for site, _ in provider.seen]


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = BERT.build().bert

    def forward(self, ids, others):
        return [self.encoder(input_ids=each).last_hidden_state for each in (ids, others)]


def test_an_encoder_of_several_sequences():
    model, ids = Siamese().train(), BERT.batch()["input_ids"]
    without_dropout(model)
    provider, inputs = Scale("embeddings", 2.0), (ids, ids[:, 1:])
    says = "In a pass of Siamese, encoder runs on several sequences.* attach to `encoder` instead"
    with pytest.warns(AttnRegWarning, match=says):
        handle = attnreg.attach(model, provider, example_inputs=inputs)
    with handle:
        model(*inputs)
    assert [site.label for site, _ in provider.seen] == ["encoder.0.embeddings", "encoder.2.embeddings"]
    assert [site.shape[1] for site, _ in provider.seen] == [ids.shape[1], ids.shape[1] - 1]
    for one in (model.encoder, model_case("albert").build()):  # the calls of ALBERT's block are of one sequence
        with attnreg.attach(one, Scale("embeddings")) as handle:
            assert [site.label for site in handle.sites] == ["encoder.0.embeddings"]


class Hidden(nn.Module):
    """Attention that a kernel hides."""

    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(HiddenBlock() for _ in range(blocks))
        self.classifier = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x[:, 0])


class HiddenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.transpose(-1, -2)).sigmoid() @ v


def test_hidden_attention_does_not_matter():
    model, x = Hidden(3).train(), torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="No attention that can be masked"):
        attnreg.attach(model, attnreg.DropKey(0.1), example_inputs=(x,))
    provider = Scale([*BLOCKS, "pooled"])
    with attnreg.attach(model, provider, example_inputs=(x,)) as handle:
        model(x)
    assert [site.label for site in handle.sites] == [site.label for site, _ in provider.seen] == [
        "encoder.0.embeddings", *(f"encoder.{i}.{where}" for i in range(3) for where in ("input", "output")), "pooled",
    ]  # fmt: skip


def test_blocks_without_attention_between_others_have_states_too():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.JambaConfig(
        vocab_size=40, pad_token_id=0, **sizes, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1,
        num_experts=2, expert_layer_period=2, mamba_d_state=4, mamba_d_conv=2, mamba_expand=1, mamba_dt_rank=2, use_mamba_kernels=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model, provider = hf.JambaModel(config).train(), Scale(["embeddings", "output"])
    with attnreg.attach(model, provider) as handle:
        model(torch.arange(2, 12).view(2, 5), use_cache=False)
    assert [site.label for site in handle.sites] == [site.label for site, _ in provider.seen]
    assert [site.label for site in handle.sites] == ["decoder.0.embeddings", *(f"decoder.{i}.output" for i in range(4))]


def test_a_norm_behind_blocks_and_an_encoding_before_them_are_no_blocks():
    x, blocks = torch.randn(2, 5, 16), [nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(2)]
    model, provider = nn.Sequential(nn.Linear(16, 16), *blocks, nn.LayerNorm(16)).train(), Scale(BLOCKS)
    with attnreg.attach(model, provider, example_inputs=(x,)) as handle:
        model(x)
    assert [site.label for site in handle.sites] == [site.label for site, _ in provider.seen] == [
        "encoder.0.embeddings", *(f"encoder.{i}.{where}" for i in range(2) for where in ("input", "output")),
    ]  # fmt: skip
    assert [site.name for site in handle.sites] == ["1", "1", "1", "2", "2"]


def test_states_of_unknown_layout_are_refused():
    x = torch.randn(2, 5, 3, 8)
    with pytest.raises(ValueError, match="has no such hidden states"):
        attnreg.attach(Hidden(2).train(), Scale("output"), example_inputs=(x,))


class Joint(nn.Module):
    """A block of images and texts, in which both attend to both, as in Flux."""

    def __init__(self, text_first):
        super().__init__()
        self.attention, self.text_first = Attention(fused), text_first

    def forward(self, image, text, time):
        image, text = image * time[:, None], text * time[:, None]
        updates = self.attention(torch.cat([text, image], 1)).chunk(2, 1)
        text, image = text + updates[0], image + updates[1]
        return (text, image) if self.text_first else (image, text)


class JointModel(nn.Module):
    def __init__(self, text_first):
        super().__init__()
        self.blocks = nn.ModuleList(Joint(text_first) for _ in range(2))

    def forward(self, image, text, time):
        for block in self.blocks:
            states = block(image, text, time)
            image, text = reversed(states) if block.text_first else states
        return image


@pytest.mark.parametrize("order", [("image", "text", "time"), ("time", "text", "image")])
def test_a_block_that_returns_other_states_first_is_none(order):
    sizes = {"image": (2, 5, 16), "text": (2, 5, 16), "time": (2, 16)}
    inputs = {name: torch.randn(sizes[name]) for name in order}
    with attnreg.attach(JointModel(text_first=False), Scale("output"), example_inputs=inputs) as handle:
        assert [site.name for site in handle.sites] == ["blocks.0", "blocks.1"]
    for layers in (None, [0], [1]):
        with pytest.raises(ValueError, match="there is none around blocks"):
            attnreg.attach(JointModel(True), attnreg.LayerDrop(0.5), example_inputs=inputs, layers=layers)


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = Router(16, 16)

    def forward(self, states):
        return self.dense(states[:, 0])[0]


def test_a_linear_layer_of_another_output_does_not_matter():
    model = BERT.build()
    model.bert.pooler = Pool()
    assert attnreg.attach(model, Scale("pooled")).sites[0].name == "classifier"
