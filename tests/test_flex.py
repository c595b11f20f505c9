"""FlexAttention: masks in its score function against attention written out here, in float64.

On a CPU torch computes no gradients of it, for no better reason than a check, which these tests take away.
"""

import copy
import math
import sys
import types

import pytest
import torch
import transformers as hf
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from transformers.integrations import flex_attention as kernels

import attnreg
from attnreg.injection import NoAttentionError, discover
from attnreg.injection.backends import flex
from tests.helpers.cases import NO_DROPOUT, SMALL, TEXT, sample
from tests.helpers.flex import (
    ALL,
    FACTOR,
    GROUPED,
    KEEP,
    NEEDS_FLEX,
    WAYS,
    D,
    H,
    Model,
    N,
    capped,
    dense,
    deprecated,
    qkv,
)
from tests.helpers.passes import Traces
from tests.helpers.reference import assert_same
from tests.sweep.checks import Answer

pytestmark = [NEEDS_FLEX, pytest.mark.usefixtures("eager_flex")]
LOWEST = torch.finfo(torch.float64).min


MASKS = {
    "nothing": {},
    "scores": {"scores": KEEP},
    "heads": {"scores": torch.tensor([True, False, True, False]).view(1, H, 1, 1)},
    "keys of a sample": {"scores": KEEP[:, :1, :1]},
    "whole layer": {"scores": torch.tensor(False)},
    "weights": {"weights": FACTOR},
    "normalized": {"normalized": FACTOR},
    "relaxed": {"relaxed": torch.tensor(0.3, dtype=torch.float64)},
    "relaxed rows of scores": {"scores": KEEP, "relaxed": FACTOR[..., :1]},
    "all of it": {"scores": KEEP, "weights": FACTOR[:, :1], "normalized": KEEP.roll(1, -1)},
}


def attached(model, inputs, mask):
    provider = Answer(lambda site: mask)
    return attnreg.attach(model.train(), provider, stacks=["cross"], example_inputs=inputs)


# Every mask with neither function of the kernel and with both; every way with two masks.
USUAL_WAYS, USUAL_MASKS = ("plain", "documents and a bias"), ("scores", "all of it")


def is_usual(way, mask):
    if way == GROUPED:
        return True
    if mask.startswith("relaxed"):
        return way == "documents and a bias"
    return way in USUAL_WAYS or mask in USUAL_MASKS


EVERY_WAY = [
    pytest.param(*WAYS[way], MASKS[mask], id=f"{way}-{mask}", marks=[] if is_usual(way, mask) else pytest.mark.slow)
    for way in WAYS
    for mask in MASKS
]


@pytest.mark.parametrize(("options", "change", "valid", "mask"), EVERY_WAY)
def test_every_way(options, change, valid, mask, trainable_flex):
    inputs = [x.requires_grad_() for x in qkv(**options)]
    model = Model(**options)
    with attached(model, inputs, attnreg.Mask(**mask)) as handle:
        out = model(*inputs)
        with handle.probing(), torch.no_grad():
            assert torch.equal(model(*inputs), out)
    assert_same(out, dense(*inputs, change, valid, **mask)[0], *inputs)


@pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_what_comes_out_besides(mask):
    inputs = qkv()
    options, change, valid = WAYS["sliding window, a row of nothing"]
    slow, lse = dense(*inputs, change, valid, **mask)
    for more in ({"return_aux": AuxRequest(lse=True)}, {"return_aux": AuxRequest()}, {"return_lse": True}):
        model = Model(**options, **more)
        with attached(model, inputs, attnreg.Mask(**mask)) as handle, handle.probing():
            out, shown = model(*inputs)
        assert (out - slow).abs().max() < 1e-12
        shown = shown.lse if "return_aux" in more else shown
        assert shown is None if more == {"return_aux": AuxRequest()} else torch.allclose(shown, lse, rtol=0, atol=1e-12)


def test_the_numbers_of_half_precision_are_the_kernels():
    inputs = [x.bfloat16() for x in qkv()]
    model = Model(score_mod=capped, return_aux=AuxRequest(lse=True))
    plain, aux = model(*inputs)
    with attached(model, inputs, attnreg.Mask(weights=torch.ones(1))) as handle, handle.probing():
        out, ours = model(*inputs)
    assert torch.equal(out, plain)
    assert torch.allclose(ours.lse, aux.lse, atol=1e-6)
    assert ours.lse.dtype == aux.lse.dtype == torch.float32


