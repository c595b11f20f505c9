"""Providers with parameters for each layer that learn with the model: masks, gradients and penalties by formulas."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import attnreg
from attnreg import AdversarialAttention, ConcreteDropout, ContextualDropout, LearnableBernoulli, functional
from tests.helpers.cases import refused
from tests.helpers.learning import TEXT, Toy, assert_penalty, batch, bert, site, train
from tests.helpers.reference import close

VALID = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]).view(2, 1, 1, 5)


def looked_at(shape=(2, 4, 5, 6), dtype=torch.float32, **options):
    """A site with queries and keys of size 3."""
    generator = torch.Generator().manual_seed(7)
    query, key = (torch.randn(*shape[:2], n, 3, dtype=dtype, generator=generator) for n in shape[2:])
    return site(**{"shape": shape, "query": query, "key": key, **options})


def learned(cls, *args, **options):
    """A provider of which all weights have been moved."""
    torch.manual_seed(0)
    provider = cls(*((2, 3) if cls is ContextualDropout else (2, 4, 3)), *args, **options)
    for weight in provider.parameters():
        weight.data += torch.randn_like(weight) / 2
    return provider


def predicted(network, query):
    """The rate of one query by the formula of contextual dropout."""
    (w1, b1), (w2, b2) = ((linear.weight, linear.bias) for linear in (network[0], network[2]))
    hidden = w1 @ query + b1
    hidden = torch.stack([h if h > 0 else 0.01 * h for h in hidden])
    return torch.sigmoid((w2 @ hidden + b2)[0])


def by_loops(provider, layer, query, key):
    """Probabilities of keeping, (B, Q, K), by the formula of adversarial attention."""
    batch, _, queries, _ = query.shape
    wq, wk = provider.query[layer], provider.key[layer]
    out = torch.empty(batch, queries, key.shape[2], dtype=query.dtype)
    for b in range(batch):
        for i in range(queries):
            for j in range(key.shape[2]):
                q, k = torch.cat(list(query[b, :, i])), torch.cat(list(key[b, :, j]))
                left, right = wq.weight @ q + wq.bias, wk.weight @ k + wk.bias
                out[b, i, j] = torch.sigmoid(left @ right / math.sqrt(len(left)) + provider.bias[layer])
    return out


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_units_are_dropped_at_the_rate_and_kept_ones_make_up_for_it(p):
    torch.manual_seed(0)
    mask = ConcreteDropout(2, p)(site(shape=(4, 8, 40, 40), layer=1))
    assert mask.weights.shape == mask.kept.shape == (4, 8, 40, 40)
    assert close((~mask.kept).float().mean(), p, mask.weights.numel())
    assert torch.equal(mask.kept, mask.weights > 0.5 / (1 - p))
    assert float(mask.weights.detach().max()) <= 1 / (1 - p) * (1 + 1e-5)


def of_heads():
    """Concrete dropout at different rates, and the rate of a unit of its second layer."""
    provider = ConcreteDropout(2, 0.3, "head", 4, temperature=0.4).double()
    provider.logits.data += torch.randn(2, 4, dtype=torch.float64)
    return provider, lambda query, b, h, i: provider.rates[1, h]


def of_queries():
    provider = learned(ContextualDropout, 0.3, temperature=0.4).double()
    return provider, lambda query, b, h, i: predicted(provider.networks[1], query[b, h, i])


@pytest.mark.parametrize("make", [of_heads, of_queries])
def test_the_mask_by_a_loop_and_its_gradient_in_float64(make):
    provider, rate = make()
    place = looked_at((2, 4, 2, 3), torch.float64, layer=1)
    names, values = zip(*provider.named_parameters(), strict=True)

    def masks(*parameters):
        torch.manual_seed(1)
        return torch.func.functional_call(provider, dict(zip(names, parameters, strict=True)), place).weights

    got = masks(*values)
    torch.manual_seed(1)
    uniform = place.uniform(dtype=torch.float64)
    for b, h, i, j in torch.ones(got.shape).nonzero().tolist():
        p, u = rate(place.query, b, h, i).item(), uniform[b, h, i, j].item()
        z = 1 / (1 + ((1 - p) / p * (1 - u) / u) ** (1 / 0.4))
        assert got[b, h, i, j].item() == pytest.approx((1 - z) / (1 - p), abs=1e-12)
    assert torch.autograd.gradcheck(masks, values)


def test_the_penalty_is_the_entropy_however_often_masks_were_drawn():
    provider = ConcreteDropout({"encoder": 2, "decoder": 1}, 0.2, regularizer=0.5)
    entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    for _ in range(3):
        assert provider.penalty().shape == ()
        assert provider.penalty().item() == pytest.approx(-0.5 * 3 * entropy, rel=1e-5)
        provider(site(stack="decoder", num_layers=1))
    provider.penalty().backward()
    slope = 0.2 * 0.8 * math.log(0.8 / 0.2)  # dH / dlogit
    assert provider.logits.grad.flatten().tolist() == pytest.approx([-0.5 * slope] * 3, rel=1e-5)


def test_only_layers_that_are_masked_are_rewarded():
    provider = ConcreteDropout({"encoder": 2}, 0.2, "head", 4, regularizer=0.5)
    with attnreg.attach(bert(), attnreg.OnLayers(provider, [1])):
        entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
        assert provider.penalty().item() == pytest.approx(-0.5 * 4 * entropy, rel=1e-5)
        provider.penalty().backward()
    assert provider.logits.grad.any(1).tolist() == [False, True]
    with attnreg.attach(bert(), provider):
        assert provider.penalty().item() == pytest.approx(-0.5 * 8 * entropy, rel=1e-5)


HARMS, HELPS = 1, -1  # what noise does to the toy's loss


@pytest.mark.parametrize(
    ("cls", "sign", "regularizer", "training", "least", "most"),
    [
        (ConcreteDropout, HARMS, 0.0, {}, 0, 0.15),
        (ConcreteDropout, HELPS, 0.0, {}, 0.6, 1),
        (ConcreteDropout, HARMS, 3.0, {}, 0.3, 0.5),
        (LearnableBernoulli, HARMS, 0.0, {"steps": 60}, 0, 0.2),
        (LearnableBernoulli, HELPS, 0.0, {"steps": 60}, 0.5, 1),
        (ContextualDropout, HARMS, 0.0, {"lr": 0.03}, 0, 0.15),
        (ContextualDropout, HELPS, 0.0, {"lr": 0.03}, 0.5, 1),
        (ContextualDropout, HARMS, 30.0, {"lr": 0.03}, 0.2, 0.4),
    ],
)
def test_a_rate_falls_where_noise_harms_grows_where_it_helps_and_is_held_up(
    cls, sign, regularizer, training, least, most
):
    provider = cls.for_model(Toy(), 0.3, regularizer=regularizer, example_inputs=batch())
    measured = train(Toy(sign), provider, **training)
    assert least < float(getattr(provider, "rates", measured)) < most


def test_layers_and_heads_learn_by_their_own_masks_alone():
    provider = ConcreteDropout({"encoder": 2, "decoder": 2}, per="head", num_heads=4)
    provider(site(stack="decoder", layer=1)).weights[:, 2].sum().backward()
    touched = provider.logits.grad != 0
    assert touched.nonzero().tolist() == [[3, 2]]


def test_extreme_rates_stay_finite():
    provider = ConcreteDropout(2)
    for logit in (-1e4, 1e4):
        provider.logits.data.fill_(logit)
        weights = provider(site()).weights
        (weights.half().sum() + provider.penalty()).backward()
        assert weights.half().isfinite().all()
        assert provider.logits.grad.isfinite().all()


def test_all_rates_are_p_before_training():
    provider, place = ContextualDropout(2, 3, 0.3), looked_at()
    assert provider.logits(1, place.query).sigmoid().flatten().tolist() == pytest.approx([0.3] * 2 * 4 * 5)


def test_units_are_dropped_at_the_rate_of_their_query():
    provider, place = learned(ContextualDropout, 0.3), looked_at((1, 1, 4, 20_000))
    torch.manual_seed(0)
    mask = provider(place)
    for i in range(4):
        p = predicted(provider.networks[0], place.query[0, 0, i]).item()
        assert close((~mask.kept[0, 0, i]).float().mean(), p, 20_000)


def divergence(provider, layer, place):
    """The mean over real rows."""
    terms = []
    for b, h, i in torch.ones(2, 4, 5).nonzero().tolist():
        if VALID[b, 0, 0, i]:
            p = predicted(provider.networks[layer], place.query[b, h, i])
            terms.append(p * (p / 0.2).log() + (1 - p) * ((1 - p) / 0.8).log())
    return 0.5 * torch.stack(terms).mean()


def price(provider, layer, place):
    """Of the share that is masked of the units that count."""
    masked = 1 - by_loops(provider, layer, place.query, place.key)
    return 2.0 * torch.cat([masked[0].flatten(), masked[1, :3, :3].flatten()]).mean()


@pytest.mark.parametrize(
    ("cls", "args", "options", "of_layer", "valid"),
    [
        (ContextualDropout, (0.3, 0.2), {"regularizer": 0.5}, divergence, VALID),
        (AdversarialAttention, (), {"price": 2.0}, price, VALID.expand(2, 1, 5, 5)),
        (AdversarialAttention, (), {"price": 2.0}, price, VALID.expand(2, 4, 5, 5)),
    ],
)
def test_the_penalty_by_its_formula_however_often_masks_were_drawn(cls, args, options, of_layer, valid):
    provider = learned(cls, *args, **options).double()
    places = [looked_at((2, 4, 5, 5), torch.float64, layer=layer, valid=valid) for layer in range(2)]
    assert provider.penalty() is None
    total = sum(of_layer(provider, layer, place) for layer, place in enumerate(places)) / 2
    assert_penalty(provider, places, total)
    provider.step()
    assert provider.penalty() is None


@pytest.mark.parametrize("cls", [ContextualDropout, AdversarialAttention])
def test_no_gradient_reaches_queries_and_keys(cls):
    place, provider = looked_at(), learned(cls)
    tensors = place.query.requires_grad_(), place.key.requires_grad_()
    mask = provider(place)
    ((mask.weights if cls is ContextualDropout else mask.normalized).sum() + provider.penalty()).backward()
    assert all(x.grad is None for x in tensors)


def recomputed(forward, reentrant, *args, **kwargs):
    return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cls", [ContextualDropout, AdversarialAttention])
def test_the_penalty_under_gradient_checkpointing(cls, reentrant):
    found = []
    for checkpointed in (False, True):
        model = bert()
        torch.manual_seed(0)
        provider = cls.for_model(model)
        with attnreg.attach(model, provider):
            for layer in model.bert.encoder.layer if checkpointed else ():
                layer.forward = functools.partial(recomputed, layer.forward, reentrant)
            torch.manual_seed(3)
            (model(**TEXT).loss + provider.penalty()).backward()
        found.append([p.grad for p in provider.parameters()])
    assert any(grad.abs().max() > 0 for grad in found[0])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("size", [None, 5])
def test_probabilities_by_a_loop(size):
    provider, place = learned(AdversarialAttention, size).double(), looked_at(dtype=torch.float64)
    got = provider.logits(1, place.query, place.key).sigmoid()[:, 0]
    assert (got - by_loops(provider, 1, place.query, place.key)).abs().max() < 1e-12


def test_a_unit_is_masked_where_it_is_more_probable_or_by_chance():
    provider, place = learned(AdversarialAttention, sampled=False), looked_at((1, 4, 2, 3))
    probability = by_loops(provider, 0, place.query, place.key)[0]
    assert torch.equal(provider(place).kept[0, 0], probability > 0.5)
    provider = learned(AdversarialAttention, sampled=True)
    torch.manual_seed(0)
    n = 1000
    kept = torch.stack([provider(place).kept[0, 0] for _ in range(n)]).float().mean(0)
    assert ((kept - probability).abs() < 5 * (probability * (1 - probability) / n).sqrt()).all()


def test_all_heads_have_the_mask_and_grouped_keys_stand_for_their_heads():
    place = looked_at()
    grouped = site(shape=place.shape, query=place.query, key=place.key[:, ::2])
    whole = site(shape=place.shape, query=place.query, key=place.key[:, [0, 0, 2, 2]])
    provider = learned(AdversarialAttention, sampled=False)
    assert provider(place).normalized.shape == (2, 1, 5, 6)
    assert torch.equal(provider(grouped).normalized, provider(whole).normalized)


def test_the_gradient_is_that_of_the_probabilities_reversed():
    provider, place = learned(AdversarialAttention, sampled=False).double(), looked_at((2, 4, 5, 5), torch.float64)
    attention = torch.rand(2, 4, 5, 5, dtype=torch.float64).softmax(-1)
    value = torch.randn(5, 3, dtype=torch.float64)
    parameters = [*provider.query[0].parameters(), *provider.key[0].parameters()]

    mask = provider(place)
    loss = (functional.renormalized(attention, mask.normalized) @ value).sin().sum()
    ours = torch.autograd.grad(loss, parameters)

    probability = by_loops(provider, 0, place.query, place.key)[:, None]
    keep = (probability > 0.5).double().requires_grad_()
    assert 0 < keep.mean() < 1
    masked = attention * keep
    rows = masked.sum(-1, keepdim=True)
    assert (rows > 0).all()
    loss = (masked / rows @ value).sin().sum()
    (of_mask,) = torch.autograd.grad(loss, keep)
    assert (of_mask[keep == 0] != 0).all()  # what is masked has a gradient, too
    theirs = torch.autograd.grad(probability, parameters, grad_outputs=-of_mask)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12


class Linear(Toy):
    """Some keys raise the loss of those who attend to them, others lower it."""

    def forward(self, x):
        return ModelOutput(loss=self.sign * 10 * super().forward(x).logits.mean())


def loss_under(provider, model):
    with torch.no_grad(), attnreg.attach(model, provider, example_inputs=batch()) as handle, handle.probing():
        torch.manual_seed(0)
        return sum(float(model(**batch()).loss) for _ in range(20)) / 20


@pytest.mark.parametrize("sign", [1, -1])
def test_the_generator_learns_to_raise_the_loss(sign):
    model = Linear(sign)
    torch.manual_seed(0)
    provider = AdversarialAttention.for_model(model, None, 0.7, price=0.1, example_inputs=batch())
    before = loss_under(provider, model)
    train(model, provider, steps=60, lr=0.02)
    assert loss_under(provider, model) > before + 0.2 * abs(before)


def test_a_high_price_makes_it_mask_nothing_and_none_lets_it_mask():
    rates = []
    for price in (0.0, 100.0):
        torch.manual_seed(0)
        provider = AdversarialAttention.for_model(Toy(), None, 0.7, price=price, example_inputs=batch())
        rates.append(train(Toy(), provider, steps=60, lr=0.05))
    assert rates[1] < 0.05 < rates[0]


def two_sizes():
    layers = [nn.TransformerEncoderLayer(8, heads, 16, batch_first=True) for heads in (2, 4)]
    return AdversarialAttention.for_model(nn.Sequential(*layers), example_inputs=(torch.randn(1, 3, 8),))


OF_ENCODER, IN_DECODER = ConcreteDropout({"encoder": 2}), site(stack="decoder")
test_what_does_not_fit_is_refused = refused(
    (lambda: ConcreteDropout(2, 0.1, "head"), "Expected `num_heads` with `per` 'head', and only then, got None"),
    (lambda: ConcreteDropout(3).check([site()], None), "This ConcreteDropout was made for 3 layers, but the model has 2 encoder layers"),
    (lambda: ConcreteDropout(2).check([site(), IN_DECODER], None), "but the model has 2 encoder layers, 2 decoder layers: use `ConcreteDropout.for_model"),
    (lambda: OF_ENCODER.check([IN_DECODER], None), "This ConcreteDropout was made for 2 encoder layers, but"),
    (lambda: OF_ENCODER(IN_DECODER), "but the model has 2 decoder layers"),
    (lambda: ConcreteDropout(2, 0.1, "head", 3)(site()), "was made for 3 heads, but attention has 4"),
    (lambda: ConcreteDropout.for_model(Toy(), stacks=["decoder"], example_inputs=batch()), r"Expected `stacks` among those of the model, \['encoder'\]"),
    (lambda: LearnableBernoulli(3).check([site()], None), "This LearnableBernoulli was made for"),
    (lambda: ContextualDropout(3, 3).check([site()], None), "This ContextualDropout was made for"),
    (lambda: ContextualDropout(2, 3)(site()), "ContextualDropout needs queries, but attention exposes only its scores"),
    (lambda: ContextualDropout(2, 4)(looked_at()), r"heads of size 4, but attention has 4 of size 3"),
    (lambda: AdversarialAttention(3, 4, 3).check([site()], None), "This AdversarialAttention was made for"),
    (lambda: AdversarialAttention(2, 4, 3)(site()), "AdversarialAttention needs queries, but attention exposes only its scores"),
    (lambda: AdversarialAttention(2, 5, 3)(looked_at()), "made for 5 heads of size 3, but attention has 4 of size 3"),
    (two_sizes, "The size of queries is not the same in all layers"),
)  # fmt: skip


def test_a_model_that_comes_to_write_its_attention_out_is_refused_in_the_forward_pass():
    model = bert()
    provider, says = (
        ContextualDropout.for_model(model),
        r"bert\.encoder\.layer\.0\.attention\.self exposes only its scores",
    )
    with attnreg.attach(model, provider):
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match=says):
            model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match=says):
        attnreg.attach(model, provider)
