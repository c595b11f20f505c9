"""The entropy of attention against loops; what the penalty is, when and for whom."""

import copy
import functools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg import AttentionEntropy, functional
from tests.cases import MODELS, output
from tests.test_contract import without_dropout

BERT = MODELS[0]


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
    model.set_attn_implementation("eager")
    result = model(**batch, output_attentions=True)
    shown = {"encoder": "encoder_attentions", "decoder": "decoder_attentions"}
    expected = 0.0
    for stack in case.stacks:
        if stack == "cross":
            continue
        for weights in result[shown[stack]] if len(case.stacks) > 1 else result["attentions"]:
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
        for block in BERT.blocks(model):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        for ours, theirs in zip(gradients(model, provider, batch), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert provider.penalty() is None
        output(model, batch)
        copy.deepcopy(model)  # with a graph alive
        with handle.disabled():
            provider.penalty()
            output(model, batch)
            assert provider.penalty() is None


def test_with_it_attention_becomes_flatter():
    model, batch, provider = BERT.build(), BERT.batch(), AttentionEntropy(1.0)
    without_dropout(model)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    with attnreg.attach(model, provider):
        for _ in range(5):
            output(model, batch)
            penalty = provider.penalty()
            seen.append(penalty.item())
            optimizer.zero_grad()
            penalty.backward()
            optimizer.step()
    assert seen == sorted(seen, reverse=True)


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