def test_a_row_that_the_scores_leave_without_keys_stays_the_models_own():
    closed = torch.zeros(N, N, dtype=torch.float64)
    closed[2] = LOWEST
    inputs = qkv()
    model = Model(score_mod=lambda s, b, h, q, k: s + closed[q][k])
    plain = model(*inputs)
    for mask in (attnreg.Mask(scores=KEEP), attnreg.Mask(scores=KEEP, weights=torch.ones(1))):
        with attached(model, inputs, mask) as handle, handle.probing():
            out = model(*inputs)
        assert torch.allclose(out[:, :, 2], plain[:, :, 2], rtol=0, atol=1e-12)
        assert not torch.allclose(out[:, :, 1], plain[:, :, 1])


def test_positional_arguments_and_compiled_names(monkeypatch):
    """Both as the kernel's documentation has it: all by place, and a module's name for the compiled kernel."""
    module = types.ModuleType("somebodys_module")
    exec("def call(*args):\n    return kernel(*args)", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.kernel = torch.compile(flex_attention, backend="eager")
    model = Model()
    monkeypatch.setattr(Model, "forward", lambda own, *qkv: module.call(*qkv, capped, None, 0.3, False, False, None))
    inputs, before = qkv(), module.kernel
    slow, _ = dense(*inputs, lambda s: 2 * torch.tanh(s * 0.3 * math.sqrt(D) / 2), ALL, KEEP)
    with attached(model, inputs, attnreg.Mask(scores=KEEP)) as handle, handle.probing():
        assert (model(*inputs) - slow).abs().max() < 1e-12
    assert module.kernel is before


def test_gradients_on_a_cpu_are_refused():
    inputs = [x.requires_grad_() for x in qkv()]
    model = Model()
    says = r"flex_attention cannot train Model here \(.* CPU.*\)\. Use another device, or attn_implementation='sdpa'.$"
    with attached(model, inputs, attnreg.Mask(scores=KEEP)), pytest.raises(NoAttentionError, match=says):
        model(*inputs)


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError])  # Inductor's is a RuntimeError
def test_weights_are_written_out_where_the_kernel_returns_no_log_sum_exp(error, monkeypatch):
    tried = []

    def fails(*args):
        tried.append(args)
        raise error("LoweringException: `return_lse` is not supported yet.")

    inputs, provider = qkv(), attnreg.AttentionDropout(0.5)
    model = Model().train()
    with attnreg.attach(model, provider, stacks=["cross"], example_inputs=inputs) as handle:
        expected = model(*inputs)
        monkeypatch.setattr(flex, "_with_aux", fails)
        monkeypatch.setattr(flex.BACKEND, "_no_lse", set())
        for _ in range(2):
            with handle.replay():
                assert torch.allclose(model(*inputs), expected, rtol=0, atol=1e-12)
    assert len(tried) == 1


def test_older_versions_of_torch_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))
    with pytest.raises(NoAttentionError, match=r"flex_attention needs torch 2\.11 or newer, got 2\.9\.1"):
        attnreg.attach(Model(), attnreg.DropKey(0.1), example_inputs=qkv())


MODELS = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(**TEXT, **SMALL, **NO_DROPOUT), add_pooling_layer=False), "encoder"),
    "llama": (
        lambda: hf.LlamaModel(hf.LlamaConfig(**TEXT, **SMALL, num_key_value_heads=2, use_cache=False)),
        "decoder",
    ),
}
PADDED = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
BATCH = {"input_ids": torch.arange(1, 13).view(2, 6), "attention_mask": PADDED}


def twins(name):
    """A model with each kernel, of the same parameters."""
    torch.manual_seed(0)
    fused = MODELS[name][0]().double().train()
    flex = copy.deepcopy(fused)
    flex.set_attn_implementation("flex_attention")
    return flex, fused


def hidden(model):
    return model(**BATCH).last_hidden_state


