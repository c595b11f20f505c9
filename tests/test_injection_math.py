"""Masks that go through the injection layer against loops, in float64, for each way in which models hold attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnreg
from tests.helpers.reference import assert_same, attention
from tests.sweep.checks import Answer

B, H, N, D = 2, 3, 4, 5
MINUS = torch.finfo(torch.float64).min
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
PADDED = torch.tensor([[True] * 4, [True, True, False, False]]).view(B, 1, 1, N).expand(B, 1, N, N)


def fixed(scores=None, weights=None):
    return Answer(lambda site: attnreg.Mask(scores, weights))


class Function(nn.Module):
    """An attention module around a function of q, k and v."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v)


def written_out(bias):
    def run(q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        return F.softmax(scores if bias is None else scores + bias, dim=-1) @ v

    return run


def method_softmax(q, k, v):
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


def torch_softmax(q, k, v):
    return torch.softmax(input=q @ k.transpose(-1, -2) / math.sqrt(D), dim=-1) @ v


class SoftmaxModule(Function):
    def __init__(self):
        super().__init__(lambda q, k, v: self.softmax(q @ k.transpose(-1, -2) / math.sqrt(D)) @ v)
        self.softmax = nn.Softmax(dim=-1)


def fused(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


FLOAT_BIAS = torch.randn(1, H, N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FORBIDDEN = torch.zeros(B, 1, N, N, dtype=torch.float64).masked_fill(~PADDED, MINUS)
ROUTES = {
    # name: the model, what it allows, its bias, its scale
    "fused": (Function(fused()), None, None, None),
    "fused, bool mask": (Function(fused(attn_mask=PADDED)), PADDED, None, None),
    "fused, causal": (Function(fused(is_causal=True)), CAUSAL, None, None),
    "fused, float bias": (Function(fused(attn_mask=FLOAT_BIAS)), None, FLOAT_BIAS, None),
    "fused, additive mask": (Function(fused(attn_mask=FORBIDDEN)), PADDED, None, None),
    "fused, mask and bias": (Function(fused(attn_mask=FORBIDDEN + FLOAT_BIAS, scale=1.0)), PADDED, FLOAT_BIAS, 1.0),
    "written out": (Function(written_out(None)), None, None, None),
    "written out, finfo.min": (Function(written_out(FORBIDDEN)), PADDED, None, None),
    "written out, -inf and bias": (
        Function(written_out(FLOAT_BIAS.masked_fill(~PADDED, -math.inf))), PADDED, FLOAT_BIAS, None,
    ),
    "written out, -10000": (Function(written_out((~PADDED) * -10000.0)), PADDED, None, None),
    "Tensor.softmax": (Function(method_softmax), None, None, None),
    "torch.softmax by keyword": (Function(torch_softmax), None, None, None),
    "nn.Softmax": (SoftmaxModule(), None, None, None),
    "fused, grouped queries": (Function(fused(enable_gqa=True, attn_mask=PADDED)), PADDED, None, None),
}  # fmt: skip
generator = torch.Generator().manual_seed(1)
KEEP = torch.rand(B, H, N, N, generator=generator) < 0.4
MASKS = {
    "scores": (KEEP, None),
    "scores of one head for all": (KEEP[:, :1], None),
    "whole layer": (torch.tensor(False), None),
    "kept layer": (torch.tensor(True), None),
    "weights": (None, torch.rand(B, H, N, N, generator=generator, dtype=torch.float64)),
    "bool weights": (None, torch.rand(B, 1, N, N, generator=generator) < 0.5),
    "both": (KEEP, torch.rand(1, H, 1, 1, generator=generator, dtype=torch.float64)),
    "whole layer and weights": (torch.tensor(False), torch.rand(B, H, N, N, generator=generator).double()),
}


def qkv(heads=H):
    generator = torch.Generator().manual_seed(2)
    make = lambda h: torch.randn(B, h, N, D, dtype=torch.float64, generator=generator).requires_grad_()  # noqa: E731
    return make(H), make(heads), make(heads)


@pytest.mark.parametrize(("scores", "weights"), MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route(route, scores, weights):
    model, valid, bias, scale = ROUTES[route]
    q, k, v = qkv(heads=1 if "grouped" in route else H)
    with attnreg.attach(model.train(), fixed(scores, weights), stacks=["cross"], example_inputs=(q, k, v)):
        fast = model(q, k, v)
    heads = [x.expand(B, H, N, D) for x in (q, k, v)]
    slow = attention(*heads, keep=scores, valid=valid, bias=bias, scale=scale, factor=weights)
    assert_same(fast, slow, q, k, v, tolerance=1e-12)


def together(x, order):
    """(B, N, H * D) to (B * H, N, D), samples or heads first."""
    heads = x.unflatten(-1, (H, D)).transpose(1, 2)
    return (heads if order == "samples" else heads.transpose(0, 1)).flatten(0, 1)


def apart(x, order):
    return x.unflatten(0, (B, H)) if order == "samples" else x.unflatten(0, (H, B)).transpose(0, 1)


@pytest.mark.parametrize("order", ["samples", "heads"])
@pytest.mark.parametrize("run", [method_softmax, fused()], ids=["written out", "fused"])
@pytest.mark.parametrize(("scores", "weights"), MASKS.values(), ids=MASKS)
def test_batch_and_heads_in_one_dimension(run, order, scores, weights):
    model = Function(lambda q, k, v: apart(run(*(together(x, order) for x in (q, k, v))), order)).train()
    q, k, v = qkv()
    flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    with attnreg.attach(model, fixed(scores, weights), stacks=["cross"], example_inputs=flat):
        fast = model(*flat)
    assert_same(fast, attention(q, k, v, keep=scores, factor=weights), q, k, v)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("scores", "weights"), MASKS.values(), ids=MASKS)
def test_multihead_attention(scores, weights, batch_first, need_weights):
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(H * D, H, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(B, N, H * D, dtype=torch.float64, requires_grad=True)
    given = x if batch_first else x.transpose(0, 1)
    padding = ~PADDED[:, 0, 0]
    with attnreg.attach(layer, fixed(scores, weights)) as handle:
        out, shown = layer(given, given, given, key_padding_mask=padding, need_weights=need_weights)
    out = out if batch_first else out.transpose(0, 1)
    heads = [(x @ w.T + b).unflatten(-1, (H, D)).transpose(1, 2) for w, b in
             zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)]  # fmt: skip
    slow = attention(*heads, keep=scores, valid=PADDED, factor=weights).transpose(1, 2).flatten(2)
    assert_same(out, layer.out_proj(slow), x, layer.in_proj_weight)
    assert [site.label for site in handle.sites] == ["encoder.0"]
    assert (shown is not None) == need_weights


def test_a_row_that_the_model_leaves_without_keys_stays_the_models_own():
    valid = PADDED.clone()
    valid[0, :, 2] = False
    additive = torch.zeros(B, 1, N, N, dtype=torch.float64).masked_fill(~valid, MINUS)
    q, k, v = qkv()
    keep = KEEP.clone()
    for run in (fused(attn_mask=additive), fused(attn_mask=valid), written_out(additive)):
        model = Function(run).train()
        plain = model(q, k, v)
        with attnreg.attach(model, fixed(keep), stacks=["cross"], example_inputs=(q, k, v)):
            out = model(q, k, v)
        assert torch.allclose(out[0, :, 2], plain[0, :, 2], atol=1e-12, rtol=0)
        others = attention(q, k, v, keep=keep, valid=valid)
        assert (out - others)[1].abs().max() < 1e-12


def test_the_models_own_dropout_stays():
    torch.manual_seed(0)
    q = k = torch.zeros(1, 1, 2, 400, dtype=torch.float64)
    v = torch.ones(1, 1, 2, 400, dtype=torch.float64)
    model = Function(fused(dropout_p=0.5)).train()
    for mask in (fixed(torch.ones(2, 2, dtype=torch.bool)), fixed(None, torch.ones(2, 2))):
        with attnreg.attach(model, mask, example_inputs=(q, k, v)):
            outs = torch.stack([model(q, k, v) for _ in range(400)])
        assert {round(float(x), 6) for x in outs.unique()} == {0.0, 1.0, 2.0}
        assert abs(outs[..., 0].mean() - 1) < 5 * math.sqrt(0.5 / 800)


def test_softmax_over_something_else_is_left_alone():
    others, found = [(torch.randn(3, 4), -1), (torch.randn(B, N, 4), -1), (torch.randn(B, H, N, D), 1)], []

    def run(q, k, v):
        found.extend(x.softmax(dim) for x, dim in others)
        return method_softmax(q, k, v)

    q, k, v = qkv()
    model, provider = Function(run).train(), fixed(torch.tensor(False))
    with attnreg.attach(model, provider, stacks=["cross"], example_inputs=(q, k, v)) as handle:
        found.clear()
        model(q, k, v)
        assert [site.name for site in handle.sites] == ["Function"]
    assert [site.shape for site in provider.asked] == [(B, H, N, N)]
    assert all(torch.equal(ours, x.softmax(dim)) for ours, (x, dim) in zip(found, others, strict=True))
