"""SAM against its formula, written out slowly in float64; and the weights as they were."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

import attnreg
from attnreg.training import SAM, FineTuning
from tests.helpers.method_cases import bert, sgd, weights
from tests.helpers.objectives import BATCH


def slow_step(model, rho, lr, max_norm=None, seed=1):
    """One step of SAM with plain gradient descent, parameter by parameter; and the norm of the perturbation."""
    names = [name for name, _ in model.named_parameters()]

    def gradients(at):
        torch.manual_seed(seed)
        loss = torch.func.functional_call(model.train(), at, kwargs=BATCH).loss
        return loss.item(), dict(zip(names, torch.autograd.grad(loss, [at[name] for name in names]), strict=True))

    here = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss, g = gradients(here)
    length = sum(value.square().sum().item() for value in g.values()) ** 0.5
    there = {name: (here[name] + rho * g[name] / length).detach().requires_grad_() for name in names}
    worst, h = gradients(there)
    after = sum(value.square().sum().item() for value in h.values()) ** 0.5
    shrink = 1.0 if max_norm is None else min(1.0, max_norm / after)
    moved = sum((there[name] - here[name]).square().sum().item() for name in names) ** 0.5
    return loss, worst, moved, torch.cat([(here[n] - lr * shrink * h[n]).detach().flatten() for n in names])


@pytest.mark.parametrize("accelerator", [None, "scaling"])
@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("provider", [None, lambda: attnreg.AttentionDropout(0.3) & attnreg.UniDrop()])
def test_a_step_is_the_formula_with_the_same_dropout_in_both_passes(max_norm, provider, accelerator, request):
    model, accelerator = bert(), accelerator and request.getfixturevalue(accelerator)
    masks = provider and provider()
    reference = copy.deepcopy(model)
    if masks is not None:
        attnreg.attach(reference, copy.deepcopy(masks))
    loss, worst, moved, expected = slow_step(reference, rho=0.3, lr=0.1, max_norm=max_norm)
    assert moved == pytest.approx(0.3, abs=1e-12)
    method = SAM(model, sgd(model), masks, rho=0.3, max_grad_norm=max_norm, accelerator=accelerator)
    torch.manual_seed(1)
    result = method.step(BATCH)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert result.logs["perturbed_loss"].item() == pytest.approx(worst, abs=1e-12)
    assert worst > loss
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-6 if max_norm else 1e-12)  # torch adds 1e-6


EXPRESSIONS = ["UniDrop() & AttentionDropout(0.2)", "AttributionProvider(p=0.5, q=0.5)", "HeadMask(1, by='importance')"]


@pytest.mark.parametrize("expression", [None, *EXPRESSIONS])
def test_without_a_perturbation_it_is_plain_fine_tuning(expression):
    trained = []
    for kind, options in ((FineTuning, {}), (SAM, {"rho": 0.0})):
        model = bert()
        method = kind(model, sgd(model), expression and attnreg.parse_provider(expression, model), **options)
        for seed in range(2):
            torch.manual_seed(seed)
            method.step(BATCH)
        trained.append(weights(model))
        rates = method.drop_rates()
        assert all(rate > 0 for rate in rates.values())
        assert bool(rates) == (expression is not None)
    assert torch.equal(*trained)


def test_two_pass_providers_look_at_the_batch_at_both_weights():
    model = bert(dropout=0.0)
    provider, seen = attnreg.AttributionProvider(p=0.5, q=1.0), []
    method = SAM(model, sgd(model), provider, rho=0.5)
    attribute, before = provider.attribute, weights(model)
    provider.attribute = lambda *args: (seen.append(weights(model)), attribute(*args))
    method.step(BATCH)
    assert torch.equal(seen[0], before)
    assert (seen[1] - before).norm().item() == pytest.approx(0.5, abs=1e-9)
    assert len(seen) == 2


def test_learned_parameters_of_a_provider_train_and_are_not_perturbed():
    model, seen = bert(dropout=0.0), []
    provider = attnreg.ConcreteDropout.for_model(model).double()
    optimizer = torch.optim.SGD([*model.parameters(), *provider.parameters()], lr=0.1)
    method = SAM(model, optimizer, provider, rho=10.0)
    model.register_forward_hook(lambda *_: seen.append(provider.logits.detach().clone()))
    before = provider.logits.detach().clone()
    method.step(BATCH)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(provider.logits, before)


def test_the_same_bits_are_back_also_after_an_exception():
    model, calls = bert().float(), itertools.count()
    before = copy.deepcopy(model.state_dict())

    def breaks_later(outputs, batch):
        if next(calls):
            raise KeyboardInterrupt
        return outputs.loss

    method = SAM(model, sgd(model), rho=1e3, loss_function=breaks_later)
    with pytest.raises(KeyboardInterrupt):
        method.step(BATCH)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Normed(nn.Module):
    """A classifier with running statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x, labels):
        logits = self.out(self.norm(x))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def test_running_statistics_count_a_batch_once():
    torch.manual_seed(0)
    model, batch = Normed(), {"x": torch.randn(6, 3), "labels": torch.arange(6) % 2}
    plain = copy.deepcopy(model).train()
    plain(**batch)
    SAM(model, sgd(model), rho=5.0).step(batch)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_only_trained_weights_are_perturbed():
    model, seen = bert(dropout=0.0), []
    frozen, left_out = model.bert.embeddings.word_embeddings.weight, model.bert.pooler.dense.weight
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not left_out], lr=0.1)
    method = SAM(model, optimizer, rho=2.0)
    model.register_forward_hook(lambda *_: seen.append((frozen.clone(), left_out.detach().clone(), weights(model))))
    method.step(BATCH)
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
    assert (seen[1][2] - seen[0][2]).norm().item() == pytest.approx(2.0, abs=1e-9)


