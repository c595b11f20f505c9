"""Decisions to keep or drop: drawn, relaxed and straight-through; their probability, entropy and rate; what counts."""

import math

import pytest
import torch

from attnreg import functional
from tests.helpers.reference import close


def test_log_prob_is_the_mean_over_units_of_log_sigmoid():
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    keep = torch.rand(3, 2, 4, 4) < 0.5
    valid = torch.rand(3, 1, 4, 4) < 0.6
    valid[2] = False
    got = functional.bernoulli_log_prob(logits, keep, valid)
    for b in range(3):
        total, n = 0.0, 0
        for layer in range(2):
            for i in range(4):
                for j in range(4):
                    if valid[b, 0, i, j]:
                        p = 1 / (1 + math.exp(-float(logits[b, layer, i, j])))
                        total += math.log(p if keep[b, layer, i, j] else 1 - p)
                        n += 1
        assert float(got[b]) == pytest.approx(total / n if n else 0.0, abs=1e-12)


def test_log_prob_of_several_draws_is_the_mean_of_theirs():
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 3, 4, dtype=torch.float64)
    keep, valid = torch.rand(5, 2, 3, 4) < 0.5, torch.rand(2, 3, 4) < 0.7
    got = functional.bernoulli_log_prob(logits, keep.sum(0), valid, draws=5)
    expected = torch.stack([functional.bernoulli_log_prob(logits, k, valid) for k in keep]).mean(0)
    assert (got - expected).abs().max() < 1e-12


def test_log_prob_of_what_was_almost_certain():
    logits = torch.tensor([[100.0], [-100.0], [100.0], [-100.0]])
    keep = torch.tensor([[True], [False], [False], [True]])
    assert functional.bernoulli_log_prob(logits, keep, torch.tensor(True)).tolist() == pytest.approx([0, 0, -100, -100])


@pytest.mark.parametrize("p", [0.05, 0.5, 0.93])
@pytest.mark.parametrize("drawn", [functional.sample_keep, lambda *args: functional.concrete_drop(*args) > 0.5])
def test_decisions_have_the_probability_of_their_logits(drawn, p):
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(1))
    assert close(drawn(torch.tensor(math.log(p / (1 - p))), uniform).float().mean(), p, 200_000)


def test_concrete_drop_by_a_loop_and_its_gradient():
    torch.manual_seed(0)
    logits = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    uniform = torch.rand(3, 4, dtype=torch.float64)
    got = functional.concrete_drop(logits, uniform, 0.3)
    for i in range(3):
        p = 1 / (1 + math.exp(-logits[i].item()))
        for j in range(4):
            u = float(uniform[i, j])
            inner = (math.log(p) - math.log(1 - p) + math.log(u) - math.log(1 - u)) / 0.3
            assert got[i, j].item() == pytest.approx(1 / (1 + math.exp(-inner)), abs=1e-12)
    assert torch.autograd.gradcheck(lambda s: functional.concrete_drop(s, uniform, 0.3), logits)


def test_concrete_drop_of_extreme_noise_has_a_gradient():
    logits = torch.zeros(3, requires_grad=True)
    z = functional.concrete_drop(logits, torch.tensor([0.0, 0.5, 1 - 2**-24]))
    z.sum().backward()
    assert z.isfinite().all()
    assert logits.grad.isfinite().all()


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other():
    soft = torch.rand(5, dtype=torch.float64, requires_grad=True)
    hard = torch.tensor([True, False, True, True, False])
    for reverse, sign in ((False, 1), (True, -1)):
        out = functional.straight_through(hard, soft, reverse=reverse)
        assert torch.equal(out, hard.double())
        (grad,) = torch.autograd.grad((out * torch.arange(5)).sum(), soft)
        assert torch.equal(grad, sign * torch.arange(5).double())


def test_entropy_and_divergence_by_their_formulas():
    logits = torch.tensor([-30.0, -2.0, 0.0, 0.7, 30.0], dtype=torch.float64, requires_grad=True)
    for s, entropy, kl in zip(
        logits.tolist(), functional.bernoulli_entropy(logits), functional.bernoulli_kl(logits, 0.2), strict=True
    ):
        p, q = 1 / (1 + math.exp(-s)), 1 / (1 + math.exp(s))
        assert entropy.item() == pytest.approx(-p * math.log(p) - q * math.log(q), abs=1e-11)
        assert kl.item() == pytest.approx(p * math.log(p / 0.2) + q * math.log(q / 0.8), abs=1e-11)
    assert torch.autograd.gradcheck(functional.bernoulli_entropy, logits)
    assert torch.autograd.gradcheck(lambda s: functional.bernoulli_kl(s, 0.2), logits)


def test_units_of_cross_attention_are_its_valid_positions():
    valid = torch.tensor([True, False, True]).view(1, 1, 1, 3)
    assert torch.equal(functional.units(valid, (1, 1, 3, 3), self_attention=False), valid)


def test_drop_rates_of_factors_and_of_no_units():
    keep = torch.tensor([[True, False], [False, False]]).view(1, 1, 2, 2)
    units = torch.tensor([True, True, False, False]).view(1, 1, 2, 2)
    assert functional.drop_rate(keep.float() * 2, units) == 0.5
    assert functional.drop_rate(keep, torch.zeros_like(units)) == 0
