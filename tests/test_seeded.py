"""Random numbers by hash: their formula, and that they look random. Bounds are five standard deviations."""

import itertools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnreg import functional
from attnreg.functional import seeded

M32, M64 = 2**32, 2**64
SHAPE = (8, 6, 64, 64)


def mixed(x):
    """The finalizer of splitmix64."""
    x %= M64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % M64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % M64
    return x ^ (x >> 31)


def number(seed, b, h, q, k):
    """The formula in whole numbers of Python."""
    row = mixed(mixed(seed) + (b << 40) + (h << 28) + q)
    x = (row % M32 + k * 0x9E3779B1) % M32
    x = (x ^ (x >> 16)) * 0x7FEB352D % M32 ^ (row >> 32)
    x = (x ^ (x >> 15)) * 0x846CA68B % M32
    x ^= x >> 16
    return ((x ^ 2**31) >> 8) / 2**24


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 - 1, 123456789012345])
def test_the_formula(seed):
    shape = 2, 3, 4, 5
    whole, kept = functional.seeded_uniform(seed, shape), functional.seeded_keep(seed, shape, 0.3)
    for place in itertools.product(*map(range, shape)):
        assert float(whole[place]) == number(seed, *place)
        at = [torch.tensor(index) for index in place]
        assert float(functional.uniform_at(torch.tensor(seed), *at)) == number(seed, *place)
        assert bool(kept[place]) == (number(seed, *place) >= 0.3)


def test_large_indices():
    for place in ((2**23 - 1, 0, 0, 0), (0, 2**12 - 1, 5, 10**9), (3, 2, 2**28 - 1, 2**31)):
        at = [torch.tensor(index) for index in place]
        assert float(functional.uniform_at(7, *at)) == number(7, *place)


def test_in_parts_or_at_once_it_is_the_same(monkeypatch):
    shape = 5, 3, 7, 11
    whole = functional.seeded_keep(4, shape, 0.4)
    monkeypatch.setattr(seeded, "CHUNK", 30)
    seeded._rows_and_steps.cache_clear()
    assert torch.equal(functional.seeded_keep(4, shape, 0.4), whole)
    seeded._rows_and_steps.cache_clear()
    monkeypatch.setattr(seeded, "is_traced", lambda: True)
    assert torch.equal(functional.seeded_keep(4, shape, 0.4), whole)
    assert torch.equal(functional.seeded_keep(4, shape, torch.tensor(0.4)), whole)
    assert torch.equal(functional.seeded_uniform(4, shape) >= 0.4, whole)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 2, 3), (2, 2, 3, 2, 3), (0, 2, 3, 3), (2, 2, 3, 0)])
def test_any_number_of_dimensions(shape):
    uniform = functional.seeded_uniform(9, shape)
    assert uniform.shape == functional.seeded_keep(9, shape, 0.5).shape == shape
    lead = math.prod(shape[:-3])
    of_four = functional.seeded_uniform(9, (lead, *[1] * (3 - len(shape[-3:])), *shape[-3:]))
    assert torch.equal(uniform.flatten(), of_four.flatten())


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 2, 4, 5)])
def test_samples_of_a_larger_batch(shape):
    whole, rows = functional.seeded_uniform(9, (7, *shape[1:])), torch.tensor([6, 0, 3])
    assert torch.equal(functional.seeded_uniform(9, shape, samples=rows), whole[rows])


def test_places_ahead():
    whole = functional.seeded_uniform(9, (2, 3, 9, 8))
    shifted = functional.seeded_uniform(9, (2, 3, 4, 5), first_query=5, first_key=torch.tensor(3))
    assert torch.equal(shifted, whole[:, :, 5:, 3:])
    first = torch.tensor([-2, 0]).view(2, 1, 1)
    behind = functional.seeded_uniform(9, (2, 3, 4, 5), first_query=first, first_key=first)
    assert torch.equal(behind[0, :, 2:, 2:], whole[0, :, :2, :3])
    assert torch.equal(behind[1], whole[1, :, :4, :5])


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.7, 1 - 2**-24, 1.0])
def test_rates(p):
    keep = functional.seeded_keep(11, SHAPE, p)
    assert torch.equal(keep, functional.seeded_uniform(11, SHAPE) >= p)
    assert torch.equal(keep, functional.seeded_keep(11, SHAPE, torch.tensor(p, dtype=torch.float64)))
    n = keep.numel()
    assert abs(float(keep.double().mean()) - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / n) + 1e-7
    assert keep.all() or p > 0
    assert not keep.any() or p < 1


