"""The first pass: what captum gives against gradients by hand, and that nobody notices it."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.models.bert import modeling_bert

import attnreg
from attnreg.attribution import explain
from tests.helpers.cases import bert_in_float64, keep_few_activations, model_case, sample
from tests.helpers.models import TEXTS as BATCH
from tests.helpers.models import bert_of_three_layers as bert
from tests.helpers.own_dropout_cases import SOUND
from tests.helpers.passes import Traces

LABELS = ["encoder.0", "encoder.1", "encoder.2"]


def attached(model, **options):
    return attnreg.attach(model, attnreg.AttributionProvider(**options))


def logits_with(model, layer, weights):
    """The logits with the attention weights of one layer replaced: torch alone, HF's own eager attention."""
    plain = modeling_bert.eager_attention_forward

    def forward(module, query, key, value, mask, **kwargs):
        if module is layer:
            return (weights @ value).transpose(1, 2), weights
        return plain(module, query, key, value, mask, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_bert, "eager_attention_forward", forward)
        return model(**BATCH).logits


def albert():
    """A model whose layers are one module."""
    return model_case("albert").build().double()


@pytest.mark.parametrize(("make", "labels"), [(bert, LABELS), (albert, LABELS[:2])])
def test_gradient_is_autograd_to_the_bit_in_one_backward_pass(make, labels, monkeypatch):
    model = make().eval()
    model.set_attn_implementation("eager")
    out = model(**BATCH, output_attentions=True)
    expected = torch.autograd.grad(out.logits.max(-1).values.sum(), out.attentions)
    calls, plain = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or plain(*a, **k))
    with attached(model) as handle:
        got = explain(model, BATCH, handle, labels)
    assert len(calls) == 1
    assert list(got) == labels
    for label, gradient in zip(labels, expected, strict=True):
        assert torch.equal(got[label], gradient)
        assert gradient.abs().max() > 0


def test_integrated_gradients_are_the_sum_of_the_steps():
    model, steps = bert().eval(), 20
    model.set_attn_implementation("eager")
    with attached(model) as handle:
        got = explain(model, BATCH, handle, LABELS, method="integrated_gradients", steps=steps)
    out = model(**BATCH, output_attentions=True)
    classes = out.logits.argmax(-1, keepdim=True)
    for label, layer, a in zip(LABELS, model.bert.encoder.layer, out.attentions, strict=True):
        total = torch.zeros_like(a)
        for k in range(1, steps + 1):
            scaled = (k / steps * a).detach().requires_grad_()
            score = logits_with(model, layer.attention.self, scaled).gather(-1, classes).sum()
            total += torch.autograd.grad(score, scaled)[0]
        expected = a * total / steps
        assert (got[label] - expected).abs().max() < 1e-6 * expected.abs().max()  # captum's steps are float32


def test_attention_is_the_weights():
    model = bert().eval()
    model.set_attn_implementation("eager")
    expected = model(**BATCH, output_attentions=True).attentions
    with attached(model) as handle:
        got = explain(model, BATCH, handle, LABELS, method="attention")
    assert all(torch.equal(got[label], a) for label, a in zip(LABELS, expected, strict=True))


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients"])
def test_a_first_pass_in_training_mode_under_gradient_checkpointing(method):
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    provider = attnreg.AttributionProvider(method=method, first_pass="train", steps=3)
    results = []
    with attnreg.attach(model, provider):
        for checkpointed in (False, True):
            if checkpointed:
                keep_few_activations(model, {"use_reentrant": False})
            provider.attribute(model, BATCH)
            results.append(provider.attributions)
    assert all(torch.equal(results[0][label], results[1][label]) for label in LABELS)


def test_the_dropout_of_the_first_pass_is_not_that_of_the_second():
    model, seen = bert().train(), []
    model.bert.embeddings.register_forward_hook(lambda module, args, out: seen.append(out))
    with attnreg.attach(model, attnreg.AttributionProvider(first_pass="train")) as handle:
        handle.provider.attribute(model, BATCH)
        model(**BATCH)
    assert not torch.equal(*seen[-2:])


