"""AD-DROP's candidate region in one launch: that of the attributions written out."""

import pytest
import torch

from attnreg import functional, kernels
from attnreg.errors import InputError
from tests.helpers.cases import refused
from tests.helpers.kernel_cases import DEVICE, DTYPE, MARKS

pytestmark = MARKS
B, H, Q = 2, 2, 19


def integers(*shape, ties=False):
    """Numbers whose products have no rounding error, so that all ways to sum them rank alike; with few, many ties."""
    most = 3 if ties else 200
    return torch.randint(-most, most + 1, shape, device=DEVICE).float()


def factors(keys, size, *, heads=H, ties=False, dtype=torch.float32):
    gradient, value = integers(B, H, Q, size, ties=ties), integers(B, heads, keys, size, ties=ties)
    gradient[0, 1, 2] = 0  # all attributions are equal
    return gradient.to(dtype), value.to(dtype)


def valid_of(kind, keys):
    return {
        "none": None,
        "keys": torch.arange(keys, device=DEVICE) < keys - 3,
        "padding": (torch.arange(keys, device=DEVICE) < torch.tensor([[keys // 3], [0]], device=DEVICE))[:, None, None],
        "causal": torch.ones(Q, keys, dtype=torch.bool, device=DEVICE).tril(),
        "scores": torch.rand(B, H, Q, keys, device=DEVICE) < 0.7,
        "transposed": (torch.rand(B, keys, Q, H, device=DEVICE) < 0.7).transpose(1, 3),
    }[kind]


def expected(gradient, value, valid, p, region):
    return functional.candidate_region(functional.weights_gradient(gradient, value), valid, p, region)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("region", ["high", "low"])
@pytest.mark.parametrize("kind", ["none", "keys", "padding", "causal", "scores", "transposed"])
def test_regions_are_those_of_written_out_attributions(kind, region, ties):
    (gradient, value), valid = factors(23, 8, ties=ties), valid_of(kind, 23)
    for p in (0.0, 0.3, 0.5, 1e-12, 1.0):
        found = kernels.region(gradient, value, valid, p, region)
        assert torch.equal(found, expected(gradient, value, valid, p, region)), p


@pytest.mark.parametrize(("keys", "size", "heads"), [(1, 4, 2), (2, 4, 1), (64, 256, 2), (130, 40, 1), (600, 3, 2)])
def test_all_sizes(keys, size, heads):
    gradient, value = factors(keys, size, heads=heads, dtype=torch.float16 if size < 40 else torch.float32)
    for region in ("high", "low"):
        found = kernels.region(gradient, value, valid_of("causal", keys), 0.3, region)
        assert torch.equal(found, expected(gradient, value, valid_of("causal", keys), 0.3, region))


def test_the_share_of_keys_is_rounded_as_in_the_other_way():
    keys = 200
    gradient, value = factors(keys, 2)
    valid = torch.arange(keys, device=DEVICE) < torch.randint(1, keys, (B, H, Q, 1), device=DEVICE)
    for p in (0.7, 0.1, 0.29, 0.57, 1 / 7):
        for region in ("high", "low"):
            found = kernels.region(gradient, value, valid, p, region)
            assert torch.equal(found, expected(gradient, value, valid, p, region)), p


@pytest.mark.parametrize("region", ["high", "low"])
def test_infinite_numbers_tiny_ones_and_no_numbers(region):
    gradient = torch.ones(1, 1, 5, 1, device=DEVICE)
    for special in (torch.inf, -torch.inf, torch.nan, -torch.nan, -0.0, 1e-45, 3e38):
        value = torch.tensor([1.0, special, -2.0, 0.0, 5.0, special, -1e-45], device=DEVICE).view(1, 1, 7, 1)
        for p in (0.2, 0.3, 0.5, 0.8, 1.0):
            found = kernels.region(gradient, value, None, p, region)
            attribution = value.view(1, 1, 1, 7).expand(1, 1, 5, 7)
            assert torch.equal(found, functional.candidate_region(attribution, None, p, region)), (special, p)


def test_views_and_mixed_dtypes():
    gradient, value = factors(23, 8)
    apart = gradient.transpose(1, 2).contiguous().transpose(1, 2), value.transpose(2, 3).contiguous().transpose(2, 3)
    want = expected(gradient, value, None, 0.3, "high")
    assert torch.equal(kernels.region(*apart, None, 0.3), want)
    assert torch.equal(kernels.region(gradient.half(), value, None, 0.3), want)


def test_the_functional_form_is_one_launch(monkeypatch):
    gradient, value = factors(23, 8)
    found = functional.factored_region(gradient, value, None, 0.3)
    assert torch.equal(found, expected(gradient, value, None, 0.3, "high"))
    calls = []
    monkeypatch.setattr(kernels, "region", lambda *args: calls.append(args) or found)
    functional.factored_region(gradient.requires_grad_(), value, None, 0.3)
    assert len(calls) == 1
    many = torch.zeros(1, 1, 1025, 8, device=DEVICE)
    functional.factored_region(torch.zeros(1, 1, 1, 8, device=DEVICE), many, None, 0.3)
    functional.factored_region(gradient.double(), value.double(), None, 0.3)
    assert len(calls) == 1
    taken = []
    torch.vmap(lambda x: taken.append(kernels.ranks(x, value)) or x)(gradient[None])
    assert taken == [False]


def test_half_precision_is_summed_in_float32():
    gradient, value = (
        torch.randn(B, H, Q, 64, device=DEVICE).to(DTYPE),
        torch.randn(B, 2, 96, 64, device=DEVICE).to(DTYPE),
    )
    found = kernels.region(gradient, value, None, 0.25)
    assert (found.sum(-1) == 24).all()
    attribution = functional.weights_gradient(gradient.double(), value.double())
    least = attribution.masked_fill(~found, torch.inf).amin(-1)
    most = attribution.masked_fill(found, -torch.inf).amax(-1)
    assert (least - most).min() > -1e-4


GRADIENT, VALUE = torch.zeros(B, H, Q, 8), torch.zeros(B, H, 5, 8)
test_what_does_not_fit_is_refused = refused(
    (lambda: kernels.region(GRADIENT, VALUE, None, 1.5), "`p` in"),
    (lambda: kernels.region(GRADIENT, VALUE, None, 0.5, "middle"), "region"),
    (lambda: kernels.region(GRADIENT, torch.zeros(B, H, 1025, 8), None, 0.5), "1024 keys"),
    (lambda: kernels.region(GRADIENT, torch.zeros(B, 3, 5, 8), None, 0.5), "same heads"),
    (lambda: kernels.region(GRADIENT, VALUE.double(), None, 0.5), "float32"),
    error=InputError,
)


def test_compiled_code_and_the_operator():
    gradient, value = factors(23, 8)
    valid = valid_of("padding", 23)
    compiled = torch.compile(functional.factored_region, backend="aot_eager", fullgraph=True)
    for p in (0.3, 0.6):
        assert torch.equal(compiled(gradient, value, valid, p, "low"), expected(gradient, value, valid, p, "low"))
    region_op = torch.ops.attnreg.region
    torch.library.opcheck(region_op, (gradient, value, valid, 0.3, True))