@pytest.mark.parametrize("factor", [0.0, float("inf")])
def test_a_gradient_without_a_direction_perturbs_nothing(factor):
    model, seen = bert(dropout=0.0), []
    method = SAM(model, sgd(model), rho=1.0, loss_function=lambda outputs, batch: factor * outputs.loss)
    model.register_forward_hook(lambda *_: seen.append(weights(model)))
    method.step(BATCH)
    assert torch.equal(*seen)
    assert bool(weights(model).isfinite().all()) == (factor == 0.0)


def test_sharded_parameters_are_refused():
    model = bert()
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(ValueError, match="SAM does not support sharded parameters"):
        SAM(model, sgd(model), attnreg.AttentionDropout(0.1), accelerator=accelerator)
    assert not attnreg.is_attached(model)


@pytest.fixture
def scaling(monkeypatch):
    """An accelerator that scales losses, as under float16 on a GPU."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    prepare = accelerator.prepare

    def prepared(*args):
        made = prepare(*args)
        accelerator.native_amp = True
        monkeypatch.setattr(Accelerator, "mixed_precision", property(lambda self: "fp16"))
        return made

    accelerator.prepare = prepared
    return accelerator


def test_a_step_whose_gradients_overflow_is_left_out(scaling):
    model = bert()
    before = weights(model)
    infinite = {"loss_function": lambda output, _: float("inf") * output.loss}
    SAM(model, sgd(model), rho=0.3, accelerator=scaling, **infinite).step(BATCH)
    assert torch.equal(weights(model), before)
    assert scaling.scaler.get_scale() == 2.0**11


@pytest.mark.parametrize("method", [SAM, FineTuning])
def test_steps_within_one_autocast_see_the_weights_as_they_are(method):
    """Its cache of weights in bfloat16 outlives a pass."""

    def losses(cache):
        torch.manual_seed(0)
        model = bert().float()
        trained = method(model, sgd(model))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            results = [trained.step(BATCH) for _ in range(3)]
        return [float(loss) for result in results for loss in (result.loss, *result.logs.values())]

    assert losses(cache=True) == losses(cache=False)
