"""HiddenDropout and HiddenCut against loops: what is dropped, which tokens are candidates, and whose attention they see."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg import HiddenCut, HiddenDropout, HiddenSite, functional
from attnreg.regularizer.base import Container
from tests.helpers.cases import BERT, MODELS, output, refused, shown_attentions
from tests.helpers.passes import without_dropout
from tests.helpers.reference import close

P = 0.3


def drawn(mode, shape=(8, 40, 50), p=P, valid=None, **options):
    torch.manual_seed(0)
    states = torch.randn(shape, dtype=torch.float64)
    site = HiddenSite(shape=shape, valid=valid, dtype=torch.float64)
    return states, HiddenDropout(p, mode, **options)(site, states)


@pytest.mark.parametrize("mode", ["element", "column"])
def test_values_are_kept_or_dropped(mode):
    states, out = drawn(mode)
    factor = 1 / (1 - P)
    for value, got in zip(states.flatten().tolist(), out.flatten().tolist(), strict=True):
        assert got in (0.0, pytest.approx(value * factor))
    zero = out == 0
    decisions = zero if mode == "element" else zero[:, 0]
    if mode == "column":
        assert all(torch.equal(zero[:, 0], zero[:, t]) for t in range(40))
        assert not torch.equal(zero[0], zero[1])
    assert close(decisions.double().mean(), P, decisions.numel())


def test_spans_are_a_share_of_the_tokens_without_padding():
    lengths = [20, 11, 1, 7]
    valid = torch.zeros(4, 20, dtype=torch.bool)
    for b, n in enumerate(lengths):
        valid[b, (3 if b == 3 else 0) : (3 if b == 3 else 0) + n] = True  # the last is padded on the left, too
    starts = []
    for _ in range(200):
        keep = functional.sample_spans(P, valid, torch.rand(4, 1))
        for b, n in enumerate(lengths):
            dropped = [t for t in range(20) if not keep[b, t]]
            assert len(dropped) == math.floor(P * n + 0.5)
            assert dropped == list(range(dropped[0], dropped[0] + len(dropped))) if dropped else True
            assert all(valid[b, t] for t in dropped)
        starts.append(int((~keep[0]).int().argmax()))
    assert {*starts} == set(range(20 - 6 + 1))  # every place occurs
    states, out = drawn("span", (4, 20, 5), valid=valid)
    assert torch.equal(out[out != 0], states[out != 0])


def test_p_of_one_drops_everything_and_the_pooled_state_is_a_row():
    assert not drawn("element", p=1.0)[1].any()
    assert not drawn("span", p=1.0)[1].any()
    assert drawn("column", p=0.0)[1].equal(drawn("column", p=0.0)[0])
    _, out = drawn("column", (100, 30), where="pooled")
    assert abs((out == 0).double().mean() - P) < 0.05
    assert len({tuple(row) for row in (out == 0).tolist()}) > 50


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
    with torch.no_grad():
        attentions = shown_attentions(case, model, batch)
    shown = [weights for stack in case.stacks if stack != "cross" for weights in attentions[stack]]
    assert len(seen) == len(shown)
    for (received, tokens), weights in zip(seen, shown, strict=True):
        batch_size, heads, queries, keys = weights.shape
        for b in range(batch_size):
            for k in range(keys):
                rows = [i for i in range(queries) if tokens[b, i]]
                total = sum(float(weights[b, h, i, k]) for h in range(heads) for i in rows)
                assert math.isclose(float(received[b, k]), total / heads, abs_tol=1e-5)


def test_rates_count_what_dropout_zeroed_before_noise_was_added():
    model, dropped = BERT.build(), {}
    without_dropout(model)
    for noise_first in (False, True):
        dropout, noise = HiddenDropout(P, where="embeddings"), attnreg.EmbeddingNoise(1.0)
        with attnreg.attach(model, noise & dropout if noise_first else dropout & noise) as handle:
            torch.manual_seed(0)
            output(model, BERT.batch())
        [(label, rate)] = handle.drop_rate_tensors().items()
        assert label == "encoder.0.embeddings"
        dropped[noise_first] = float(rate)
    assert all(0.2 < each < 0.4 for each in dropped.values())


class OnFirstToken(Container):
    def __init__(self):
        super().__init__()
        self.provider = HiddenDropout(1.0, "column")

    def states_at(self, site, states):
        return torch.cat([self.provider.states_at(site, states[:, :1]), states[:, 1:]], 1)


def test_rates_of_a_container_that_hands_on_a_part():
    model = BERT.build()
    without_dropout(model)
    batch = {name: tensor[:, :4] for name, tensor in BERT.batch().items() if name != "attention_mask"}
    with attnreg.attach(model.train(), OnFirstToken()) as handle:
        output(model, batch)
    assert all(float(rate) == pytest.approx(1 / 4, abs=1e-3) for rate in handle.drop_rate_tensors().values())


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


def test_a_block_that_a_reentrant_checkpoint_repeats_cuts_the_same():
    gradients = []
    for repeats in (False, True):
        model, batch = BERT.build(), BERT.batch()
        model.get_input_embeddings().weight.requires_grad_()
        with attnreg.attach(model, HiddenCut(0.4)):
            for block in BERT.blocks(model) if repeats else ():
                forward = block.forward
                block.forward = lambda x, *rest, forward=forward, **more: checkpoint(
                    lambda y: forward(y, *rest, **more), x, use_reentrant=True
                )
            torch.manual_seed(1)
            output(model, batch).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


test_what_is_refused = refused(
    (lambda: HiddenDropout(0.1, where="outputs"), "Expected `where` to be one of embeddings.*Did you mean output"),
    (lambda: HiddenDropout(0.1, "span", where="pooled"), "The pooled state has no tokens"),
    (lambda: HiddenCut(0.5)(HiddenSite(shape=(1, 4, 2)), torch.ones(1, 4, 2)), "HiddenCut saw no attention between the tokens of block"),
)  # fmt: skip
