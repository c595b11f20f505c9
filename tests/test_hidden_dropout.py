"""HiddenDropout against loops."""

import math

import pytest
import torch

from attnreg import HiddenDropout, HiddenSite, functional
from tests.cases import refused

P = 0.3


def drawn(mode, shape=(8, 40, 50), p=P, valid=None, **options):
    torch.manual_seed(0)
    states = torch.randn(shape, dtype=torch.float64)
    site = HiddenSite(shape=shape, valid=valid, dtype=torch.float64)
    return states, HiddenDropout(p, mode, **options)(site, states)


@pytest.mark.parametrize("mode", ["element", "column"])
def test_values_are_kept_or_dropped(mode):
    states, out = drawn(mode)
    factor = 1 / (1 - P)
    for value, got in zip(states.flatten().tolist(), out.flatten().tolist(), strict=True):
        assert got in (0.0, pytest.approx(value * factor))
    zero = out == 0
    decisions = zero if mode == "element" else zero[:, 0]
    if mode == "column":
        assert all(torch.equal(zero[:, 0], zero[:, t]) for t in range(40))
        assert not torch.equal(zero[0], zero[1])
    assert abs(decisions.double().mean() - P) < 5 * math.sqrt(P * (1 - P) / decisions.numel())


def test_spans_are_a_share_of_the_tokens_without_padding():
    lengths = [20, 11, 1, 7]
    valid = torch.zeros(4, 20, dtype=torch.bool)
    for b, n in enumerate(lengths):
        valid[b, (3 if b == 3 else 0) : (3 if b == 3 else 0) + n] = True  # the last is padded on the left, too
    starts = []
    for _ in range(200):
        keep = functional.sample_spans(P, valid, torch.rand(4, 1))
        for b, n in enumerate(lengths):
            dropped = [t for t in range(20) if not keep[b, t]]
            assert len(dropped) == math.floor(P * n + 0.5)
            assert dropped == list(range(dropped[0], dropped[0] + len(dropped))) if dropped else True
            assert all(valid[b, t] for t in dropped)
        starts.append(int((~keep[0]).int().argmax()))
    assert {*starts} == set(range(20 - 6 + 1))  # every place occurs
    states, out = drawn("span", (4, 20, 5), valid=valid)
    assert torch.equal(out[out != 0], states[out != 0])


def test_p_of_one_drops_everything_and_the_pooled_state_is_a_row():
    assert not drawn("element", p=1.0)[1].any()
    assert not drawn("span", p=1.0)[1].any()
    assert drawn("column", p=0.0)[1].equal(drawn("column", p=0.0)[0])
    _, out = drawn("column", (100, 30), where="pooled")
    assert abs((out == 0).double().mean() - P) < 0.05
    assert len({tuple(row) for row in (out == 0).tolist()}) > 50


test_what_is_refused = refused(
    (lambda: HiddenDropout(0.1, where="outputs"), "Expected `where` to be one of embeddings.*Did you mean output"),
    (lambda: HiddenDropout(0.1, "span", where="pooled"), "The pooled state has no tokens"),
)
