"""DropKey: keys are dropped at their rate, and who shares a draw."""

import math

import pytest
import torch
from torch import nn

import attnreg
from attnreg.draws import Draws
from tests.reference import close

SHAPE = (40, 4, 30, 30)


@pytest.mark.parametrize("share_heads", [False, True])
@pytest.mark.parametrize("share_queries", [False, True])
def test_who_shares_a_draw(share_heads, share_queries):
    torch.manual_seed(0)
    provider = attnreg.DropKey(0.3, share_heads=share_heads, share_queries=share_queries)
    scores = provider(attnreg.AttentionSite(shape=SHAPE)).scores
    assert scores.shape == (40, 1 if share_heads else 4, 1 if share_queries else 30, 30)
    assert close((~scores).float().mean(), 0.3, scores.numel())
    keep = scores.expand(SHAPE)
    assert (keep[:, 0] == keep[:, 1]).all() == share_heads
    assert (keep[:, :, 0] == keep[:, :, 1]).all() == share_queries
    for dim in (0, 3):  # samples and keys are independent
        agree = (keep.select(dim, 0) == keep.select(dim, 1)).float().mean()
        effective = scores.numel() / scores.shape[dim]
        assert close(agree, 0.3**2 + 0.7**2, effective)


def test_output_of_a_model_is_attention_over_the_keys_that_are_left():
    """Against attention written as a loop over rows, in float64; a row without a key is uniform."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True, bias=False).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    provider = attnreg.DropKey(0.6)
    with attnreg.attach(attention, provider, example_inputs=(x, x, x)) as handle:
        got = attention(x, x, x, need_weights=False)[0]
    draws = Draws(attnreg.functional.fold_seed(handle.seed, 0))
    keep = provider(attnreg.AttentionSite(shape=(3, 2, 4, 4), draws=draws)).scores
    assert not keep.any(-1).all()
    attention.requires_grad_(False)
    q, k, v = (x @ w.T for w in attention.in_proj_weight.chunk(3))
    out = torch.zeros_like(x)
    for b in range(3):
        for h in range(2):
            part = slice(3 * h, 3 * h + 3)
            for i in range(4):
                left = [j for j in range(4) if keep[b, h, i, j]]
                scores = {j: math.exp(float(q[b, i, part] @ k[b, j, part]) / math.sqrt(3)) for j in left}
                weights = {j: s / sum(scores.values()) for j, s in scores.items()} or dict.fromkeys(range(4), 1 / 4)
                for j, weight in weights.items():
                    out[b, i, part] += weight * v[b, j, part]
    assert (got - out @ attention.out_proj.weight.T).abs().max() < 1e-12
