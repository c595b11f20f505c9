"""Relaxed and straight-through decisions, entropy, and the estimate from two opposite draws."""

import itertools
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


def loss(drops):
    """Some function of four decisions that is no sum of functions of one."""
    weights = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64)
    return (drops.double() * weights).sum(-1).sin() + drops[..., 0].double() * drops[..., 3].double()


OWNER = torch.tensor([0, 0, 1, 1])  # which of two logits a decision has


def exact_gradient(logits):
    p = logits.sigmoid()[OWNER]
    total = 0.0
    for decisions in itertools.product([False, True], repeat=4):
        drops = torch.tensor(decisions)
        total = total + torch.where(drops, p, 1 - p).prod() * loss(drops)
    return torch.autograd.grad(total, logits)[0]


def test_arm_has_the_gradient_of_the_expected_loss_and_less_variance_than_reinforce():
    logits = torch.tensor([-1.2, 0.4], dtype=torch.float64, requires_grad=True)
    exact = exact_gradient(logits)
    n = 100_000
    uniform = torch.rand(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shared = torch.nn.functional.one_hot(OWNER).double()
    phi = logits.detach()[OWNER]
    first, second = functional.opposite_draws(phi, uniform)
    arm = functional.arm_gradient(loss(first)[:, None], loss(second)[:, None], (uniform - 0.5) @ shared)
    # d log P / d phi of the decisions taken is d - p.
    reinforce = loss(first)[:, None] * ((first.double() - phi.sigmoid()) @ shared)
    for estimates in (arm, reinforce):
        assert ((estimates.mean(0) - exact).abs() < 5 * estimates.std(0) / math.sqrt(n)).all()
    assert (arm.var(0) < reinforce.var(0)).all()


def test_opposite_draws_both_have_the_probability_of_their_logits():
    n, phi = 100_000, torch.tensor(-1.0)
    p = float(phi.sigmoid())
    for drops in functional.opposite_draws(phi, torch.rand(n, generator=torch.Generator().manual_seed(0))):
        assert abs(drops.float().mean() - p) < 5 * math.sqrt(p * (1 - p) / n)
