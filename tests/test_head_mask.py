"""HeadMask: as many heads as asked for, and the ones that a gate on them finds important."""

import pytest
import torch
from transformers.models.bert import modeling_bert

import attnreg
from tests.helpers.cases import NO_DROPOUT
from tests.helpers.cases import bert_in_float64 as bert
from tests.helpers.models import TEXTS
from tests.helpers.reference import close

BATCH = {**TEXTS, "labels": torch.tensor([1, 0])}


def test_random_sets_of_heads_are_all_as_likely():
    torch.manual_seed(0)
    provider, site = attnreg.HeadMask(2), attnreg.AttentionSite(shape=(3, 4, 5, 5))
    drawn = []
    for _ in range(3000):
        weights = provider(site).weights
        assert weights.shape == (1, 4, 1, 1)
        drawn.append(tuple((~weights).flatten().nonzero().flatten().tolist()))
    assert all(len(heads) == 2 for heads in drawn)
    for heads in set(drawn):
        assert close(drawn.count(heads) / 3000, 1 / 6, 3000)
    assert len(set(drawn)) == 6


@pytest.mark.parametrize("n", [1, 3, 7])
def test_all_but_the_highest_are_kept(n, monkeypatch):
    torch.manual_seed(n)
    values = torch.rand(8)
    provider = attnreg.HeadMask(n)
    site = attnreg.AttentionSite(shape=(1, 8, 3, 3))
    monkeypatch.setattr(attnreg.AttentionSite, "uniform", lambda *args: values)
    keep = provider(site).weights.flatten()
    for h in range(8):
        assert bool(keep[h]) == (sum(bool(other > values[h]) for other in values) >= n)


def gated_loss(model, gates):
    """The loss with a gate on each head of each layer: transformers' own eager attention, gated."""
    plain = modeling_bert.eager_attention_forward

    def forward(module, query, key, value, mask, **kwargs):
        out, a = plain(module, query, key, value, mask, **kwargs)
        return out * gates[module.layer_idx][None, None, :, None], a

    modeling_bert.eager_attention_forward = forward
    try:
        return model(**BATCH).loss
    finally:
        modeling_bert.eager_attention_forward = plain


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_importance_is_the_derivative_by_a_gate_on_the_head(implementation):
    model = bert().eval()
    model.set_attn_implementation("eager")
    gates = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    gated_loss(model, gates).backward()
    differences = torch.zeros(2, 4, dtype=torch.float64)
    for layer in range(2):
        for h in range(4):
            step = torch.zeros(2, 4, dtype=torch.float64)
            step[layer, h] = 1e-6
            with torch.no_grad():
                differences[layer, h] = (gated_loss(model, 1 + step) - gated_loss(model, 1 - step)) / 2e-6
    assert (gates.grad - differences).abs().max() < 1e-8
    model.set_attn_implementation(implementation)
    model.train()
    provider = attnreg.HeadMask(2, by="importance")
    with attnreg.attach(model, provider):
        provider.attribute(model, BATCH)
        masks = []
        for layer in range(2):
            got = provider.importances[f"encoder.{layer}"]
            assert (got - gates.grad[layer].abs()).abs().max() < 1e-12
        model(**BATCH)
        for layer in range(2):
            site = attnreg.AttentionSite(shape=(2, 4, 5, 5), layer=layer, num_layers=2)
            masks.append(provider(site).weights.flatten())
    for layer in range(2):
        order = gates.grad[layer].abs().tolist()
        assert {h for h in range(4) if not masks[layer][h]} == set(sorted(range(4), key=lambda h: -order[h])[:2])


def test_masked_heads_contribute_nothing():
    model = bert(**NO_DROPOUT).train()
    provider = attnreg.HeadMask(1, by="importance")
    with attnreg.attach(model, provider) as handle:
        provider.attribute(model, BATCH)
        got = model(**BATCH).loss
        assert handle.drop_rates() == {"encoder.0": 0.25, "encoder.1": 0.25}
    values = torch.stack([provider.importances[f"encoder.{i}"] for i in range(2)])
    gates = values != values.amax(1, keepdim=True)
    model.set_attn_implementation("eager")
    assert (gated_loss(model, gates.double()) - got).abs() < 1e-12


def test_other_targets_need_no_labels():
    model = bert()
    batch = {name: value for name, value in BATCH.items() if name != "labels"}
    for target in ("predicted", lambda output, batch: output.logits.sum(-1)):
        provider = attnreg.HeadMask(1, by="importance", target=target)
        with attnreg.attach(model, provider):
            provider.attribute(model, batch)
        assert len(provider.importances) == 2
    provider = attnreg.HeadMask(1, by="importance")
    with (
        attnreg.attach(model, provider),
        pytest.raises(attnreg.errors.InputError, match=r"The model's output, .*, has no `loss`: pass `labels`"),
    ):
        provider.attribute(model, batch)


@pytest.mark.parametrize("heads", [4, 5])
def test_a_layer_without_that_many_heads_is_refused(heads):
    model, says = bert().train(), rf"Expected `heads` of .* to be below 4, got {heads}"
    for by in ("random", "importance"):
        with pytest.raises(ValueError, match=says):
            attnreg.attach(model, attnreg.OnLayers(attnreg.HeadMask(heads, by), [1]))
        assert not attnreg.is_attached(model)
    with pytest.raises(ValueError, match=says):
        attnreg.HeadMask(heads)(attnreg.AttentionSite(shape=(1, 4, 2, 2)))
