"""Masks through SDPA, which factors, heads and keys reach without attention weights, are those of eager attention."""

import pytest
import torch
import transformers as hf

import attnreg
from attnreg import functional
from attnreg.functional import blocks
from attnreg.injection.running.rates import Count, DropRates
from attnreg.masks import Mask
from tests.helpers.provider_cases import PROVIDERS

IDS = torch.randint(1, 30, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 5:] = 0
DROP = attnreg.AttentionDropout
TOGETHER = {
    "heads & weights": lambda: attnreg.DropHead(0.4) & DROP(0.3),
    "heads & scores": lambda: attnreg.DropHead(0.4) & DROP(0.3, placement="scores"),
    "heads & keys & weights": lambda: (
        attnreg.HeadMask(1) & attnreg.DropKey(0.3, share_queries=True) & DROP(0.2, rescale=False)
    ),
    "two weights": lambda: DROP(0.3) & DROP(0.2),
    "two scores": lambda: attnreg.DropKey(0.3) & attnreg.DropKey(0.9, share_queries=True),
    "heads & normalized": lambda: attnreg.DropHead(0.4) & attnreg.DropAttention(0.3),
    "heads & relaxed": lambda: attnreg.DropHead(0.4) & attnreg.RelaxedAttention(0.2),
    "relaxed heads & weights": lambda: RelaxedHeads() & DROP(0.3),
}


class RelaxedHeads(attnreg.MaskProvider):
    """Drops heads by factors that are never 0."""

    def forward(self, site):
        factor = site.uniform((*site.shape[:2], 1, 1), dtype=site.dtype) + 0.1
        return Mask(weights=factor, kept=factor > 0.5)


def model(kernel, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.BertConfig(**sizes, intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    made = hf.BertModel(config).to(dtype).train()
    made.set_attn_implementation(kernel)
    return made


@pytest.mark.parametrize("name", TOGETHER)
def test_compositions_are_those_of_eager_attention(name):
    found = []
    for kernel in ("sdpa", "eager"):
        made = model(kernel)
        handle = attnreg.attach(made, TOGETHER[name]())
        torch.manual_seed(5)
        out = made(input_ids=IDS, attention_mask=MASK).last_hidden_state * MASK[..., None]
        out.sin().sum().backward()
        found.append((out, handle.drop_rates(), [p.grad for p in made.parameters() if p.grad is not None]))
    (ours, rates, gradients), (theirs, their_rates, their_gradients) = found
    assert (ours - theirs).abs().max() < 1e-12
    assert rates == pytest.approx(their_rates, abs=1e-6)
    for a, b in zip(gradients, their_gradients, strict=True):
        assert (a - b).abs().max() < 1e-11


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("case", PROVIDERS, ids=str)
def test_drop_rates_are_the_shares_of_dropped_units(case, kernel, monkeypatch):
    if kernel == "eager" and ("Contextual" in case.text or "Adversarial" in case.text):
        pytest.skip("needs queries, which eager attention hides")
    made = model(kernel, torch.float32)
    provider = case.make(made)
    parts = provider.parts()
    masks = any(isinstance(each, attnreg.MaskProvider) for each in parts)
    if not masks or provider.may_skip_blocks or any(each.looks_at_batches for each in parts):
        pytest.skip("drops no attention, or whole blocks, or after a first pass")
    asked, shares = type(provider).mask_at, {}

    def watched(self, site):
        mask = asked(self, site)
        if self is provider:
            kept = None if mask is None else mask.units_kept
            kept = torch.ones(()) if kept is None else kept
            shares[site.label] = float(functional.drop_rate(kept.expand(site.shape), site.units))
        return mask

    handle = attnreg.attach(made, provider)
    monkeypatch.setattr(type(provider), "mask_at", watched)
    made(input_ids=IDS, attention_mask=MASK)
    assert shares
    assert {label: handle.drop_rates()[label] for label in shares} == pytest.approx(shares, abs=1e-6)


def test_factors_that_a_row_shares_need_no_weights():
    rest, factor = Mask(weights=torch.ones(2, 4, 1, 1), scores=torch.ones(1, 1, 3, 3, dtype=torch.bool)).factored()
    assert rest.weights is None
    assert factor.shape == (2, 4, 1, 1)
    whole = Mask(weights=torch.ones(2, 4, 3, 3))
    assert whole.factored() == (whole, None)


@pytest.mark.parametrize("at_once", [1, 7, 20, 40, 10**6])
def test_dropped_weights_are_the_same_in_any_blocks(at_once, monkeypatch):
    torch.manual_seed(0)
    inputs = [torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    keep = torch.rand(3, 2, 5, 5) > 0.3
    valid = torch.ones(3, 1, 5, 5, dtype=torch.bool).tril()
    valid[1, :, 2] = False
    plain = (functional.attention_weights(*inputs[:2], valid) * keep / 0.75) @ inputs[2]
    monkeypatch.setattr(blocks, "BLOCK", at_once)
    blocks._blocks.cache_clear()
    in_blocks = functional.weights_dropout(*inputs, keep, valid, rescale=True, p=0.25)
    blocks._blocks.cache_clear()
    assert torch.allclose(in_blocks, plain)
    ours, theirs = (torch.autograd.grad(out.sin().sum(), inputs) for out in (in_blocks, plain))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b)


def test_dropped_weights_have_second_derivatives():
    q, k, v = (torch.randn(2, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 5, 5))
    keep, valid = torch.rand(2, 2, 4, 5) < 0.6, torch.rand(2, 1, 4, 5) < 0.7
    valid[0, :, 1] = False  # a row without a valid key

    def attend(*inputs):
        return functional.weights_dropout(*inputs, keep, valid, rescale=True, p=0.4)

    assert torch.autograd.gradcheck(attend, (q, k, v))
    assert torch.autograd.gradgradcheck(attend, (q, k, v))


@pytest.mark.parametrize("seed", [0, 7, -3, 2**63 - 1, -(2**62) - 5])
def test_one_number_is_that_of_a_tensor(seed):
    zero = torch.tensor(0)
    number = functional.uniform_at(seed, zero, zero, zero, zero)
    assert torch.equal(functional.seeded_uniform(seed, ()), number)
    for p in (0.0, 0.3, float(number), 1.0):
        assert torch.equal(functional.seeded_keep(seed, (1, 1), p), (number >= torch.tensor(p)).view(1, 1))


def test_mean_rates_of_layers_that_a_model_leaves_out_at_random():
    rates, seen = DropRates(), {}
    for number in range(60):
        rates.clear()
        for layer in range(6):
            if number >> layer & 1:
                site = attnreg.SiteInfo(layer=layer, num_layers=6)
                rates.note_count(site, Count(10, number % 7))
                seen.setdefault(site.label, []).append(number % 7 / 10)
    assert rates.mean() == pytest.approx({label: sum(found) / len(found) for label, found in seen.items()})


@pytest.mark.parametrize("number", [1, 2])
def test_counters_of_kernels_are_aligned_and_do_not_overlap(number):
    rates = DropRates()
    counters = [rates.counters(number, 4 * number, torch.device("cpu")) for _ in range(6)]
    for i, counter in enumerate(counters):
        assert counter.shape == (number,)
        assert counter.data_ptr() % 16 == 0
        counter += i + 1
    assert [counter.tolist() for counter in counters] == [[i + 1] * number for i in range(6)]
    assert len({counter.untyped_storage().data_ptr() for counter in counters}) == 2
