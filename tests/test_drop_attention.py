"""DropAttention: windows, columns, rates, and rows that sum to 1."""

import math

import pytest
import torch

import attnreg
from attnreg import functional
from tests.reference import gradients

SITE = attnreg.AttentionSite(shape=(4, 8, 30, 30))


@pytest.mark.parametrize("p", [0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_every_key_is_dropped_at_the_rate_of_overlapping_windows(p, window):
    torch.manual_seed(0)
    rows = 20_000
    dropped = ~functional.sample_windows((rows, 6), p, window)
    rate = 1 - (1 - p / window) ** window
    assert ((dropped.float().mean(0) - rate).abs() <= 5 * math.sqrt(rate * (1 - rate) / rows)).all()


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_windows_by_a_loop_over_seeds(window):
    shape, p = (5, 4, 7), 0.6
    kept = functional.sample_windows(shape, p, window, generator=torch.Generator().manual_seed(3))
    uniform = torch.rand(5, 4, 7 + window - 1, generator=torch.Generator().manual_seed(3))
    slow = torch.ones(shape, dtype=torch.bool)
    for b in range(5):
        for i in range(4):
            for seed in range(7 + window - 1):
                if uniform[b, i, seed] < p / window:
                    for key in range(seed - window + 1, seed + 1):
                        if 0 <= key < 7:
                            slow[b, i, key] = False
    assert torch.equal(kept, slow)


@pytest.mark.parametrize("mode", ["element", "column"])
def test_columns_are_the_same_in_all_rows_of_a_head(mode):
    torch.manual_seed(0)
    mask = attnreg.DropAttention(0.5, mode)(SITE)
    keep = mask.normalized.expand(SITE.shape)
    assert (keep == keep[:, :, :1]).all() == (mode == "column")
    assert not (keep == keep[:, :1]).all()
    assert not (keep == keep[:1]).all()
    assert mask.normalized.dtype == torch.bool


def attended(provider, valid=None):
    """Output, and gradients with respect to query, key and value, of a site under a seed."""
    torch.manual_seed(5)
    inputs = [torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    site = attnreg.AttentionSite(shape=(2, 2, 5, 5), valid=valid, dtype=torch.float64)
    mask = provider(site)
    weights = functional.attention_weights(*inputs[:2], valid, keep=mask.scores)
    weights = mask.of_weights(weights, valid)
    out = weights @ inputs[2]
    return weights, out, gradients(out, *inputs)


@pytest.mark.parametrize("mode", ["element", "column"])
def test_rows_sum_to_one_and_the_sum_has_no_gradient(mode):
    valid = torch.tensor([[True] * 5, [True] * 2 + [False] * 3]).view(2, 1, 1, 5)
    constant = attended(attnreg.DropAttention(0.7, mode, 2), valid)
    through = attended(Through(0.7, mode, 2), valid)
    for weights, _, _ in (constant, through):
        assert (weights.sum(-1) - 1).abs().max() < 1e-12
        assert (weights.masked_select(~valid.expand_as(weights)) == 0).all()
    assert (constant[1] - through[1]).abs().max() < 1e-12
    assert (constant[2][0] - through[2][0]).abs().max() > 1e-3
    assert (constant[2][2] - through[2][2]).abs().max() < 1e-12


class Through(attnreg.DropAttention):
    """Drops scores, which equals a gradient through the sum."""

    def forward(self, site):
        return attnreg.Mask(scores=super().forward(site).normalized)


def test_a_row_of_which_everything_is_dropped_is_uniform():
    weights, _, grads = attended(attnreg.DropAttention(1.0))
    assert (weights - 0.2).abs().max() < 1e-12
    assert grads[0].abs().max() == 0
