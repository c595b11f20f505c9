"""Scores and weights dropout against loops, in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnreg import functional
from tests.helpers.reference import assert_same, attention, close

B, H, Q, K, D = 2, 3, 4, 4, 5


def tensors(seed=0, queries=Q, keys=K):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()  # noqa: E731
    return make(B, H, queries, D), make(B, H, keys, D), make(B, H, keys, D)


def random_bool(seed, p, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < p


PADDED = torch.tensor([[True] * 4, [True, True, False, False]]).view(B, 1, 1, K)
CAUSAL = torch.ones(Q, K, dtype=torch.bool).tril()
ORPHANS = PADDED & torch.tensor([True, True, False, True]).view(1, 1, Q, 1)  # row 2 has no valid key
VALID = {"none": None, "padded": PADDED, "causal": CAUSAL, "padded causal": PADDED & CAUSAL, "orphan rows": ORPHANS}
KEEP = {
    "half": random_bool(1, 0.5, B, H, Q, K),
    "few": random_bool(2, 0.15, B, H, Q, K),  # many rows of which everything is dropped
    "shared by heads": random_bool(3, 0.4, B, 1, Q, K),
    "whole heads": random_bool(4, 0.5, B, H, 1, 1),
    "whole keys": random_bool(5, 0.5, B, 1, 1, K),
    "nothing": torch.tensor(False),
    "everything": torch.tensor(True),
}
BIAS = {"no bias": None, "bias": torch.randn(1, H, Q, K, dtype=torch.float64), "one row": torch.randn(1, 1, 1, K).double()}  # fmt: skip
COMBINATIONS = [
    pytest.param(
        *values,
        id=" - ".join(names),
        marks=[] if names[0] == "orphan rows" or names[2] != "one row" else pytest.mark.slow,
    )
    for names, values in zip(
        itertools.product(VALID, KEEP, BIAS),
        itertools.product(VALID.values(), KEEP.values(), BIAS.values()),
        strict=True,
    )
]
every_combination = pytest.mark.parametrize(("valid", "keep", "bias"), COMBINATIONS)


@every_combination
def test_scores_dropout(valid, keep, bias):
    """In one call; by masked scores; by weights that are normalized after dropping."""
    q, k, v = tensors()
    slow = attention(q, k, v, keep=keep, valid=valid, bias=bias)
    weights = functional.attention_weights(q, k, valid, bias)
    for fast in (
        functional.scores_dropout(q, k, v, keep, valid, bias),
        functional.attention_weights(q, k, valid, bias, keep=keep) @ v,
        functional.renormalized(weights, keep, valid) @ v,
    ):
        assert_same(fast, slow, q, k, v)


def test_a_row_that_a_bias_forbids_has_no_gradient():
    q, k, v = tensors()
    bias = torch.zeros(B, 1, Q, K, dtype=torch.float64).masked_fill(~ORPHANS, -math.inf)
    functional.attention_weights(q, k, ORPHANS, bias).matmul(v).square().sum().backward()
    assert all(each.grad.isfinite().all() for each in (q, k, v))
    assert not q.grad[:, :, 2].any()


@every_combination
def test_weights_dropout(valid, keep, bias):
    q, k, v = tensors()
    fast = functional.weights_dropout(q, k, v, keep, valid, bias, rescale=True, p=0.25)
    slow = attention(q, k, v, valid=valid, bias=bias, factor=keep.double() / 0.75)
    assert_same(fast, slow, q, k, v)


def test_normalizing_with_and_without_a_gradient_through_the_sum():
    weights = torch.rand(B, H, Q, K, dtype=torch.float64).softmax(-1).requires_grad_()
    factor = torch.rand(B, 1, Q, K, dtype=torch.float64).requires_grad_()
    for detach_sum in (False, True):
        slow = torch.empty(B, H, Q, K, dtype=torch.float64)
        for b in range(B):
            for h in range(H):
                for i in range(Q):
                    total = sum(weights[b, h, i, j] * factor[b, 0, i, j] for j in range(K))
                    for j in range(K):
                        divisor = total.detach() if detach_sum else total
                        slow[b, h, i, j] = weights[b, h, i, j] * factor[b, 0, i, j] / divisor
        assert_same(functional.renormalized(weights, factor, detach_sum=detach_sum), slow, weights, factor)


@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
def test_uniform_attention_is_scores_dropout_of_everything(valid):
    q, k, v = tensors()
    fast = functional.uniform_attention(v, valid, (B, H, Q, K))
    assert_same(fast, attention(q, k, v, keep=torch.tensor(False), valid=valid), v)


def test_uniform_attention_under_dropout_of_weights():
    p, valid = 0.25, torch.arange(K) < K - 1
    weights = functional.uniform_attention(torch.eye(K).expand(200, H, K, K), valid, (200, H, Q, K), dropout_p=p)
    kept = weights != 0
    torch.testing.assert_close(weights, kept / ((K - 1) * (1 - p)))
    assert not kept[..., -1].any()
    assert close(kept[..., :-1].float().mean(), 1 - p, kept[..., :-1].numel())


def test_uniform_attention_shares_value_heads():
    _, _, v = tensors()
    out = functional.uniform_attention(v[:, :1], PADDED, (B, H, Q, K))
    assert torch.equal(out, functional.uniform_attention(v[:, :1].expand(B, H, K, D), PADDED, (B, H, Q, K)))


@given(
    seed=st.integers(0, 10**6),
    queries=st.integers(1, 6),
    keys=st.integers(1, 6),
    kept=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    allowed=st.sampled_from([0.2, 0.7, 1.0]),
    scale=st.sampled_from([None, 1.0, 0.3]),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_and_mask(seed, queries, keys, kept, allowed, scale):
    q, k, v = tensors(seed, queries, keys)
    keep = random_bool(seed + 1, kept, B, H, queries, keys)
    valid = random_bool(seed + 2, allowed, B, 1, queries, keys)
    bias = torch.randn(B, H, queries, keys, dtype=torch.float64)
    fast = functional.scores_dropout(q, k, v, keep, valid, bias, scale)
    assert_same(fast, attention(q, k, v, keep=keep, valid=valid, bias=bias, scale=scale), q, k, v)


@pytest.mark.parametrize("p", [None, 1.0, -0.1])
def test_rescaling_needs_its_probability(p):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"Expected `p` in \[0, 1\)"):
        functional.weights_dropout(q, k, v, torch.tensor(True), rescale=True, p=p)
