"""ContextualDropout: rates by query, a prior, networks that learn."""

import functools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnreg
from tests.cases import refused
from tests.learning import TEXT, Toy, assert_penalty, batch, bert, site, train


def looked_at(shape=(2, 4, 5, 6), dtype=torch.float32, **options):
    """A site with queries and keys of size 3."""
    generator = torch.Generator().manual_seed(7)
    query, key = (torch.randn(*shape[:2], n, 3, dtype=dtype, generator=generator) for n in shape[2:])
    return site(**{"shape": shape, "query": query, "key": key, **options})


def learned(*args, **options):
    """A provider of which all weights have been moved."""
    torch.manual_seed(0)
    provider = attnreg.ContextualDropout(2, 3, *args, **options)
    for weight in provider.parameters():
        weight.data += torch.randn_like(weight) / 2
    return provider


def predicted(network, query):
    """The rate of one query by the formula."""
    (w1, b1), (w2, b2) = ((linear.weight, linear.bias) for linear in (network[0], network[2]))
    hidden = w1 @ query + b1
    hidden = torch.stack([h if h > 0 else 0.01 * h for h in hidden])
    return torch.sigmoid((w2 @ hidden + b2)[0])


def test_all_rates_are_p_before_training():
    provider = attnreg.ContextualDropout(2, 3, 0.3)
    place = looked_at()
    assert provider.logits(1, place.query).sigmoid().flatten().tolist() == pytest.approx([0.3] * 2 * 4 * 5)


def test_the_mask_by_a_loop_and_its_gradient_in_float64():
    provider = learned(0.3, temperature=0.5).double()
    place = looked_at((2, 2, 2, 3), torch.float64, layer=1)
    torch.manual_seed(1)
    got = provider(place).weights
    torch.manual_seed(1)
    uniform = place.uniform(dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            for i in range(2):
                p = predicted(provider.networks[1], place.query[b, h, i]).item()
                for j in range(3):
                    u = uniform[b, h, i, j].item()
                    z = 1 / (1 + ((1 - p) / p * (1 - u) / u) ** 2)
                    assert got[b, h, i, j].item() == pytest.approx((1 - z) / (1 - p), abs=1e-12)
    names, values = zip(*provider.named_parameters(), strict=True)

    def masks(*parameters):
        torch.manual_seed(1)
        return torch.func.functional_call(provider, dict(zip(names, parameters, strict=True)), place).weights

    assert torch.autograd.gradcheck(masks, values)


def test_units_are_dropped_at_the_rate_of_their_query():
    provider = learned(0.3)
    place = looked_at((1, 1, 4, 20_000))
    torch.manual_seed(0)
    mask = provider(place)
    for i in range(4):
        p = predicted(provider.networks[0], place.query[0, 0, i]).item()
        assert abs(float((~mask.kept[0, 0, i]).float().mean()) - p) < 5 * math.sqrt(p * (1 - p) / 20_000)


def test_the_penalty_is_the_mean_divergence_over_real_rows_however_often_masks_were_drawn():
    provider = learned(0.3, 0.2, regularizer=0.5).double()
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]).view(2, 1, 1, 5)
    places = [looked_at((2, 4, 5, 5), torch.float64, layer=layer, valid=valid) for layer in range(2)]
    assert provider.penalty() is None
    total = 0.0
    for layer, place in enumerate(places):
        terms = []
        for b, rows in ((0, 5), (1, 3)):
            for h in range(4):
                for i in range(rows):
                    p = predicted(provider.networks[layer], place.query[b, h, i])
                    terms.append(p * (p / 0.2).log() + (1 - p) * ((1 - p) / 0.8).log())
        total = total + 0.5 * torch.stack(terms).mean() / 2
    assert_penalty(provider, places, total)
    provider.step()
    assert provider.penalty() is None


def test_no_gradient_reaches_the_queries():
    place = looked_at()
    query = place.query.requires_grad_()
    provider = learned(0.3)
    (provider(place).weights.sum() + provider.penalty()).backward()
    assert query.grad is None


@pytest.mark.parametrize(("sign", "grows"), [(1, False), (-1, True)])
def test_the_rate_falls_where_noise_harms_and_grows_where_it_helps(sign, grows):
    provider = attnreg.ContextualDropout.for_model(Toy(), 0.3, regularizer=0.0, example_inputs=batch())
    rate = train(Toy(sign), provider, steps=40, lr=0.03)
    assert rate > 0.5 if grows else rate < 0.15


def test_the_prior_holds_the_rate_up():
    provider = attnreg.ContextualDropout.for_model(Toy(), 0.3, regularizer=30.0, example_inputs=batch())
    assert 0.2 < train(Toy(1), provider, steps=40, lr=0.03) < 0.4


def recomputed(forward, reentrant, *args, **kwargs):
    return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cls", [attnreg.ContextualDropout, attnreg.AdversarialAttention], ids=lambda c: c.__name__)
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


test_what_does_not_fit_is_refused = refused(
    (lambda: attnreg.ContextualDropout(3, 3).check([site()], None), "This ContextualDropout was made for"),
    (lambda: attnreg.ContextualDropout(2, 3)(site()), "ContextualDropout needs queries, but attention exposes only its scores"),
    (lambda: attnreg.ContextualDropout(2, 4)(looked_at()), r"heads of size 4, but attention has 4 of size 3"),
)  # fmt: skip


def test_a_model_that_comes_to_write_its_attention_out_is_refused_in_the_forward_pass():
    model = bert()
    provider = attnreg.ContextualDropout.for_model(model)
    with attnreg.attach(model, provider):
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match=r"bert\.encoder\.layer\.0\.attention\.self exposes only its scores"):
            model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match=r"bert\.encoder\.layer\.0\.attention\.self exposes only its scores"):
        attnreg.attach(model, provider)
