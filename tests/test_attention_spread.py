"""The entropy of attention, and relaxed attention, against loops: what they are, when and for whom."""

import copy
import itertools
import math

import pytest
import torch
import transformers as hf

import attnreg
from attnreg import AttentionEntropy, Mask, RelaxedAttention, functional
from tests.helpers.cases import BERT, FEW, MODELS, bert_in_float64, output, sample, shown_attentions
from tests.helpers.passes import under_both_kernels, without_dropout, wrap_in_checkpoints


def test_the_entropy_is_that_of_a_loop():
    torch.manual_seed(0)
    scores, valid = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.rand(2, 1, 4, 5) < 0.6
    valid[0, 0, 1] = False
    got = functional.attention_entropy(scores.masked_fill(~valid, -math.inf), valid)
    for b, h, q in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        keys = [k for k in range(5) if valid[b, 0, q, k]]
        total = sum(math.exp(scores[b, h, q, k]) for k in keys)
        shares = [math.exp(scores[b, h, q, k]) / total for k in keys]
        assert math.isclose(float(got[b, h, q]), -sum(a * math.log(a) for a in shares), abs_tol=1e-12)
    scores.requires_grad_()
    torch.autograd.gradcheck(lambda s: functional.attention_entropy(s, valid), scores)


@pytest.mark.parametrize("case", [case for case in MODELS if case.eager], ids=str)
def test_the_penalty_is_that_of_the_weights_that_the_model_shows(case):
    model, batch = case.build(), case.batch()
    without_dropout(model)
    provider = AttentionEntropy(0.5)
    with attnreg.attach(model, provider):
        output(model, batch)
        penalty = provider.penalty()
        assert provider.penalty() is None
    expected = 0.0
    for stack, shown in shown_attentions(case, model, batch).items():
        for weights in shown if stack != "cross" else ():
            rows = torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool)
            if "attention_mask" in batch and not (case.inputs == "pair" and stack == "decoder"):
                rows = batch["attention_mask"].bool()
            logs = torch.where(weights > 0, weights.clamp(min=1e-30).log(), 0.0)
            expected -= 0.5 * -(weights * logs).sum(-1).mean(1)[rows].mean()
    torch.testing.assert_close(penalty, expected, rtol=1e-4, atol=1e-6)


def gradients(model, provider, batch):
    model.zero_grad()
    torch.manual_seed(0)
    (output(model, batch).square().sum() + provider.penalty()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_under_gradient_checkpointing_it_counts_once():
    model, batch, provider = BERT.build(), BERT.batch(), AttentionEntropy(0.5) & attnreg.DropKey(0.2)
    with attnreg.attach(model, provider) as handle:
        expected = gradients(model, provider, batch)
        wrap_in_checkpoints(BERT, model)
        torch.testing.assert_close(gradients(model, provider, batch), expected)
        assert provider.penalty() is None
        output(model, batch)
        copy.deepcopy(model)  # with a graph alive
        with handle.disabled():
            provider.penalty()
            output(model, batch)
            assert provider.penalty() is None


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs:UserWarning")  # which advise against it
def test_reentrant_checkpointing_would_leave_no_gradient():
    model, provider = BERT.build(), AttentionEntropy(1.0)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with attnreg.attach(model, provider) as handle:
        with pytest.raises(RuntimeError, match="whose attention is computed without gradients: use gradient checkpoin"):
            output(model, BERT.batch())
        with torch.no_grad(), handle.probing():
            output(model, BERT.batch())
        assert not provider.penalty().requires_grad


G = 0.3


def slow(weights, keep, valid, gamma):
    """A' row by row."""
    out = weights.clone()
    for b, h, q in torch.cartesian_prod(*(torch.arange(n) for n in weights.shape[:3])).tolist():
        keys = [k for k in range(weights.shape[3]) if valid[b, h, q, k] and keep[b, h, q, k]]
        keys = keys or [k for k in range(weights.shape[3]) if valid[b, h, q, k]]
        for k in range(weights.shape[3]):
            if keys:
                out[b, h, q, k] = (1 - gamma) * weights[b, h, q, k] + gamma * (k in keys) / len(keys)
    return out


def drawn():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, 5, dtype=torch.float64) for _ in range(3))
    keep, valid = (torch.rand(2, 3, 4, 4) < 0.6 for _ in range(2))
    keep[0, 0, 1] = False  # dropped entirely
    valid[0, 0, 1, 2] = True
    valid[1, :, 2] = False  # a row without a key
    return q, k, v, keep, valid


def test_weights_and_output_are_those_of_a_loop():
    q, k, v, keep, valid = drawn()
    gamma = torch.tensor(G, dtype=torch.float64)
    weights = functional.attention_weights(q, k, valid, keep=keep)
    expected = slow(weights, keep, valid, G)
    torch.testing.assert_close(functional.relaxed_weights(weights, gamma, keep, valid), expected)
    output = functional.scores_dropout(q, k, v, keep, valid)
    shape = weights.shape
    torch.testing.assert_close(functional.relaxed_output(output, v, gamma, keep, valid, shape), expected @ v)
    per_row = torch.rand(2, 3, 4, 1, dtype=torch.float64)
    rows = functional.relaxed_weights(weights, per_row, None, None)
    torch.testing.assert_close(rows, (1 - per_row) * weights + per_row * weights.sum(-1, keepdim=True) / 4)