@deprecated
@pytest.mark.parametrize("name", MODELS)
def test_transformers_models_are_the_same_under_both_kernels(name, trainable_flex):
    flex, fused = twins(name)
    stack = MODELS[name][1]
    real = PADDED.bool()
    assert [(s.info.label, s.info.heads) for s in discover(flex).sites] == [(f"{stack}.{i}", 4) for i in range(2)]
    keep = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    factor = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for mask in (attnreg.Mask(scores=keep), attnreg.Mask(weights=factor), attnreg.Mask(normalized=keep)):
        found = []
        for model in (flex, fused):
            provider = Answer(lambda site, mask=mask: mask)
            with attnreg.attach(model, provider) as handle:
                out = hidden(model)
            out[real].sin().sum().backward()
            grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
            found.append((out.detach(), grads, handle.drop_rates(), provider.asked))
        (ours, our_grads, our_rates, our_sites), (theirs, grads, rates, sites) = found
        assert (ours - theirs)[real].abs().max() < 1e-6  # transformers' own: rotations in float32
        assert (our_grads - grads).abs().max() < 1e-5
        assert our_rates == pytest.approx(rates)
        rows = real[:, None].expand(2, 4, 6)
        for a, b in zip(our_sites, sites, strict=True):
            assert torch.equal(a.units.expand(a.shape), b.units.expand(b.shape))
            assert torch.allclose(a.scores().exp()[rows], b.scores().exp()[rows], atol=1e-5)


@deprecated
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_behind(name, trainable_flex):
    model, _ = twins(name)
    names = torchs.flex_attention, kernels.flex_attention, kernels.compile_friendly_flex_attention
    before, plain = Traces(model), hidden(model)
    with attnreg.attach(model, Answer(lambda site: attnreg.Mask(scores=torch.ones(site.shape).bool()))) as handle:
        assert torch.allclose(hidden(model), plain, rtol=0, atol=1e-12)
        handle.provider.answer = lambda site: attnreg.Mask(scores=torch.tensor(False))
        assert not torch.allclose(hidden(model), plain)
        assert handle.drop_rates() == {site.label: 1.0 for site in handle.sites}
        assert torch.equal(hidden(model.eval()), plain)
        with handle.disabled():
            assert torch.equal(hidden(model.train()), plain)
    assert vars(Traces(model)) == vars(before)
    assert torch.equal(hidden(model), plain)
    assert names == (torchs.flex_attention, kernels.flex_attention, kernels.compile_friendly_flex_attention)


COUNTER = CompileCounterWithBackend("eager")
COMPILED = torch.compile(flex_attention, backend=COUNTER)


class Compiled(nn.Module):
    """Self-attention that calls a compiled kernel."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return COMPILED(q, k, v).transpose(1, 2).flatten(2)


FALLING = {"total_steps": 10, "p": [(0, 0.5), (1, 0)]}
AS_OFTEN = {
    "scores": lambda: attnreg.AttentionDropout(0.1, placement="scores"),
    "whole keys": lambda: attnreg.DropKey(0.1, share_queries=True),
    "heads and scores": lambda: attnreg.DropHead(0.2) & attnreg.DropKey(0.2),
    "a schedule": lambda: attnreg.Scheduled(attnreg.DropKey(), **FALLING),
}


def compilations(provider):
    """Count how often the kernel of four layers is compiled in steps of several lengths, then with a frozen layer."""
    torch._dynamo.reset()
    COUNTER.clear()
    model, x = nn.Sequential(*(Compiled() for _ in range(4))), torch.randn(2, 16, 16)
    handle = None if provider is None else attnreg.attach(model, provider, example_inputs=(x,))
    counts = []
    for length in (16, 16, 32, 48, 128):
        model(torch.randn(2, length, 16))
        counts.append(COUNTER.frame_count)
        if handle is not None:
            handle.step()
    model[0].requires_grad_(False)
    model(x)
    return [*counts, COUNTER.frame_count]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's compiler
@pytest.mark.parametrize("name", sample(AS_OFTEN, lambda name: name == "heads and scores"))  # compiling takes seconds
def test_the_kernel_is_compiled_as_often_as_the_plain_models(name, monkeypatch, trainable_flex):
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    assert compilations(AS_OFTEN[name]()) == compilations(None)
