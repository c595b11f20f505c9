"""Attention in Triton against formulas in float64, on a GPU or in Triton's interpreter."""

import pytest
import torch

from attnreg import kernels
from attnreg.draws import Drawn
from attnreg.errors import InputError
from tests.helpers.cases import refused
from tests.helpers.kernel_cases import DEVICE, DTYPE, LEAST, MARKS, TOLERANCE

pytestmark = MARKS
B, H, KV, N, D = (2, 2, 1, 24, 16) if DEVICE.type == "cpu" else (2, 4, 2, 333, 64)


def per_key(shape=(B, 1, 1, N), lengths=(N, N * 2 // 5)):
    """Padding on the right, and on the left of the first sample."""
    valid = torch.arange(shape[3], device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    valid[0, :3] = False
    return valid[:, None, None]


def drawn(p, shape=(B, H, N, N), seed=12345, **rest):
    return Drawn(seed, p, shape, device=DEVICE, **rest)


def random(*shape, p=0.7):
    return torch.rand(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5)) < p


def formula(
    q, k, v, *, valid=None, causal=None, bias=None, keep=None, scale=None,
    scores=None, weights=(), rows=None, counts=None,
):  # fmt: skip
    """Eq. 3 and 4 of AttendOut with dropout of weights after it, in float64."""
    shape = (*q.shape[:3], k.shape[2])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    valid = torch.ones(shape, dtype=torch.bool, device=DEVICE) if valid is None else valid.expand(shape)
    valid = valid if causal is None else valid.tril(causal)
    valid = valid if bias is None else valid & (bias > -torch.inf)
    kept = torch.ones(shape, dtype=torch.bool, device=DEVICE) if keep is None else keep.expand(shape)
    kept = kept if scores is None else kept & scores.written_out()
    allowed = valid & kept
    dead = ~allowed.any(-1, keepdim=True)
    a = torch.where(allowed, s, -1e300).softmax(-1) * allowed
    a = torch.where(dead, valid.double() / valid.sum(-1, keepdim=True).clamp(min=1), a)
    for i, draw in enumerate(weights):
        if draw is not None:
            p = float(draw.p)
            a = a * draw.written_out() / (1 - p if draw.rescale and p < 1 else 1)
            kept = kept & draw.written_out() if i == 0 else kept
    real = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE) if rows is None else rows
    lost = valid & ~kept & real
    return a @ v, int(lost.sum()), dead & valid.any(-1, keepdim=True), ~valid.any(-1)


def forbidding(*shape, p=0.5):
    """A bias of which some is minus infinity."""
    return torch.linspace(-4, 4, shape[-1], device=DEVICE).expand(shape).masked_fill(~random(*shape, p=p), -torch.inf)


S, W = {"scores": drawn(0.3)}, {"weights": (drawn(0.2, seed=-7, rescale=True),)}
HALF = drawn(torch.tensor(0.5, device=DEVICE, dtype=torch.float64))
OFFSETS = {
    "first_query": torch.tensor([5, 3], device=DEVICE).view(B, 1, 1),
    "first_key": torch.tensor([-2, 2**31 - 9], device=DEVICE).view(B, 1, 1),
    "samples": torch.tensor([7, 2**22], device=DEVICE),
}
CASES = {
    "plain": {},
    "causal": {"causal": 0},
    "padding": {"valid": per_key()},
    "scores, causal": dict(causal=0, **S),
    "scores, padding": dict(valid=per_key(), **S),
    "scores, more keys": {"causal": 13, "K": N + 13, "scores": drawn(0.3, (B, H, N, N + 13))},
    "scores, top-left": {"causal": 0, "K": N + 13, "scores": drawn(0.3, (B, H, N, N + 13))},
    "scores, fewer keys": {"causal": -11, "K": N - 11, "scores": drawn(0.3, (B, H, N, N - 11))},
    "dead rows": {"causal": 0, "valid": per_key(), "scores": drawn(0.9)},
    "all dropped": {"valid": per_key(), "scores": drawn(1.0)},
    "all dropped, biased": {"causal": 0, "scores": drawn(1.0), "bias": torch.linspace(-3, 3, N, device=DEVICE)},
    "whole keys": {"valid": per_key(), "scores": drawn(0.6, (B, H, 1, N))},
    "whole keys of all heads": {"causal": 0, "scores": drawn(0.8, (B, 1, 1, N))},
    "of all samples": {"scores": drawn(0.4, (1, H, N, N)), "weights": (drawn(0.3, (1, 1, N, N), seed=2),)},
    "weights, causal": dict(causal=0, **W),
    "weights, not rescaled": {"valid": per_key(), "weights": (drawn(0.2),)},
    "scores and weights": dict(causal=0, valid=per_key(), **S, **W),
    "two draws of weights": {"causal": 0, "weights": (drawn(0.3, (B, 1, 1, N)), drawn(0.1, seed=9, rescale=True))},
    "the second draw alone": {"valid": per_key(), "weights": (None, drawn(0.1, rescale=True))},
    "all weights dropped": {"weights": (drawn(1.0, rescale=True),)},
    "rate 0": {"scores": drawn(0.0), "weights": (drawn(torch.tensor(0.0, device=DEVICE)),)},
    "rates on the device": {"causal": 0, "scores": HALF, "weights": (drawn(torch.tensor(0.3, device=DEVICE), seed=4, rescale=True),)},
    "full validity": dict(valid=random(B, 1, N, N), **S, **W),
    "validity of a head": dict(valid=random(1, H, 1, N), causal=0, **S),
    "validity of queries": dict(valid=random(B, 1, N, 1), **S),
    "keep": {"valid": per_key(), "keep": random(B, H, N, N, p=0.2)},
    "keep of keys": dict(causal=0, keep=random(B, 1, 1, N, p=0.2), **W),
    "keep and scores": dict(keep=random(N, N), **S),
    "bias": dict(valid=per_key(), bias=torch.randn(1, H, N, N, device=DEVICE).half(), **S, **W),
    "bias of keys": dict(causal=0, bias=torch.randn(B, 1, 1, N, device=DEVICE), scale=-0.3, **S),
    "bias that forbids": dict(bias=forbidding(B, 1, N, N), **S, **W),
    "bias that forbids, causal": dict(causal=0, valid=per_key(), bias=forbidding(H, N, N), keep=random(N, N), **S),
    "bias that forbids keys": dict(bias=forbidding(B, 1, 1, N, p=0.3).bfloat16(), **S, **W),
    "bias that forbids nearly all": {"bias": forbidding(B, H, N, N, p=0.05), "scores": drawn(0.6)},
    "offsets": {"causal": 0, "scores": drawn(0.4, **OFFSETS), "weights": (drawn(0.4, seed=8, rescale=True, **OFFSETS),)},
    "one offset": {"scores": drawn(0.4, first_query=torch.tensor(6, device=DEVICE)), "weights": (drawn(0.4, seed=8, first_query=70),)},
    "offsets of keys": {"scores": drawn(0.4, (B, 1, 1, N), **OFFSETS)},
    "one query": {"Q": 1, "K": 70, "KV": 1, "scores": drawn(0.3, (B, H, 1, 70)), "scale": 3.0},
    "one key": {"Q": N, "K": 1, "scores": drawn(0.3, (B, H, N, 1))},
    "as many key heads": dict(KV=H, causal=0, **S),
    **{f"head size {d}": dict(D=d, causal=0, **S, **W) for d in (8, 32, 64, 72, 80, 96, 128, 256)},
    "views": dict(views=True, causal=0, **S, **W),
    "float16": dict(dtype=torch.float16, causal=0, **S, **W),
    "float32": dict(dtype=torch.float32, causal=0, **S, **W),
    "rows": dict(causal=0, rows=random(B, H, N, 1), valid=per_key(), **S, **W),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_output_gradients_and_counts(name):
    case = dict(CASES[name])
    size = {"Q": N, "K": N, "KV": KV, "D": D, **{key: case.pop(key) for key in ("Q", "K", "KV", "D") if key in case}}
    dtype, views = case.pop("dtype", DTYPE), case.pop("views", False)
    torch.manual_seed(1)

    def leaf(heads, length):
        if views:  # a part of one projection
            x = torch.randn(B, length, heads, 3 * size["D"], device=DEVICE, dtype=dtype)
            return x[..., size["D"] : 2 * size["D"]].transpose(1, 2).requires_grad_()
        return torch.randn(B, heads, length, size["D"], device=DEVICE, dtype=dtype, requires_grad=True)

    leaves = leaf(H, size["Q"]), leaf(size["KV"], size["K"]), leaf(size["KV"], size["K"])
    counts = torch.tensor([100], device=DEVICE)
    out = kernels.attention(*leaves, counts=counts, **case)
    assert out.dtype == dtype
    assert out.shape == leaves[0].shape
    assert out.transpose(1, 2).is_contiguous()
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    expected, lost, dead, empty = formula(*doubles, **case)
    for mine, true in zip(
        (out, *grads), (expected, *torch.autograd.grad(expected, doubles, grad.double())), strict=True
    ):
        true = true.detach()
        error = float((mine.detach().double() - true).abs().max() / true.abs().max().clamp(min=LEAST[dtype]))
        assert error < TOLERANCE[dtype]
    assert int(counts) == 100 + lost
    assert not out[empty].any()
    assert not grads[0][(dead.squeeze(-1)) | empty].any()
    if name == "dead rows":
        assert dead.any()
        assert empty.any()


def test_counts_are_off_without_their_tensor():
    q = torch.randn(B, H, N, D, device=DEVICE, dtype=DTYPE)
    assert torch.equal(
        kernels.attention(q, q, q, **S),
        kernels.attention(q, q, q, counts=torch.zeros(1, dtype=torch.int64, device=DEVICE), **S),
    )


@pytest.mark.parametrize("kind", ["scores", "weights"])
def test_every_kernel_makes_the_decisions_of_the_hash(kind):
    """They are read from results: where q or k is 0, attention is uniform."""
    size = 16 if DEVICE.type == "cpu" else 64
    draw = drawn(0.4, (B, H, size, size), seed=-(2**62) - 5)
    given = {"scores": draw} if kind == "scores" else {"weights": (draw,)}
    eye = torch.eye(size, device=DEVICE, dtype=DTYPE).expand(B, H, size, size).contiguous()
    zero, keep = torch.zeros_like(eye), draw.written_out()
    grad = (
        torch.linspace(0.5, 1.5, size, device=DEVICE, dtype=eye.dtype).expand_as(eye)
        if kind == "scores"
        else torch.ones_like(eye)
    )
    q, k = zero.clone().requires_grad_(), eye.clone().requires_grad_()
    out = kernels.attention(q, k, eye, **given)
    assert torch.equal(out > 0, keep)
    out.backward(grad)
    seen = q.grad != 0 if kind == "scores" else q.grad > 0
    assert int((seen != keep).sum()) <= keep.numel() // 500  # a gradient may round to 0
    q, k = eye.clone().requires_grad_(), zero.clone().requires_grad_()
    kernels.attention(q, k, eye, **given).backward(grad)
    seen = (k.grad != 0 if kind == "scores" else k.grad > 0).mT
    assert int((seen != keep).sum()) <= keep.numel() // 500


def test_autocast():
    q = torch.randn(B, H, N, D, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, torch.float16):
        out = kernels.attention(q, q.detach().half(), q)
    assert out.dtype == torch.float16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_nothing_to_attend_to():
    q, k = torch.randn(B, H, N, D, device=DEVICE, requires_grad=True), torch.randn(B, H, 0, D, device=DEVICE)
    out = kernels.attention(q, k, k)
    assert out.shape == q.shape
    assert not out.any()


def test_second_derivatives_are_refused():
    q = torch.randn(B, H, N, D, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(kernels.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


X, WIDE = torch.zeros(B, H, N, D), torch.zeros(B, H, N, 272)
test_what_does_not_fit_is_refused = refused(
    (lambda: kernels.attention(X, torch.zeros(B, 3, N, D), X), "Expected query"),
    (lambda: kernels.attention(X, X, torch.zeros(B, H, N + 1, D)), "Expected query"),
    (lambda: kernels.attention(X.double(), X, X), "one of float16, bfloat16 and float32, got float64"),
    (lambda: kernels.attention(WIDE, WIDE, WIDE), "at most 256"),
    (lambda: kernels.attention(X, X, X, bias=torch.zeros(N, N, requires_grad=True)), "trained"),
    (lambda: kernels.attention(X, X, X, weights=(None,) * 3), "at most two"),
    (lambda: kernels.attention(X, X, X, scores=drawn(0.1, (B, H, N, N + 1))), "Expected decisions"),
    (lambda: kernels.attention(X, X, X, scores=drawn(0.1, (3, H, N, N))), "Expected decisions"),
    (lambda: kernels.attention(X, X, X, scores=drawn(0.1, samples=torch.arange(3))), "2 samples"),
    (lambda: kernels.attention(X, X, X, scores=drawn(0.1, first_query=torch.arange(N))), "2 samples"),
    error=InputError,
)