def test_masks_compose():
    both = Mask(relaxed=torch.tensor(0.2)) & Mask(relaxed=torch.tensor(0.5)) & Mask(scores=torch.tensor([True, False]))
    weights = torch.tensor([[1.0, 0.0]])
    torch.testing.assert_close(both.relaxed, torch.tensor(1 - 0.8 * 0.5))
    torch.testing.assert_close(both.of_weights(weights, None), weights)  # the dropped key gets nothing
    assert not Mask(scores=torch.tensor(False), weights=torch.tensor(1.0)).drops_layer
    assert (Mask(scores=torch.tensor(False)) & Mask(relaxed=torch.tensor(0.2))).drops_layer
    factor = Mask(relaxed=torch.tensor(0.5), weights=torch.tensor([2.0, 0.0]))
    assert factor.of_weights(weights, None).tolist() == [[1.5, 0.0]]  # and factors come last


class DropFirst(attnreg.MaskProvider):
    def forward(self, site):
        return Mask(scores=torch.arange(site.shape[-1]) > 0)


SPREAD = {"alone": lambda: RelaxedAttention(0.3), "with a mask": lambda: RelaxedAttention(0.3) & DropFirst()}


@pytest.mark.parametrize(
    ("case", "name"),
    sample(
        itertools.product([case for case in MODELS if case.eager], SPREAD),
        lambda case, name: name == "with a mask" or case.name in FEW,
    ),
    ids=str,
)
def test_fused_and_written_out_attention_agree(case, name):
    # With the usual small weights, attention would be almost uniform already.
    plain, (fused, gradients), (written, its_gradients) = under_both_kernels(case, SPREAD[name](), std=0.3)
    assert (written - fused).abs().max() < 1e-5
    assert (plain - fused).abs().max() > 1e-3
    for ours, theirs in zip(gradients, its_gradients, strict=True):
        assert ours is theirs is None or (ours - theirs).abs().max() < 1e-4


def test_all_is_the_mean_over_valid_keys_and_none_is_nothing():
    model, batch = MODELS[0].build(), MODELS[0].batch()
    without_dropout(model)
    plain, ends = output(model, batch), []
    for provider in (RelaxedAttention(0.0), RelaxedAttention(1.0), attnreg.AttentionLayerDrop(1.0)):
        with attnreg.attach(model, provider) as handle:
            ends.append(output(model, batch))
            assert set(handle.drop_rates().values()) == {float(len(ends) == 3)}
    torch.testing.assert_close(ends[0], plain)
    torch.testing.assert_close(ends[1], ends[2])


def test_without_dropout_of_its_own_attention_is_not_written_out(monkeypatch):
    model = MODELS[0].build()
    monkeypatch.setattr(functional, "attention_weights", None)
    with attnreg.attach(model, RelaxedAttention(0.1)):
        with pytest.raises(TypeError):
            output(model, MODELS[0].batch())  # its own dropout is of relaxed weights
        without_dropout(model)
        output(model, MODELS[0].batch())


@pytest.mark.parametrize("relaxed", [torch.tensor(True), torch.rand(2, 2)])
def test_a_share_is_a_float_per_row(relaxed):
    with pytest.raises(TypeError, match="Expected `relaxed` to be a float tensor"):
        Mask(relaxed=relaxed)


IDS = torch.randint(1, 9, (3, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("stacks", [["decoder"], ["cross"]])
def test_padded_queries_of_a_decoder_count_nowhere(stacks):
    found = []
    for padding in (0, 5):
        torch.manual_seed(0)
        config = hf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0)
        model = hf.T5ForConditionalGeneration(config)
        target = torch.nn.functional.pad(IDS[:, :4], (0, padding))
        mask = (torch.arange(4 + padding) < 4).int().expand(3, -1)
        batch = {"input_ids": IDS, "decoder_input_ids": target, "decoder_attention_mask": mask}
        entropy, drop = attnreg.AttentionEntropy(0.1), attnreg.AttributionProvider(0.5, 1.0)
        with attnreg.attach(model, entropy & drop, stacks=stacks) as handle:
            model.train()
            drop.attribute(model, {**batch, "labels": target.masked_fill(mask == 0, -100)})
            model(**batch, labels=target.masked_fill(mask == 0, -100))
            found.append(torch.stack([entropy.penalty(), *handle.drop_rate_tensors().values()]))
    assert torch.allclose(*found, atol=1e-6)


def test_the_weight_of_the_entropy_follows_the_depth():
    def penalty(provider):
        model = bert_in_float64()
        with attnreg.attach(model, provider):
            model.train()(input_ids=IDS)
            return float(provider.penalty().detach())

    alone = [penalty(attnreg.OnLayers(attnreg.AttentionEntropy(1.0), [layer])) for layer in (0, 1)]
    weighted = attnreg.Scheduled(attnreg.AttentionEntropy(1.0), over="depth", alpha=[(0, 0.2), (1, 0.7)])
    assert penalty(weighted) == pytest.approx(0.2 * alone[0] + 0.7 * alone[1])


def test_a_scheduled_weight_leaves_the_penalty_in_the_precision_of_the_model():
    model, provider = bert_in_float64().float(), attnreg.Scheduled(AttentionEntropy(), 10, alpha=[(0, 0.1), (1, 0.2)])
    with attnreg.attach(model.train(), provider):
        model(input_ids=IDS)
        assert provider.penalty().dtype == torch.float32
