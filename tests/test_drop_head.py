"""DropHead: which heads go, what is made of the others, and at what rate."""

import math

import pytest
import torch
from torch import nn

import attnreg
from attnreg import functional
from attnreg.draws import Draws
from tests.reference import close

SITE = attnreg.AttentionSite(shape=(5000, 4, 3, 3), num_layers=2)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_heads_are_dropped_at_their_rate_and_never_all(p):
    torch.manual_seed(0)
    heads = 4
    keep = functional.sample_heads(p, (20_000, heads))
    assert keep.any(1).all()
    rate = 1 - p + p**heads / heads
    assert all(close(keep[:, h].float().mean(), rate, len(keep)) for h in range(heads))
    for number in range(1, heads + 1):
        expected = math.comb(heads, number) * (1 - p) ** number * p ** (heads - number)
        expected += p**heads if number == 1 else 0.0  # all dropped, one comes back
        assert close((keep.sum(1) == number).float().mean(), expected, len(keep))


def test_kept_heads_make_up_for_dropped_ones():
    torch.manual_seed(0)
    keep = functional.sample_heads(0.6, (50, 6))
    factors = functional.rescaled_heads(keep)
    for b in range(50):
        number = sum(bool(keep[b, h]) for h in range(6))
        for h in range(6):
            assert float(factors[b, h]) == pytest.approx(6 / number if keep[b, h] else 0.0)


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_factors_are_one_on_average_and_differ_by_sample(p):
    torch.manual_seed(0)
    weights = attnreg.DropHead(p)(SITE).weights
    assert weights.shape == (5000, 4, 1, 1)
    assert weights.dtype == SITE.dtype
    assert torch.allclose(weights.sum(1), torch.tensor(4.0))
    for h in range(4):
        of_head = weights[:, h]
        assert abs(of_head.mean() - 1) < 5 * of_head.std() / math.sqrt(len(of_head))
    assert len(weights.flatten(1).unique(dim=0)) > 4


def test_output_of_a_model_is_the_sum_over_kept_heads():
    """Against multi-head attention written as a loop over heads, in float64."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 4, batch_first=True, bias=False).double()
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    with attnreg.attach(attention, attnreg.DropHead(0.5), example_inputs=(x, x, x)) as handle:
        got = attention(x, x, x, need_weights=False)[0]
    draws = Draws(functional.fold_seed(handle.seed, 0))
    keep = functional.sample_heads(0.5, (3, 4), uniform=draws.uniform((3, 4)))
    assert not keep.all()
    q, k, v = (x @ w.T for w in attention.in_proj_weight.chunk(3))
    for b in range(3):
        expected = torch.zeros(5, 12, dtype=torch.float64)
        for h in range(4):
            part = slice(3 * h, 3 * h + 3)
            a = torch.softmax(q[b, :, part] @ k[b, :, part].T / math.sqrt(3), -1)
            if keep[b, h]:
                expected += 4 / int(keep[b].sum()) * (a @ v[b, :, part]) @ attention.out_proj.weight[:, part].T
        assert (got[b] - expected).abs().max() < 1e-7  # the factors are float32
