"""Relaxed and straight-through decisions, and their entropy."""

import math

import pytest
import torch

from attnreg import functional


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


@pytest.mark.parametrize("p", [0.05, 0.5, 0.93])
def test_concrete_drop_is_above_a_half_with_probability_p(p):
    n = 100_000
    torch.manual_seed(1)
    z = functional.concrete_drop(torch.tensor(math.log(p / (1 - p))), torch.rand(n))
    assert abs((z > 0.5).float().mean() - p) < 5 * math.sqrt(p * (1 - p) / n)


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
