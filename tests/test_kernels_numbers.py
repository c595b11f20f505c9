"""Random numbers and decisions in one launch: the bits of the torch way."""

import pytest
import torch

from attnreg import functional, kernels
from attnreg.functional import seeded
from tests.helpers.kernel_cases import DEVICE, MARKS

pytestmark = MARKS
TABLE = torch.tensor([3, 2**27, -5], device=DEVICE).view(3, 1, 1)
PLACES = {
    "none": {},
    "first query": {"first_query": 9},
    "0-d": {"first_query": torch.tensor(9, device=DEVICE)},
    "tables": {"first_query": TABLE, "first_key": -TABLE, "samples": torch.tensor([2, 0, 2**23 - 1], device=DEVICE)},
    "fewer bits": {"first_query": TABLE.int(), "first_key": TABLE.int()},
}


def in_torch(call, *arguments, **options):
    """The written-out way, on the CPU."""
    moved = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "runs_on", lambda device: False)
        return call(*arguments, **moved).to(DEVICE)


@pytest.fixture
def launches(monkeypatch):
    """What a kernel has written, and what not."""
    seen, original = [], kernels.numbers
    monkeypatch.setattr(kernels, "numbers", lambda *given: seen.append(original(*given)) or seen[-1])
    return seen


@pytest.mark.parametrize("seed", [0, 7, -3, 2**63 - 1, 12345678901234567, torch.tensor(-(2**62))])
@pytest.mark.parametrize("shape", [(2, 3, 9, 21), (5, 9), (4,), (), (3, 17, 21), (2, 2, 1, 3, 600), (0, 3)])
def test_the_same_bits(seed, shape, launches):
    assert torch.equal(
        functional.seeded_uniform(seed, shape, device=DEVICE), in_torch(functional.seeded_uniform, seed, shape)
    )
    for p in (
        0.0,
        0.1,
        0.5,
        1.0,
        3,
        torch.tensor(0.0, device=DEVICE),
        torch.tensor(0.3, device=DEVICE),
        torch.tensor(0.3, dtype=torch.float64),
    ):
        mine = functional.seeded_keep(seed, shape, p, device=DEVICE)
        assert mine.device == DEVICE
        assert torch.equal(
            mine, in_torch(functional.seeded_keep, seed, shape, p.cpu() if isinstance(p, torch.Tensor) else p)
        )
    assert len(launches) == 9
    assert not any(each is None for each in launches)


@pytest.mark.parametrize("place", PLACES)
def test_places(place, launches):
    given = (11, (3, 2, 9, 21)), PLACES[place]
    assert torch.equal(
        functional.seeded_uniform(*given[0], device=DEVICE, **given[1]),
        in_torch(functional.seeded_uniform, *given[0], **given[1]),
    )
    assert launches[0] is not None
    keep = functional.seeded_keep(*given[0], 0.4, device=DEVICE, **given[1])
    assert torch.equal(keep, in_torch(functional.seeded_keep, *given[0], 0.4, **given[1]))
    assert launches[1] is not None


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ((3, 2, 9, 21), {"first_query": torch.arange(9, device=DEVICE)}),
        (
            (2, 9, 21),
            {"samples": torch.tensor([4, 1], device=DEVICE), "first_query": torch.tensor([[3], [1]], device=DEVICE)},
        ),
        ((2, 9), {"samples": torch.tensor([4, 1], device=DEVICE)}),
    ],
)
def test_other_places_are_left_to_torch(shape, place, launches):
    assert torch.equal(
        functional.seeded_keep(5, shape, 0.5, device=DEVICE, **place),
        in_torch(functional.seeded_keep, 5, shape, 0.5, **place),
    )
    assert launches == [None]


def test_all_numbers_of_a_rate_on_the_edge():
    """The lowest number is dropped at the smallest rate, and kept at 0, on the device, too."""
    shape = (64, 512)
    u = functional.seeded_uniform(3, shape, device=DEVICE)
    for p in (float(u.min()), float(u.max()), 2.0**-24):
        for rate in (p, torch.tensor(p, device=DEVICE)):
            assert torch.equal(functional.seeded_keep(3, shape, rate, device=DEVICE), u >= p)


def test_transforms_go_the_other_way(launches):
    found = torch.vmap(lambda x: x * functional.seeded_keep(5, (4, 4), 0.5, device=DEVICE))(
        torch.ones(2, 4, 4, device=DEVICE)
    )
    assert not launches
    assert torch.equal(found[1] > 0, functional.seeded_keep(5, (4, 4), 0.5, device=DEVICE))


def test_compiled_code_serves_all_seeds_and_rates():
    compiled = []

    def backend(module, inputs):
        compiled.append([node.target for node in module.graph.nodes])
        return module.forward

    @torch.compile(backend=backend, fullgraph=True)
    def draw(seed, p):
        return functional.seeded_keep(seed, (2, 3, 5, 7), p, device=DEVICE), seeded.seeded_uniform(
            seed, (4, 2), device=DEVICE
        )

    for seed, p in ((3, 0.5), (-4, 0.25)):
        keep, numbers = draw(torch.tensor(seed), torch.tensor(p, device=DEVICE))
        assert torch.equal(keep, in_torch(functional.seeded_keep, seed, (2, 3, 5, 7), p))
        assert torch.equal(numbers, in_torch(functional.seeded_uniform, seed, (4, 2)))
    assert len(compiled) == 1
    assert sum("numbers" in str(target) for target in compiled[0]) == 2