@pytest.mark.parametrize("p", [math.nan, torch.tensor(math.nan), torch.full((3, 1, 1), 0.1)])
def test_what_is_no_rate_is_refused(p):
    with pytest.raises((ValueError, RuntimeError)):
        functional.seeded_keep(11, SHAPE, p)


def test_an_integer_is_a_rate():
    assert functional.seeded_keep(11, SHAPE, 0).all()
    assert not functional.seeded_keep(11, SHAPE, 1).any()


def test_every_row_column_head_and_sample_has_the_rate():
    dropped = (~functional.seeded_keep(5, SHAPE, 0.3)).double()
    for dims in itertools.chain(itertools.combinations(range(4), 2), itertools.combinations(range(4), 3)):
        n = math.prod(SHAPE[dim] for dim in dims)
        z = (dropped.mean(dims) - 0.3) / math.sqrt(0.3 * 0.7 / n)
        assert z.abs().max() < 5.5
        assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / z.numel())  # neither too even nor too uneven


def correlation(a, b):
    """In standard deviations of that of independent numbers."""
    return abs(float((a * b).mean())) * 12 * math.sqrt(a.numel())


def test_neighbours_are_independent():
    u = functional.seeded_uniform(5, SHAPE).double() - 0.5
    for dim in range(4):
        for distance in (1, 2, 3):
            length = SHAPE[dim] - distance
            assert correlation(u.narrow(dim, 0, length), u.narrow(dim, distance, length)) < 5
    assert correlation(u[..., :-1, :-1], u[..., 1:, 1:]) < 5
    assert correlation(u, u.transpose(-1, -2)) < 5 * math.sqrt(2)


def test_seeds_are_independent():
    seeds = [0, 1, 2, -1, 2**40, functional.fold_seed(0, 1), functional.fold_seed(0, 2), functional.fold_seed(1, 1)]
    drawn = [functional.seeded_uniform(seed, SHAPE).double() - 0.5 for seed in seeds]
    for a, b in itertools.combinations(drawn, 2):
        assert correlation(a, b) < 5
        assert correlation(a[..., 1:], b[..., :-1]) < 5


def test_each_bit_of_a_number_is_a_fair_coin():
    u = (functional.seeded_uniform(8, SHAPE) * 2**24).to(torch.int32)
    for bit in range(24):
        ones = ((u >> bit) & 1).double().mean()
        assert abs(float(ones) - 0.5) < 5 * 0.5 / math.sqrt(u.numel())


def test_seeds_that_follow_from_a_seed():
    folded = {functional.fold_seed(3, number) for number in range(-2, 10_000)}
    assert len(folded) == 10_002
    assert int(functional.fold_seed(torch.tensor(3), 5)) == functional.fold_seed(3, 5)


def test_compiled_it_is_the_same_and_one_graph_serves_all_seeds():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def drawn(seed):
        return functional.seeded_keep(seed, (2, 3, 5, 7), 0.3), functional.seeded_uniform(seed, (2, 3))

    compiled = torch.compile(drawn, backend=counter, fullgraph=True)
    for seed in (1, 2**61, -5):
        for ours, theirs in zip(compiled(torch.tensor(seed)), drawn(seed), strict=True):
            assert torch.equal(ours, theirs)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_the_same(monkeypatch):
    for p in (0.1, 0.5):
        here = functional.seeded_keep(3, SHAPE, p)
        for given, at_once in ((p, 2**24), (torch.tensor(p, device="cuda"), 30)):
            monkeypatch.setattr(seeded, "GPU_CHUNK", at_once)
            assert torch.equal(functional.seeded_keep(3, SHAPE, given, device=torch.device("cuda")).cpu(), here)
    there = functional.seeded_uniform(3, SHAPE, device=torch.device("cuda"))
    assert torch.equal(there.cpu(), functional.seeded_uniform(3, SHAPE))


def test_only_cuda_is_not_waited_for(monkeypatch):
    """Elsewhere, a copy may read numbers that are freed already."""
    asked = {}
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, *, non_blocking: asked.setdefault(device, non_blocking)
    )
    for kind in ("cpu", "mps", "cuda"):
        seeded.on_device([0.5], torch.device(kind))
    assert [*asked.values()] == [False, False, True]
