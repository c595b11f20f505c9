"""HiddenCut against loops: which tokens are candidates, where spans begin, and whose attention it sees."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg import HiddenCut, HiddenSite, functional
from tests.cases import MODELS, output
from tests.test_contract import without_dropout

BERT = MODELS[0]
VALID = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False] * 2 + [True] * 6])


def spans(kept):
    """The dropped tokens of each sample."""
    return [(~row).nonzero().flatten().tolist() for row in kept]


def test_spans_begin_at_candidates_or_earlier():
    starts = torch.tensor([[0, 1, 0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0]]).bool()
    counts = [{}, {}, {}]
    for uniform in torch.linspace(0, 0.999, 200):
        kept = functional.sample_spans(0.4, VALID, uniform.expand(3, 1), starts=starts)
        for sample, span in enumerate(spans(kept)):
            counts[sample][tuple(span)] = counts[sample].get(tuple(span), 0) + 1
    assert counts[0] == {(1, 2, 3): 100, (5, 6, 7): 100}
    assert counts[1] == {(3, 4): 200}  # a candidate that is padding is none
    assert set(counts[2]) == {(2, 3), (3, 4), (4, 5), (5, 6), (6, 7)}  # without candidates, anywhere


@pytest.mark.parametrize("case", [case for case in MODELS if case.eager], ids=str)
def test_candidates_receive_the_most_attention_that_the_model_shows(case, monkeypatch):
    model, batch = case.build(), case.batch()
    without_dropout(model)
    seen = []

    def spy(received, tokens, candidates):
        seen.append((received, tokens))
        return tokens

    monkeypatch.setattr(functional, "candidate_region", spy)
    with attnreg.attach(model, HiddenCut(0.0)):
        output(model, batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        result = model(**batch, output_attentions=True)
    names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions"}
    shown = []
    for stack in case.stacks:
        if stack != "cross":
            shown += result[names[stack]] if len(case.stacks) > 1 else result["attentions"]
    assert len(seen) == len(shown)
    for (received, tokens), weights in zip(seen, shown, strict=True):
        batch_size, heads, queries, keys = weights.shape
        for b in range(batch_size):
            for k in range(keys):
                rows = [i for i in range(queries) if tokens[b, i]]
                total = sum(float(weights[b, h, i, k]) for h in range(heads) for i in rows)
                assert math.isclose(float(received[b, k]), total / heads, abs_tol=1e-5)


def test_a_span_of_each_layer_follows_its_own_attention():
    model, batch = BERT.build(), BERT.batch()
    torch.manual_seed(0)
    with attnreg.attach(model, HiddenCut(0.3)) as handle:
        output(model, batch)
        rates = handle.drop_rates()
        for label in ("encoder.0.output", "encoder.1.output"):
            assert 0.2 < rates[label] < 0.45
            assert rates[label.removesuffix(".output")] == 0
    assert handle.provider.attention.received == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_is_repeated_cuts_the_same(reentrant):
    gradients = []
    for repeats in (False, True):
        model, batch = BERT.build(), BERT.batch()
        model.get_input_embeddings().weight.requires_grad_()
        with attnreg.attach(model, HiddenCut(0.4)):
            for block in BERT.blocks(model) if repeats else ():
                forward = block.forward
                block.forward = lambda x, *rest, forward=forward, **more: checkpoint(
                    lambda y: forward(y, *rest, **more), x, use_reentrant=reentrant
                )
            torch.manual_seed(1)
            out = output(model, batch)
            (out[0] if isinstance(out, tuple) else out).float().square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_without_attention_there_are_no_candidates():
    with pytest.raises(ValueError, match=r"HiddenCut saw no attention between the tokens of block"):
        HiddenCut(0.5)(HiddenSite(shape=(1, 4, 2)), torch.ones(1, 4, 2))
