"""Launches: what is compiled is found again for arguments that are alike, and for no others."""

from types import SimpleNamespace

import pytest
import torch

from attnreg import kernels
from attnreg.kernels import launching
from tests.helpers.kernel_cases import DEVICE, MARKS

CPU = torch.device("cpu")


class Kernel:
    """Notes what Triton would look up, and what is launched directly."""

    __name__ = "kernel"

    def __init__(self):
        self.looked_up, self.direct = [], []

    def __getitem__(self, grid):
        def look_up(*arguments, num_warps, num_stages):
            self.looked_up.append(arguments)
            return {grid: lambda *again: self.direct.append(again)}

        return look_up


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})


def launched(kernel, *arguments, constants=(True, 16), warps=4):
    launching.launch(kernel, (2, 1, 1), CPU, arguments, constants, launching.likeness(arguments), warps=warps)


def test_alike_arguments_are_launched_directly():
    kernel, x = Kernel(), torch.zeros(8)
    launched(kernel, x, 3, 0.5, None, (x, 1.0))
    launched(kernel, x + 1, 3, 0.25, None, (x, 2.0))
    assert len(kernel.looked_up) == 1
    ((_, three, quarter, nothing, (_, two), *constants),) = kernel.direct
    assert (three, quarter, nothing, two, constants) == (3, 0.25, None, 2.0, [True, 16])


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((torch.zeros(8).double(), 3, (torch.zeros(8), 1)), {}),
        ((torch.zeros(8), 16, (torch.zeros(8), 1)), {}),
        ((torch.zeros(8), 3, (torch.zeros(8), 2)), {}),
        ((torch.zeros(8), 3, (None, 1)), {}),
        ((torch.zeros(8), 3.0, (torch.zeros(8), 1)), {}),
        ((torch.zeros(9)[1:], 3, (torch.zeros(8), 1)), {}),  # not aligned
        ((torch.zeros(8), 3, (torch.zeros(9)[1:], 1)), {}),
        ((torch.zeros(8), 3, (torch.zeros(8), 1)), {"constants": (False, 16)}),
        ((torch.zeros(8), 3, (torch.zeros(8), 1)), {"warps": 8}),
    ],
)
def test_others_are_looked_up(arguments, options):
    kernel = Kernel()
    launched(kernel, torch.zeros(8), 3, (torch.zeros(8), 1))
    launched(kernel, *arguments, **options)
    assert len(kernel.looked_up) == 2
    assert not kernel.direct


def test_no_more_than_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(launching, "MOST_COMPILED", 2)
    for length in range(5):
        launched(Kernel(), length)
    assert len(launching._compiled) <= 2


def test_a_device_without_kernels():
    assert not kernels.runs_on(torch.device("meta"))
    with pytest.raises(AttributeError, match="nothing"):
        kernels.nothing  # noqa: B018


@pytest.mark.parametrize(("major", "room", "most"), [(7, 2**16, 0), (8, 100 * 2**10, 1024), (9, 228 * 2**10, 2048)])
def test_matrix_products_need_tensor_cores_and_room(major, room, most, monkeypatch):
    properties = SimpleNamespace(major=major, shared_memory_per_multiprocessor=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernels, "drops", lambda states: True)
    assert kernels.multiplies(torch.device("cuda")) == (major > 7)
    assert kernels.multiplies(CPU)
    gradient = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    for keys in (1024, 2048):
        value = SimpleNamespace(dtype=torch.bfloat16, shape=(1, 1, keys, 64))
        assert kernels.ranks(gradient, value) == (keys <= most)


class TestSmallBlocks:
    pytestmark = MARKS

    def test_they_follow_where_others_are_too_large(self, monkeypatch):
        from triton.runtime.errors import OutOfResources

        from attnreg.kernels.device import launch_attention

        launch, tried = launch_attention.launch, []

        def limited(kernel, *arguments, **options):
            tried.append(options["warps"])
            if options["warps"] == 8:
                raise OutOfResources(300000, 232448, "shared memory")
            launch(kernel, *arguments, **options)

        monkeypatch.setattr(launch_attention, "launch", limited)
        before = dict(launch_attention.CONFIGS)
        monkeypatch.setattr(launch_attention, "CONFIGS", dict.fromkeys(before, (64, 64, 8, 1)))
        q = torch.randn(1, 1, 20, 16, device=DEVICE)
        out = kernels.attention(q, q, q)
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q))
        assert tried == [8, 4]
        assert launch_attention.CONFIGS["query_gradient", "float32"] == launch_attention.SMALL
        monkeypatch.setattr(launch_attention, "SMALL", (64, 64, 8, 1))
        monkeypatch.setattr(launch_attention, "CONFIGS", dict.fromkeys(before, (64, 64, 8, 1)))
        with pytest.raises(OutOfResources):
            kernels.attention(q, q, q)
