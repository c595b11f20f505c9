"""ConcreteDropout: relaxed masks, entropy, rates that learn."""

import math

import pytest
import torch

import attnreg
from tests.cases import refused
from tests.learning import Toy, batch, site, train


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_units_are_dropped_at_the_rate_and_kept_ones_make_up_for_it(p):
    torch.manual_seed(0)
    mask = attnreg.ConcreteDropout(2, p)(site(shape=(4, 8, 40, 40), layer=1))
    n = mask.weights.numel()
    assert mask.weights.shape == mask.kept.shape == (4, 8, 40, 40)
    assert abs(float((~mask.kept).float().mean()) - p) < 5 * math.sqrt(p * (1 - p) / n)
    assert torch.equal(mask.kept, mask.weights > 0.5 / (1 - p))
    assert float(mask.weights.detach().max()) <= 1 / (1 - p) * (1 + 1e-5)


def test_the_mask_by_a_loop_and_its_gradient_in_float64():
    provider = attnreg.ConcreteDropout(2, 0.3, "head", 4, temperature=0.4).double()
    provider.logits.data += torch.randn(2, 4, dtype=torch.float64)
    small = site(shape=(2, 4, 2, 3), layer=1)
    torch.manual_seed(1)
    got = provider(small).weights
    torch.manual_seed(1)
    uniform = small.uniform(dtype=torch.float64)
    for h in range(4):
        p = float(provider.rates[1, h])
        for b in range(2):
            for i in range(2):
                for j in range(3):
                    u = float(uniform[b, h, i, j])
                    z = 1 / (1 + ((1 - p) / p * (1 - u) / u) ** (1 / 0.4))
                    assert got[b, h, i, j].item() == pytest.approx((1 - z) / (1 - p), abs=1e-12)

    def masks(logits):
        torch.manual_seed(1)
        return torch.func.functional_call(provider, {"logits": logits}, small).weights

    assert torch.autograd.gradcheck(masks, provider.logits)


def test_the_penalty_is_the_entropy_however_often_masks_were_drawn():
    provider = attnreg.ConcreteDropout({"encoder": 2, "decoder": 1}, 0.2, regularizer=0.5)
    entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    for _ in range(3):
        assert provider.penalty().shape == ()
        assert provider.penalty().item() == pytest.approx(-0.5 * 3 * entropy, rel=1e-5)
        provider(site(stack="decoder", num_layers=1))
    provider.penalty().backward()
    slope = 0.2 * 0.8 * math.log(0.8 / 0.2)  # dH / dlogit
    assert provider.logits.grad.flatten().tolist() == pytest.approx([-0.5 * slope] * 3, rel=1e-5)


@pytest.mark.parametrize(("sign", "grows"), [(1, False), (-1, True)])
def test_the_rate_falls_where_noise_harms_and_grows_where_it_helps(sign, grows):
    provider = attnreg.ConcreteDropout.for_model(Toy(), 0.3, regularizer=0.0, example_inputs=batch())
    train(Toy(sign), provider)
    assert float(provider.rates) > 0.6 if grows else float(provider.rates) < 0.15


def test_the_entropy_holds_the_rate_up():
    provider = attnreg.ConcreteDropout.for_model(Toy(), 0.3, regularizer=3.0, example_inputs=batch())
    train(Toy(1), provider)
    assert 0.3 < float(provider.rates) < 0.5


def test_layers_and_heads_learn_by_their_own_masks_alone():
    provider = attnreg.ConcreteDropout({"encoder": 2, "decoder": 2}, per="head", num_heads=4)
    provider(site(stack="decoder", layer=1)).weights[:, 2].sum().backward()
    touched = provider.logits.grad != 0
    assert touched.nonzero().tolist() == [[3, 2]]


def test_extreme_rates_stay_finite():
    provider = attnreg.ConcreteDropout(2)
    for logit in (-1e4, 1e4):
        provider.logits.data.fill_(logit)
        weights = provider(site()).weights
        (weights.half().sum() + provider.penalty()).backward()
        assert weights.half().isfinite().all()
        assert provider.logits.grad.isfinite().all()


test_what_does_not_fit_is_refused = refused(
    (lambda: attnreg.ConcreteDropout(2, 0.1, "head"), "Expected `num_heads` with `per` 'head', and only then, got None"),
    (lambda: attnreg.ConcreteDropout(3).check([site()], None), "This ConcreteDropout was made for 3 layers, but the model has 2 encoder layers"),
    (
        lambda: attnreg.ConcreteDropout(2).check([site(), site(stack="decoder")], None),
        "but the model has 2 encoder layers, 2 decoder layers: use `ConcreteDropout.for_model",
    ),
    (lambda: attnreg.ConcreteDropout({"encoder": 2}).check([site(stack="decoder")], None), "This ConcreteDropout was made for 2 encoder layers, but"),
    (lambda: attnreg.ConcreteDropout({"encoder": 2})(site(stack="decoder")), "but the model has 2 decoder layers"),
    (lambda: attnreg.ConcreteDropout(2, 0.1, "head", 3)(site()), "was made for 3 heads, but attention has 4"),
    (
        lambda: attnreg.ConcreteDropout.for_model(Toy(), stacks=["decoder"], example_inputs=batch()),
        r"Expected `stacks` among those of the model, \['encoder'\]",
    ),
)  # fmt: skip
