"""Kernels as operators of torch: compiled models keep one graph for all seeds and rates."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnreg import kernels
from attnreg.draws import Drawn
from tests.helpers.kernel_cases import DEVICE, DTYPE, MARKS

operators = pytest.importorskip("attnreg.kernels.device.attention", reason="needs Triton")
pytestmark = MARKS
B, H, N, D = 2, 2, 18, 16


def attend(q, k, v, valid, seed, p, first, counts):
    place = {"first_query": 4 - first.view(B, 1, 1), "first_key": -first.view(B, 1, 1), "samples": first + 5}
    scores = Drawn(seed, p, (B, H, N, N), device=DEVICE, **place)
    weights = Drawn(seed + 1, 0.3, (B, 1, N, N), rescale=True)
    return kernels.attention(q, k, v, valid=valid, causal=0, scores=scores, weights=(None, weights), counts=counts)


def inputs():
    torch.manual_seed(0)
    q = torch.randn(B, H, N, D, device=DEVICE, dtype=DTYPE, requires_grad=True)
    k, v = (torch.randn(B, 1, N, D, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(2))
    return q, k, v, torch.rand(B, 1, 1, N, device=DEVICE) < 0.8, torch.tensor([3, 0], device=DEVICE)


def test_one_graph_for_all_seeds_and_rates():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    q, k, v, valid, first = inputs()
    for seed, p in ((3, 0.4), (-9, 0.1)):
        results = []
        for call in (attend, compiled):
            counts = torch.zeros(1, dtype=torch.int64, device=DEVICE)
            out = call(q, k, v, valid, torch.tensor(seed), torch.tensor(p), first, counts)
            results.append((out, counts, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for mine, other in zip(*results, strict=True):
            assert torch.equal(mine, other)
        assert results[0][1] > 0
    assert counter.frame_count == 1


def test_operators_pass_the_checks_of_torch():
    q, k, v, valid, first = inputs()
    lists = [torch.tensor(3)], [torch.tensor(0.4)], [first, None, None]
    arguments = (q, k, v, valid, None, None, None, *lists, [0, 2, 0, 1, 1, 0], None, 0.3, True)
    torch.library.opcheck(operators.attention_op, arguments)


def test_second_derivatives_are_refused():
    q, k, v, valid, _ = inputs()
    arguments = (q, k, v, valid, None, None, None, [], [], [], [], None, 0.3, False)
    out = operators.attention_op(*arguments)[0]
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["attention", "attention_backward", "dropout", "head_factors", "numbers"])
def test_cuda_graphs_leave_out_operators_that_read_their_seeds(name):
    from attnreg.kernels.device import dropping, numbers  # noqa: F401 (they register operators)

    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.attnreg, name).default.tags
