"""LearnableBernoulli: an estimate without bias, two runs that nobody notices, rates that learn."""

import copy
import itertools
import math

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.training import FineTuning, adamw
from tests.helpers.cases import SMALL
from tests.helpers.learning import TEXT, Toy, batch, bert, site
from tests.helpers.reference import close


class Tiny(nn.Module):
    """One head over two tokens: four units."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True).double().requires_grad_(False)
        self.x = torch.tensor([[[1.0, -2.0], [0.5, 1.5]]], dtype=torch.float64)

    def forward(self, scale):
        x = scale * self.x
        out, _ = self.attention(x, x, x, need_weights=False)
        return out.sin().pow(2).sum() * 3 + out[0, 0, 0] * out[0, 1, 1]


TINY = {"scale": torch.ones(1, 1, 1, dtype=torch.float64)}


class Given(attnreg.MaskProvider):
    """A given mask of drops, with the division by 1 - p."""

    def __init__(self, drops, logit, placement):
        super().__init__()
        self.drops, self.logit, self.placement = drops, logit, placement

    def forward(self, site):
        if self.placement == "scores":
            return attnreg.Mask(scores=~self.drops)
        return attnreg.Mask(weights=(~self.drops).double() / (1 - self.logit.sigmoid()))


def exact_gradient(model, value, placement):
    """Of the expected loss, by all sixteen masks."""
    logit = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for decisions in itertools.product([False, True], repeat=4):
        drops = torch.tensor(decisions).view(2, 2)
        with attnreg.attach(model, Given(drops, logit, placement), example_inputs=TINY):
            loss = model(**TINY)
        total = total + torch.where(drops, logit.sigmoid(), 1 - logit.sigmoid()).prod() * loss
    return torch.autograd.grad(total, logit)[0]


@pytest.mark.parametrize("placement", [pytest.param("weights", marks=pytest.mark.slow), "scores"])
def test_the_estimate_has_the_gradient_of_the_expected_loss_for_its_mean(placement):
    model, value, n = Tiny(), -0.4, 350
    exact = exact_gradient(model, value, placement)
    provider = attnreg.LearnableBernoulli(1, placement=placement, regularizer=0.0, loss=lambda out, batch: out)
    provider = provider.double()
    provider.logits.data.fill_(value)
    estimates = torch.zeros(n, dtype=torch.float64)
    torch.manual_seed(0)
    with attnreg.attach(model, provider, example_inputs=TINY):
        for i in range(n):
            provider.attribute(model, TINY)
            loss = model(**TINY)
            (grad,) = torch.autograd.grad(loss + provider.penalty(), provider.logits)
            estimates[i] = grad
    assert abs(estimates.mean() - exact) < 5 * estimates.std() / math.sqrt(n)
    assert estimates.std() / math.sqrt(n) < 0.3 * abs(exact)  # or the line above would say little


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_units_are_dropped_at_the_rate(p):
    provider = attnreg.LearnableBernoulli(2, p)
    torch.manual_seed(0)
    for provider._draw in ("training", "first", "second"):
        mask = provider(site(shape=(4, 8, 40, 40)))
        assert close((~mask.kept).float().mean(), p, mask.kept.numel())
        assert mask.weights.detach().unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-5)


def test_noise_counts_units_that_count_by_head():
    valid = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    place = site(shape=(1, 2, 3, 3), valid=valid)
    provider = attnreg.LearnableBernoulli(2, per="head", num_heads=2)
    provider._draw = "first"
    torch.manual_seed(0)
    provider(place)
    torch.manual_seed(0)
    uniform = place.uniform()
    slow = [sum(uniform[0, h, i, j].item() - 0.5 for i in range(2) for j in range(2)) for h in range(2)]
    assert provider._noise[0].tolist() == pytest.approx(slow, abs=1e-6)


def test_both_runs_have_the_same_noise_and_leave_no_trace():
    model = bert()
    model.bert.encoder.layer[1].eval()
    provider = attnreg.LearnableBernoulli.for_model(model, 0.5)
    seen = []
    with attnreg.attach(model, provider):
        model.bert.embeddings.dropout.register_forward_hook(lambda module, args, out: seen.append(out))
        modes = [module.training for module in model.modules()]
        random = torch.get_rng_state()
        provider.attribute(model, TEXT)
        assert torch.equal(torch.get_rng_state(), random)
        assert [module.training for module in model.modules()] == modes
        assert all(p.grad is None for p in [*model.parameters(), *provider.parameters()])
        assert len(seen) == 2
        assert torch.equal(seen[0], seen[1])
        model.train()
        model(**TEXT)
        assert not torch.equal(seen[0], seen[2])


def test_the_penalty_has_no_value_but_the_entropy_and_hands_the_estimate_on():
    model = bert()
    provider = attnreg.LearnableBernoulli.for_model(model, 0.2, regularizer=0.5)
    with attnreg.attach(model, provider) as handle:
        provider.attribute(model, TEXT)
        entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
        for _ in range(2):
            model(**TEXT)
            assert provider.penalty().shape == ()
            assert provider.penalty().item() == pytest.approx(-0.5 * 2 * entropy, rel=1e-5)
        (grad,) = torch.autograd.grad(provider.penalty(), provider.logits)
        slope = 0.2 * 0.8 * math.log(0.8 / 0.2)
        assert torch.allclose(grad, provider._estimate - 0.5 * slope)
        assert provider._estimate.abs().min() > 0
        handle.step()
        (grad,) = torch.autograd.grad(provider.penalty(), provider.logits)
        assert grad.flatten().tolist() == pytest.approx([-0.5 * slope] * 2, rel=1e-5)


def test_a_loop_that_never_attributes_is_told():
    model, provider = Toy(), attnreg.LearnableBernoulli.for_model(Toy(), example_inputs=batch())
    says = r"LearnableBernoulli needs `provider.attribute\(model, batch\)` before each training step"
    with attnreg.attach(model, provider, example_inputs=batch()), pytest.raises(RuntimeError, match=says):
        model(**batch())


def test_a_model_without_a_loss_is_told_of_labels_and_nothing_is_left_behind():
    model = bert()
    provider = attnreg.LearnableBernoulli.for_model(model)
    random = torch.get_rng_state()
    with attnreg.attach(model, provider):
        with pytest.raises(ValueError, match=r"The model's output, .*, has no `loss`: pass `labels`"):
            provider.attribute(model, {"input_ids": TEXT["input_ids"]})
        assert provider._draw == "never"
        assert torch.equal(torch.get_rng_state(), random)


def test_beside_another_provider_that_looks_at_batches_it_is_refused():
    model = bert()
    provider = attnreg.LearnableBernoulli.for_model(model)
    for other in (attnreg.AttributionProvider(), attnreg.HeadMask(1, by="importance"), copy.deepcopy(provider)):
        says = rf"LearnableBernoulli must be the only provider .*: remove {type(other).__name__}"
        with pytest.raises(ValueError, match=says):
            attnreg.attach(model, attnreg.OnLayers(other, [0]) & provider)
        assert not attnreg.is_attached(model)


def test_beside_others_that_could_look_at_batches_and_do_not_it_learns():
    model = bert()
    for other in (attnreg.AttributionProvider(method="random", q=1.0), attnreg.HeadMask(1)):
        provider = attnreg.LearnableBernoulli.for_model(model)
        with attnreg.attach(model, other & provider) as handle:
            handle.provider.attribute(model, TEXT)
            (model(**TEXT).loss + handle.provider.penalty()).backward()
            assert handle.drop_rates()["encoder.0"] > 0.15  # the other's, in the training step itself
        assert provider.logits.grad.abs().min() > 0


def test_a_batch_without_labels_teaches_learnable_rates_nothing():
    torch.manual_seed(0)
    model, ids = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, vocab_size=50)), torch.randint(1, 9, (3, 8))
    provider = attnreg.LearnableBernoulli.for_model(model)
    optimizer = adamw(model, 1e-3)
    optimizer.add_param_group({"params": provider.learned_parameters(), "weight_decay": 0.0})
    method = FineTuning(model, optimizer, provider)
    method.step({"input_ids": ids, "labels": torch.full_like(ids, -100)})
    assert all(bool(each.isfinite().all()) for each in (*model.parameters(), *provider.parameters()))
    assert method.step({"input_ids": ids, "labels": ids}).loss.isfinite()


def test_autocast_casts_weights_again_after_the_two_runs():
    """Casts of theirs have no gradients in torch 2.9, and autocast around a step keeps them."""
    model = bert()
    provider = attnreg.LearnableBernoulli.for_model(model)
    attnreg.attach(model, provider)
    with torch.autocast("cpu", torch.bfloat16):
        provider.attribute(model, TEXT)
        nn.init.zeros_(model.classifier.weight)
        nn.init.zeros_(model.classifier.bias)
        assert not model(**TEXT).logits.any()
