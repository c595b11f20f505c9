"""AdversarialAttention: masks by single-head attention, a reversed gradient, a price."""

import math

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

import attnreg
from attnreg import functional
from tests.cases import refused
from tests.learning import Toy, assert_penalty, batch, site, train
from tests.test_contextual_dropout import looked_at


def learned(*args, **options):
    """A provider of which all weights have been moved."""
    torch.manual_seed(0)
    provider = attnreg.AdversarialAttention(2, 4, 3, *args, **options)
    for weight in provider.parameters():
        weight.data += torch.randn_like(weight) / 3
    return provider


def by_loops(provider, layer, query, key):
    """Probabilities of keeping, (B, Q, K), by the formula."""
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


@pytest.mark.parametrize("size", [None, 5])
def test_probabilities_by_a_loop(size):
    provider = learned(size).double()
    place = looked_at(dtype=torch.float64)
    got = provider.logits(1, place.query, place.key).sigmoid()[:, 0]
    assert (got - by_loops(provider, 1, place.query, place.key)).abs().max() < 1e-12


def test_a_unit_is_masked_where_it_is_more_probable_or_by_chance():
    place = looked_at((1, 4, 2, 3))
    provider = learned(sampled=False)
    probability = by_loops(provider, 0, place.query, place.key)[0]
    assert torch.equal(provider(place).kept[0, 0], probability > 0.5)
    provider.sampled = True
    torch.manual_seed(0)
    n = 3000
    kept = torch.stack([provider(place).kept[0, 0] for _ in range(n)]).float().mean(0)
    assert ((kept - probability).abs() < 5 * (probability * (1 - probability) / n).sqrt()).all()


def test_all_heads_have_the_mask_and_grouped_keys_stand_for_their_heads():
    place = looked_at()
    grouped = site(shape=place.shape, query=place.query, key=place.key[:, ::2])
    whole = site(shape=place.shape, query=place.query, key=place.key[:, [0, 0, 2, 2]])
    provider = learned(sampled=False)
    assert provider(place).normalized.shape == (2, 1, 5, 6)
    assert torch.equal(provider(grouped).normalized, provider(whole).normalized)


def test_the_gradient_is_that_of_the_probabilities_reversed():
    provider = learned(sampled=False).double()
    place = looked_at((2, 4, 5, 5), torch.float64)
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


@pytest.mark.parametrize("heads", [1, 4])
def test_the_price_is_the_share_that_is_masked_of_the_units_that_count(heads):
    provider = learned(price=2.0).double()
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]).view(2, 1, 1, 5).expand(2, heads, 5, 5)
    places = [looked_at((2, 4, 5, 5), torch.float64, layer=layer, valid=valid) for layer in range(2)]
    assert provider.penalty() is None
    total = 0.0
    for layer, place in enumerate(places):
        masked = 1 - by_loops(provider, layer, place.query, place.key)
        total = total + 2.0 * torch.cat([masked[0].flatten(), masked[1, :3, :3].flatten()]).mean() / 2
    assert_penalty(provider, places, total)


class Linear(Toy):
    """Some keys raise the loss of those who attend to them, others lower it."""

    def forward(self, x):
        out = super().forward(x)
        return ModelOutput(loss=self.sign * 10 * out.logits.mean())


def loss_under(provider, model):
    with torch.no_grad(), attnreg.attach(model, provider, example_inputs=batch()) as handle, handle.probing():
        torch.manual_seed(0)
        return sum(float(model(**batch()).loss) for _ in range(20)) / 20


@pytest.mark.parametrize("sign", [1, -1])
def test_the_generator_learns_to_raise_the_loss(sign):
    model = Linear(sign)
    torch.manual_seed(0)
    provider = attnreg.AdversarialAttention.for_model(model, None, 0.7, price=0.1, example_inputs=batch())
    before = loss_under(provider, model)
    train(model, provider, steps=60, lr=0.02)
    assert loss_under(provider, model) > before + 0.2 * abs(before)


def test_a_high_price_makes_it_mask_nothing_and_none_lets_it_mask():
    rates = []
    for price in (0.0, 100.0):
        torch.manual_seed(0)
        provider = attnreg.AdversarialAttention.for_model(Toy(), None, 0.7, price=price, example_inputs=batch())
        rates.append(train(Toy(), provider, steps=60, lr=0.05))
    assert rates[1] < 0.05 < rates[0]


def test_no_gradient_reaches_queries_and_keys():
    place = looked_at()
    tensors = place.query.requires_grad_(), place.key.requires_grad_()
    provider = learned()
    (provider(place).normalized.sum() + provider.penalty()).backward()
    assert all(x.grad is None for x in tensors)


def two_sizes():
    layers = [nn.TransformerEncoderLayer(8, heads, 16, batch_first=True) for heads in (2, 4)]
    model = nn.Sequential(*layers)
    return attnreg.AdversarialAttention.for_model(model, example_inputs=(torch.randn(1, 3, 8),))


test_what_does_not_fit_is_refused = refused(
    (lambda: attnreg.AdversarialAttention(3, 4, 3).check([site()], None), "This AdversarialAttention was made for"),
    (lambda: attnreg.AdversarialAttention(2, 4, 3)(site()), "AdversarialAttention needs queries, but attention exposes only its scores"),
    (lambda: attnreg.AdversarialAttention(2, 5, 3)(looked_at()), "made for 5 heads of size 3, but attention has 4 of size 3"),
    (two_sizes, "The size of queries is not the same in all layers"),
)  # fmt: skip
