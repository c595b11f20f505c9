"""The candidate region against a slow loop over sample, head and row."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnreg.functional import candidate_region
from tests.helpers.cases import refused
from tests.helpers.formulas import slow_region

shares = st.integers(0, 20).map(lambda k: Fraction(k, 20)) | st.fractions(0, 1, max_denominator=12)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 11),
    shares,
    st.sampled_from(["high", "low"]),
    st.sampled_from(["none", "padding", "causal", "random"]),
    st.sampled_from([2, 5, 10**6]),  # few distinct values: many ties
    st.integers(0, 10**6),
)
def test_region_is_that_of_the_loop(batch, heads, queries, keys, p, region, mask, distinct, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, queries, keys)
    attribution = (torch.randint(-distinct, distinct, shape, generator=generator) / distinct).float()
    valid = {
        "none": torch.ones(shape, dtype=torch.bool),
        "padding": (torch.arange(keys) < torch.randint(0, keys + 1, (batch, 1, 1, 1), generator=generator)),
        "causal": torch.ones(queries, keys, dtype=torch.bool).tril(),
        "random": torch.rand(shape, generator=generator) < 0.6,
    }[mask]
    got = candidate_region(attribution, None if mask == "none" else valid, float(p), region)
    assert torch.equal(got, slow_region(attribution, valid.expand(shape), p, region))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    attribution = torch.tensor([[0.5, -1.0, 2.0, 0.25]]).to(dtype)
    assert candidate_region(attribution, None, 0.5).tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("keys", range(1, 200, 7))
def test_the_region_of_distinct_values_has_p_n_keys_rounded_up_if_high_and_down_if_low(keys):
    attribution = torch.randperm(keys).float().view(1, keys)
    for tenths in range(11):
        for region, size in (("high", -(-tenths * keys // 10)), ("low", tenths * keys // 10)):
            expected = size if keys > 1 else 0  # one value alone has no ranking
            assert int(candidate_region(attribution, None, tenths / 10, region).sum()) == expected


test_bad_arguments = refused(
    (lambda: candidate_region(torch.zeros(1, 2), None, 1.5), r"Expected `p` in \[0, 1\], got 1.5"),
    (lambda: candidate_region(torch.zeros(1, 2), None, 0.5, "top"), "Expected `region` to be one of"),
)