class Packed(nn.Module):
    """An encoder of the tokens of all samples in one dimension, as patches of images are."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.aside = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, lengths, packed):
        x = packed.unflatten(0, (len(lengths), -1))
        out = self.encoder(x).mean(1)
        self.aside(x)
        return out


@pytest.mark.parametrize("method", ["gradient", "gradient_times_attention", "integrated_gradients"])
def test_attention_that_does_not_lead_to_the_score_is_named(method):
    model, batch = Packed(), {"lengths": torch.tensor([3, 3]), "packed": torch.randn(6, 8)}
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.1), example_inputs=batch)
    says = r"does not depend on every attributed site .*encoder.1\): attach only to modules"
    with pytest.raises(ValueError, match=says):
        explain(model, batch, handle, ["encoder.0", "encoder.1"], method=method, steps=2)


def state_of(model):
    return {**vars(Traces(model)), "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()]}


def same_state(a, b):
    grads = all(x is y is None or torch.equal(x, y) for x, y in zip(a.pop("grad"), b.pop("grad"), strict=True))
    return grads and a == b


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = bert()

    def forward(self, input_ids, attention_mask):
        self.bert(input_ids, attention_mask)
        raise ZeroDivisionError


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients", "attention"])
@pytest.mark.parametrize("first_pass", ["eval", "train"])
@pytest.mark.parametrize("faulty", [False, True])
def test_nobody_notices(method, first_pass, faulty):
    model = Faulty() if faulty else bert()
    inner = model.bert if faulty else model
    inner(**BATCH).logits.sum().backward()
    model.train()
    inner.bert.embeddings.eval()
    inner.bert.embeddings.requires_grad_(False)
    provider = attnreg.AttributionProvider(method=method, first_pass=first_pass, steps=3)
    with attnreg.attach(inner, provider):
        before, random = state_of(model), torch.get_rng_state()
        with pytest.raises(ZeroDivisionError) if faulty else nullcontext():
            provider.attribute(model, BATCH)
        assert torch.equal(torch.get_rng_state(), random)
        assert same_state(before, state_of(model))
        assert torch.backends.mha.get_fastpath_enabled()


def test_the_first_pass_has_dropout_only_when_told():
    model = bert().train()
    with attached(model) as handle:
        torch.manual_seed(0)
        eval_pass = [explain(model, BATCH, handle, LABELS)["encoder.0"] for _ in range(2)]
        train_pass = []
        for seed in range(2):
            torch.manual_seed(seed)
            train_pass.append(explain(model, BATCH, handle, LABELS, training=True)["encoder.0"])
    assert torch.equal(*eval_pass)
    assert not torch.equal(*train_pass)


def test_the_first_pass_in_bfloat16_ranks_alike():
    model = bert().float().train()
    with attached(model) as handle:
        exact = explain(model, BATCH, handle, LABELS)
        rough = explain(model, BATCH, handle, LABELS, dtype=torch.bfloat16)
        assert not torch.is_autocast_enabled("cpu")
    for label in LABELS:
        assert not torch.equal(exact[label], rough[label])
        pair = torch.stack([exact[label][0].flatten(), rough[label][0].flatten()])
        assert torch.corrcoef(pair)[0, 1] > 0.98


def test_other_providers_are_off_in_the_first_pass():
    model = bert().eval()
    provider = attnreg.AttributionProvider()
    with attnreg.attach(model, provider):
        provider.attribute(model, BATCH)
        alone = provider.attributions["encoder.0"]
    both = attnreg.AttributionProvider() & attnreg.AttentionLayerDrop(1.0)
    with attnreg.attach(model.train(), both):
        both.attribute(model, BATCH)
        assert torch.equal(both.providers[0].attributions["encoder.0"], alone)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": lambda model: model.compile(backend="eager") or model,
    "data parallel": nn.DataParallel,
    "distributed data parallel": DistributedDataParallel,
    "frozen": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_or_frozen_model_is_attributed_all_the_same(wrapper, process_group):
    model = bert().eval()
    with attached(model) as handle:
        expected = explain(model, BATCH, handle, LABELS)
        wrapped = WRAPPERS[wrapper](model)
        got = explain(wrapped, BATCH, handle, LABELS)
    assert all(torch.equal(got[label], expected[label]) for label in LABELS)


def test_without_attaching():
    with pytest.raises(RuntimeError, match="This AttributionProvider is not attached to the model"):
        attnreg.AttributionProvider().attribute(bert(), BATCH)


PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default


def saving_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def test_ad_drop_where_checkpoints_save_products():
    batch = {
        "input_ids": torch.randint(1, 9, (3, 8)),
        "labels": torch.tensor([0, 1, 1]),
    }  # 8 tokens, as a head has features
    gradients = []
    for options in ({}, {"context_fn": functools.partial(create_selective_checkpoint_contexts, saving_products)}):
        torch.manual_seed(0)
        model = bert_in_float64(hidden_size=16, num_attention_heads=2, attention_probs_dropout_prob=0.1)
        provider = attnreg.AttributionProvider(0.5, 0.5)
        attnreg.attach(model, provider)
        model.train()
        for block in model.bert.encoder.layer:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
        torch.manual_seed(1)
        provider.attribute(model, batch)
        model(**batch).loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("method", sample(["gradient", "integrated_gradients", "attention"], lambda method: method == "gradient"))  # fmt: skip
def test_a_layer_that_the_model_skips_in_the_first_pass_has_no_attribution(method):
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0}
    config = hf.Wav2Vec2Config(**{**SOUND, "num_hidden_layers": 3}, **still, layerdrop=0.4, apply_spec_augment=False)
    torch.manual_seed(0)
    model = hf.Wav2Vec2ForSequenceClassification(config).double()
    batch = {"input_values": torch.randn(2, 100).double(), "labels": torch.tensor([0, 1])}
    provider = attnreg.AttributionProvider(0.5, 0.5, method, first_pass="train", steps=2)
    attnreg.attach(model, provider)
    model.train()
    numbers = set()
    for seed in (3, 4):  # which skip the first layer, and the first two
        torch.manual_seed(seed)
        provider.attribute(model, batch)
        found, ran = provider.attributions, [int(label[8:]) for label in provider.attributions]
        model(**batch).loss.backward()  # other layers may be skipped now
        numbers.add(len(ran))
        if ran:  # the reference has these layers alone
            alone = copy.deepcopy(model)
            attnreg.detach(alone)
            alone.wav2vec2.encoder.layers = alone.wav2vec2.encoder.layers[:0].extend(
                alone.wav2vec2.encoder.layers[layer] for layer in ran
            )
            alone.wav2vec2.encoder.config.layerdrop = 0.0
            wanted = attnreg.AttributionProvider(0.5, 0.5, method, steps=2)
            attnreg.attach(alone, wanted)
            wanted.attribute(alone, batch)
            for place, layer in enumerate(ran):
                assert torch.allclose(found[f"encoder.{layer}"], wanted.attributions[f"encoder.{place}"])
    assert len(numbers) > 1
