"""Gradients by attention weights as products, beside fused kernels, against those of weights that are written out."""

import importlib
import itertools

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attnreg
from attnreg import functional
from attnreg.injection.backends import flex, fused
from tests.helpers.cases import SMALL, TEXT, sample
from tests.helpers.flex import NEEDS_FLEX, deprecated
from tests.helpers.regularizers import Watch

module = importlib.import_module("attnreg.attribution")
pytestmark = pytest.mark.usefixtures("eager_flex")

PADDED = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 8 + [0]])
IDS = torch.randint(2, 40, (3, 9), generator=torch.Generator().manual_seed(0)).masked_fill(PADDED == 0, 0)
TEXTS = {"input_ids": IDS, "attention_mask": PADDED}
IMAGES = {"pixel_values": torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))}
STRONG = {**TEXT, **SMALL, "num_hidden_layers": 3, "initializer_range": 0.4}
SHARED_KEYS = {**STRONG, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3, "use_cache": False}
MODELS = {
    "bert": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**STRONG, attention_probs_dropout_prob=0.0)), TEXTS),
    "llama": (lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**SHARED_KEYS)), TEXTS),
    "mistral, a window": (lambda: hf.MistralForSequenceClassification(hf.MistralConfig(**SHARED_KEYS, sliding_window=3)), TEXTS),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**{**SMALL, "num_hidden_layers": 3}, image_size=12, patch_size=4, initializer_range=0.4)), IMAGES),
}  # fmt: skip


def refuse(*args, **kwargs):
    raise AssertionError("attention weights are written out")


def build(name, kernel="sdpa"):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make().eval()
    model.set_attn_implementation(kernel)
    return model, batch


def written_out(model, batch, monkeypatch):
    """Gradients by weights that are computed in the place of the kernel."""

    def by_weights(run):
        return module._gradients(run, {label: module.Tap() for label in run.labels}, times_tapped=False)

    with monkeypatch.context() as patch, attnreg.attach(model, attnreg.AttributionProvider()) as handle:
        patch.setitem(module.METHODS, "gradient", by_weights)
        found = module.explain(model, batch, handle, [site.label for site in handle.sites])
        assert all(isinstance(each, torch.Tensor) for each in found.data.values())
        return found


PRECISIONS = {torch.float64: (1.0, 1e-12), torch.float32: (0.999, 1e-4)}  # the share of candidates that are the same


def is_usual(name, kernel, region, dtype):
    """Each model under torch's kernel, and the one with a window under FlexAttention; the low region of one model."""
    if kernel == "flex_attention":
        return (name, region, dtype) == ("mistral, a window", "high", torch.float64)
    return dtype is torch.float64 and (region == "high" or name == "bert")


@deprecated
@pytest.mark.parametrize(
    ("name", "kernel", "region", "dtype"),
    sample(itertools.product(MODELS, ["sdpa", "flex_attention"], ["high", "low"], PRECISIONS), is_usual),
    ids=str,
)
def test_candidates_are_those_of_written_out_weights(name, kernel, region, dtype, trainable_flex, monkeypatch):
    if kernel == "flex_attention" and NEEDS_FLEX.args[0]:
        pytest.skip(NEEDS_FLEX.kwargs["reason"])
    share, tolerance = PRECISIONS[dtype]
    model, batch = build(name, kernel)
    model = model.to(dtype)
    batch = {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}
    expected = written_out(model, batch, monkeypatch)
    monkeypatch.setattr("attnreg.functional.region.POSITIONS", 1)
    provider = attnreg.AttributionProvider(0.4, 1.0, region=region)
    with attnreg.attach(model, Watch(provider)) as handle:
        with monkeypatch.context() as patch:
            patch.setattr(fused.functional, "attention_weights", refuse)
            patch.setattr(flex, "_scores", refuse)
            provider.attribute(model, batch)
        model.train()(**batch)
    assert list(provider.attributions) == list(expected) == list(handle.provider.seen)
    for label, gradient in expected.items():
        found = provider.attributions[label]
        site, ours = handle.provider.seen[label]
        real = torch.ones(()).bool() if site.units is None else site.units
        assert found.shape == gradient.shape
        assert ((found - gradient) * real).abs().max() < tolerance * gradient.abs().max()
        theirs = functional.candidate_region(gradient, site.valid, 0.4, region)
        assert theirs.any()
        assert (ours != theirs).sum() <= (1 - share) * theirs.sum()


