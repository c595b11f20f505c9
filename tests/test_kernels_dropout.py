"""Dropout from a seed in one launch, and the factors of DropHead: the bits of the torch way."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnreg import functional, kernels
from attnreg.errors import InputError
from tests.helpers.cases import refused
from tests.helpers.kernel_cases import DEVICE, MARKS

dropping = pytest.importorskip("attnreg.kernels.device.dropping", reason="needs Triton")
pytestmark = MARKS
B, T, C = 3, 5, 40
SAMPLES = torch.tensor([4, 9, 0], device=DEVICE)
FIRST = torch.tensor([-1, 5, 0], device=DEVICE).view(B, 1, 1)
CASES = {  # shape of x, of decisions, and their places
    "vector": ((C,), None, {}),
    "rows": ((B, C), None, {}),
    "hidden": ((B, T, C), None, {}),
    "hidden, as the model's own": ((B, T, C), (B, 1, T, C), {"samples": SAMPLES, "first_query": FIRST}),
    "weights": ((B, 2, T, T), None, {"samples": SAMPLES, "first_query": 7 - FIRST, "first_key": FIRST}),
    "features": ((B, T, C), (B, 1, 1, C), {}),
    "tokens": ((B, T, C), (B, 1, T, 1), {"samples": SAMPLES, "first_query": FIRST}),
    "samples": ((B, C), (B, 1, 1, 1), {}),
    "all samples": ((B, T, C), (1, 1, T, C), {}),
    "wide": ((2, 700), None, {}),
}


def keep_of(seed, p, x, shape, place):
    shape = ((1,) * (4 - x.ndim) + tuple(x.shape)) if shape is None else shape
    keep = functional.seeded_keep(seed, shape, p, device=DEVICE, **place)
    if keep.numel() == x.numel():
        return keep.view(x.shape)
    return keep.expand(x.shape[0], *(1,) * (4 - x.ndim), *x.shape[1:]).reshape(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type != "cpu" else [])])
@pytest.mark.parametrize("name", CASES)
def test_output_gradient_and_counts(name, dtype):
    size, shape, place = CASES[name]
    x = torch.randn(size, device=DEVICE).to(dtype)
    x.view(-1)[::3] = 0
    x.requires_grad_()
    for p in (0.3, torch.tensor(0.3, device=DEVICE), 1.0):
        for rescale in (True, False):
            counts = torch.tensor([10, 100], device=DEVICE)
            out = kernels.dropout(x, 5, p, shape=shape, rescale=rescale, counts=counts, **place)
            keep = keep_of(5, p, x, shape, place)
            # rounded once: on a GPU, torch divides numbers in half precision by a divisor that it has rounded, too
            factor = (keep.float() / (1 - p + (p == 1) if rescale else 1)).to(dtype)
            assert torch.equal(out, x * factor)
            grad = torch.randn_like(x)
            assert torch.equal(torch.autograd.grad(out, x, grad)[0], grad * factor)
            there = x != 0
            assert counts.tolist() == [10 + int((there & ~keep).sum()), 100 + int(there.sum())]


def test_only_valid_tokens_are_counted():
    x, valid = torch.randn(B, T, C, device=DEVICE), torch.rand(B, T, device=DEVICE) < 0.5
    for p in (0.0, 0.4):
        counts = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        kernels.dropout(x, 5, p, valid=valid, counts=counts)
        lost = valid[..., None] & ~functional.seeded_keep(5, x.shape, p, device=DEVICE)
        assert counts.tolist() == [int(lost.sum()), int(valid.sum()) * C]


def test_views_and_second_derivatives():
    x = torch.randn(T, B, C, device=DEVICE, requires_grad=True)
    out = kernels.dropout(x.transpose(0, 1), 5, 0.3)
    keep = functional.seeded_keep(5, (B, T, C), 0.3, device=DEVICE)
    assert torch.equal(out > 0, (x.transpose(0, 1) > 0) & keep)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, (keep / (0.7 * 0.7) * 2).transpose(0, 1))


test_what_does_not_fit_is_refused = refused(
    (lambda: kernels.dropout(torch.zeros(2, 2, dtype=torch.float64), 5, 0.1), "float16, bfloat16 or float32"),
    (lambda: kernels.dropout(torch.zeros(1, 1, 1, 1, 1), 5, 0.1), "four dimensions"),
    (lambda: kernels.dropout(torch.zeros(B, T, C), 5, 0.1, shape=(B, 1, 2, C)), "broadcasts"),
    (lambda: kernels.dropout(torch.zeros(B, T, C), 5, 0.1, samples=torch.arange(2)), "samples"),
    (lambda: kernels.dropout(torch.zeros(B, T, C), 5, 0.1, valid=torch.ones(B, T + 1)), "valid"),
    error=InputError,
)


@pytest.mark.parametrize("heads", [1, 2, 12, 33])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.9, 1.0, torch.tensor(0.5)])
def test_factors_of_heads(heads, p):
    for samples in (None, torch.randperm(70, device=DEVICE)):
        u = functional.seeded_uniform(9, (70, heads), device=DEVICE, samples=samples)
        keep = functional.sample_heads(p, u)
        expected = keep.float() * (heads / keep.sum(1, keepdim=True))
        rate = p.to(DEVICE) if isinstance(p, torch.Tensor) else p
        mine = kernels.head_factors(9, 70, heads, rate, device=DEVICE, samples=samples)
        assert torch.equal(mine, expected)
    half = kernels.head_factors(9, 70, heads, rate, device=DEVICE, dtype=torch.float16, samples=samples)
    assert torch.equal(half, expected.half())


def test_compiled_code_serves_all_seeds_and_rates():
    counter = CompileCounterWithBackend("aot_eager")

    def call(x, seed, p, counts):
        out = kernels.dropout(x, seed, p, shape=(B, 1, T, C), samples=SAMPLES, counts=counts)
        return out, kernels.head_factors(seed, B, 4, p, device=DEVICE, samples=SAMPLES)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    x = torch.randn(B, T, C, device=DEVICE, requires_grad=True)
    for seed, p in ((3, 0.4), (-9, 0.1)):
        results = []
        for each in (call, compiled):
            counts = torch.zeros(2, dtype=torch.int64, device=DEVICE)
            out, factors = each(x, torch.tensor(seed), torch.tensor(p), counts)
            results.append((out, factors, counts, *torch.autograd.grad(out.square().sum(), x)))
        assert all(torch.equal(mine, other) for mine, other in zip(*results, strict=True))
        assert results[0][2].all()
    assert counter.frame_count == 1


def test_operators_pass_the_checks_of_torch():
    x = torch.randn(B, T, C, device=DEVICE, requires_grad=True)
    rest = torch.tensor(3), torch.tensor(0.4), SAMPLES, None, None
    torch.library.opcheck(dropping.dropout_op, (x, *rest, [0, 1, 1, 1, B, 1, T, C, 1, 1], None, True))
    torch.library.opcheck(dropping.head_factors_op, (*rest[:3], B, 4, torch.float32, DEVICE))
