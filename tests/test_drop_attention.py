"""DropAttention, DropHead and DropKey: what is dropped at which rate, and what is made of the rest."""

import copy
import math

import pytest
import torch
from torch import nn

import attnreg
from attnreg import functional
from attnreg.draws import Draws
from attnreg.errors import InputError
from tests.helpers.reference import attention, close, gradients

SITE = attnreg.AttentionSite(shape=(4, 8, 30, 30))


@pytest.mark.parametrize("p", [0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("window", [1, 2, 3, 9, 40])
def test_windows_by_a_loop_over_seeds(window, p):
    uniform = torch.rand(5, 4, 7 + window - 1, generator=torch.Generator().manual_seed(3))
    slow = torch.ones(5, 4, 7, dtype=torch.bool)
    for b, i, seed in (uniform < p / window).nonzero().tolist():
        for key in range(seed - window + 1, seed + 1):
            if 0 <= key < 7:
                slow[b, i, key] = False
    assert torch.equal(functional.sample_windows(uniform, p, window), slow)


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


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_heads_are_dropped_at_their_rate_and_never_all(p):
    torch.manual_seed(0)
    heads = 4
    keep = functional.sample_heads(p, torch.rand(20_000, heads))
    assert keep.any(1).all()
    rate = 1 - p + p**heads / heads
    assert all(close(keep[:, h].float().mean(), rate, len(keep)) for h in range(heads))
    for number in range(1, heads + 1):
        expected = math.comb(heads, number) * (1 - p) ** number * p ** (heads - number)
        expected += p**heads if number == 1 else 0.0  # all dropped, one comes back
        assert close((keep.sum(1) == number).float().mean(), expected, len(keep))


def test_factors_of_heads_have_the_dtype_of_the_site():
    for dtype in (torch.float32, torch.float64):
        weights = attnreg.DropHead(0.6)(attnreg.AttentionSite(shape=(50, 6, 3, 3), dtype=dtype)).weights
        assert (weights.shape, weights.dtype) == ((50, 6, 1, 1), dtype)
        assert torch.allclose(weights.sum(1), torch.tensor(6.0, dtype=dtype))


def masked(provider, size, heads, x):
    """Multi-head attention under a provider, its draws, and the same by loops in float64, given what is kept."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(size, heads, batch_first=True, bias=False).double().requires_grad_(False)
    with attnreg.attach(module, provider, example_inputs=(x, x, x)) as handle:
        got = module(x, x, x, need_weights=False)[0]

    def slowly(**kept):
        q, k, v = ((x @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2) for w in module.in_proj_weight.chunk(3))
        return attention(q, k, v, **kept).transpose(1, 2).flatten(2) @ module.out_proj.weight.T

    return got, Draws(functional.fold_seed(handle.seed, 0)), slowly


def test_output_of_a_model_is_the_sum_over_kept_heads():
    got, draws, slowly = masked(attnreg.DropHead(0.5), 12, 4, torch.randn(3, 5, 12, dtype=torch.float64))
    keep = functional.sample_heads(0.5, draws.uniform((3, 4)))
    assert not keep.all()
    factor = torch.stack([4 / int(row.sum()) * row.double() for row in keep])[..., None, None]
    assert (got - slowly(factor=factor)).abs().max() < 1e-7  # the factors are float32


def test_dropping_heads_needs_a_layer_of_several():
    x, one, two = torch.randn(3, 5, 12), *(nn.TransformerEncoderLayer(12, n, 12, batch_first=True) for n in (1, 2))
    with pytest.raises(InputError, match=r"^Expected several heads for DropHead, .* got 1 at 0\.self_attn "):
        attnreg.attach(nn.Sequential(one, copy.deepcopy(one)), attnreg.DropHead(0.5), example_inputs=(x,))
    model = nn.Sequential(one, two).train()
    with attnreg.attach(model, attnreg.DropHead(1.0), example_inputs=(x,)) as handle:
        model(x)
    assert handle.drop_rates() == {"encoder.0": 0.0, "encoder.1": 0.5}


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
    """A row without a key is uniform."""
    provider = attnreg.DropKey(0.6)
    got, draws, slowly = masked(provider, 6, 2, torch.randn(3, 4, 6, dtype=torch.float64))
    keep = provider(attnreg.AttentionSite(shape=(3, 2, 4, 4), draws=draws)).scores
    assert not keep.any(-1).all()
    assert (got - slowly(keep=keep)).abs().max() < 1e-12