class Largest(TorchDispatchMode):
    """Notes the largest float tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self.numbers = max(self.numbers, *sizes, 0)
        return out


def test_nothing_of_the_size_of_the_weights_is_in_memory():
    length = 256
    config = hf.BertConfig(**{**STRONG, "max_position_embeddings": length})
    model, batch = hf.BertForSequenceClassification(config), {"input_ids": torch.ones(1, length, dtype=torch.long)}
    provider = attnreg.AttributionProvider(0.4, 1.0)
    with attnreg.attach(model, provider), Largest() as largest:
        provider.attribute(model, batch)
        found = provider.attributions.data["encoder.0"]
        functional.factored_region(found.output_gradient, found.values, None, 0.4, positions=1000)
    assert largest.numbers == length * SMALL["intermediate_size"] < 4 * length**2 / 40


@pytest.mark.parametrize("first_pass", ["train", "eval"])
def test_weights_that_are_dropped_are_written_out(first_pass, monkeypatch):
    calls, plain = [], fused.functional.attention_weights
    monkeypatch.setattr(fused.functional, "attention_weights", lambda *args: calls.append(1) or plain(*args))
    for dropout, expected in ((0.5, 3 if first_pass == "train" else 0), (0.0, 0)):
        calls.clear()
        model = hf.BertForSequenceClassification(hf.BertConfig(**STRONG, attention_probs_dropout_prob=dropout)).train()
        provider = attnreg.AttributionProvider(first_pass=first_pass)
        with attnreg.attach(model, provider):
            provider.attribute(model, TEXTS)
            assert len(provider.attributions) == 3
        assert len(calls) == expected


@deprecated
@NEEDS_FLEX
def test_a_kernel_without_gradients_is_written_out(monkeypatch):
    model, batch = build("bert", "flex_attention")
    model = model.double()
    with attnreg.attach(model, attnreg.AttributionProvider()) as handle:
        found = module.explain(model, batch, handle, ["encoder.0", "encoder.1", "encoder.2"])
    for label, gradient in written_out(model, batch, monkeypatch).items():
        assert (found[label] - gradient).abs().max() < 1e-12


def test_no_gradient_is_computed_below_the_lowest_layer():
    model, batch = build("bert")
    requires = {}
    for number, layer in enumerate(model.bert.encoder.layer):
        layer.register_forward_hook(lambda module, args, out, n=number: requires.update({n: out.requires_grad}))
    provider = attnreg.AttributionProvider(layers=[1])
    with attnreg.attach(model, provider):
        provider.attribute(model, batch)
    assert requires == {0: False, 1: True, 2: True}


@pytest.mark.parametrize("heads", [6, 3, 1])
@pytest.mark.parametrize("positions", [1, 100, 10**6])
@pytest.mark.parametrize("valid", ["none", "keys", "padding", "causal"])
def test_the_region_of_a_product_is_that_of_the_loop(heads, positions, valid):
    generator = torch.Generator().manual_seed(heads)
    gradient = torch.randn(2, 6, 5, 4, dtype=torch.float64, generator=generator)
    value = torch.randn(2, heads, 7, 4, dtype=torch.float64, generator=generator)
    open_ = {
        "none": None,
        "keys": torch.arange(7) < 6,
        "padding": (torch.arange(7) < torch.tensor([[4], [7]])).view(2, 1, 1, 7),
        "causal": torch.ones(5, 7, dtype=torch.bool).tril(),
    }[valid]
    slow = torch.empty(2, 6, 5, 7, dtype=torch.float64)
    for b, h, q, k in torch.cartesian_prod(*map(torch.arange, slow.shape)).tolist():
        slow[b, h, q, k] = sum(gradient[b, h, q, d] * value[b, h * heads // 6, k, d] for d in range(4))
    assert torch.allclose(functional.weights_gradient(gradient, value), slow, rtol=0, atol=1e-12)
    got = functional.factored_region(gradient, value, open_, 0.5, positions=positions)
    assert torch.equal(got, functional.candidate_region(slow, open_, 0.5))


def test_the_product_is_in_float32_also_under_autocast():
    gradient, value = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 1, 5, 4).bfloat16()
    expected = functional.weights_gradient(gradient.double(), value.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = functional.weights_gradient(gradient, value)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5
