"""StructuralMask: windows and graphs, on all heads or on some."""

import json

import pytest
import torch

import attnreg
from attnreg import functional
from attnreg.regularizer.saving import describe
from tests.helpers import handwritten
from tests.helpers.cases import NO_DROPOUT, bert_in_float64, refused

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]])
BATCH = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}


def bert():
    return bert_in_float64(**NO_DROPOUT)


def some_graph(inputs):
    torch.manual_seed(7)
    batch, length = inputs["input_ids"].shape
    return (torch.rand(batch, length, length) < 0.5) | (torch.arange(length) == 0)  # a row without a key is no test


def site(queries=6, keys=6, batch=2, heads=3):
    return attnreg.AttentionSite(shape=(batch, heads, queries, keys))


@pytest.mark.parametrize("distance", [0, 1, 3, 10])
@pytest.mark.parametrize("keep_first", [False, True])
@pytest.mark.parametrize("heads", [None, [1], [0, 2]])
def test_a_window(distance, keep_first, heads):
    scores = attnreg.StructuralMask(distance, heads, keep_first)(site()).scores.expand(2, 3, 6, 6)
    for h in range(3):
        for i in range(6):
            for j in range(6):
                kept = abs(i - j) <= distance or (keep_first and 0 in (i, j))
                assert bool(scores[1, h, i, j]) == (kept or (heads is not None and h not in heads))


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_ancestors_against_walking_up(length):
    torch.manual_seed(length)
    parents = torch.full((20, length), -1)
    for b in range(20):  # each word hangs on one that comes before it in a random order
        order = torch.randperm(length).tolist()
        for place, word in enumerate(order):
            if place and torch.rand(()) < 0.9:
                parents[b, word] = order[int(torch.randint(place, ()))]
    got = functional.ancestor_mask(parents)
    for b in range(20):
        for i in range(length):
            reached, word = {i}, i
            while parents[b, word] >= 0:
                word = int(parents[b, word])
                reached.add(word)
            assert set(got[b, i].nonzero().flatten().tolist()) == reached


def test_a_chain_of_words_is_walked_to_its_end():
    parents = torch.arange(33) - 1
    assert torch.equal(functional.ancestor_mask(parents), torch.ones(33, 33).tril().bool())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_follows_the_graph(implementation):
    """Against the model with the graph in its own attention mask, which is how to keep it at evaluation."""
    model = bert()
    model.set_attn_implementation(implementation)
    allowed = some_graph(BATCH) & BATCH["attention_mask"].bool()[:, None, :]
    bias = torch.zeros(allowed.shape).double().masked_fill(~allowed, torch.finfo(torch.float64).min)
    expected = model.eval()(IDS, attention_mask=bias[:, None]).logits
    plain = model(**BATCH).logits
    with attnreg.attach(model.train(), attnreg.StructuralMask(some_graph)) as handle:
        got = model(**BATCH).logits
        rates = handle.drop_rates()
        assert torch.equal(model.eval()(**BATCH).logits, plain)
    assert (plain - expected).abs().max() > 1e-3
    assert (got - expected).abs().max() < 1e-10
    units, kept = 5 * 5 + 3 * 3, sum(int(some_graph(BATCH)[b, :n, :n].sum()) for b, n in ((0, 5), (1, 3)))
    assert rates == {f"encoder.{i}": pytest.approx(1 - kept / units) for i in range(2)}


def test_the_graph_is_asked_for_once_a_forward_pass():
    calls = []

    def graph(inputs):
        calls.append(sorted(inputs))
        return torch.ones(5, 5, dtype=torch.bool)

    model = bert().train()
    plain = model(**BATCH).logits
    with attnreg.attach(model, attnreg.StructuralMask(graph)):
        assert (model(**BATCH).logits - plain).abs().max() < 1e-12
        model(**BATCH)
    assert calls == [["attention_mask", "input_ids"]] * 2


@pytest.mark.parametrize(
    ("graph", "sentence"),
    [
        (lambda inputs: torch.ones(5, 5), r"Expected `graph` to return a bool tensor .* got torch.float32 of shape \(5, 5\)"),
        (lambda inputs: torch.ones(5).bool(), r"of shape \(5,\)"),
        (lambda inputs: torch.ones(3, 5, 5).bool(), r"Expected a graph of shape \(B, N, N\) = \(2, 5, 5\), got \(3, 5, 5\) at bert"),
        (lambda inputs: torch.ones(4, 4).bool(), r"got \(1, 4, 4\) at bert"),
    ],
)  # fmt: skip
def test_graphs_that_do_not_fit_are_refused(graph, sentence):
    model = bert().train()
    with attnreg.attach(model, attnreg.StructuralMask(graph)), pytest.raises(ValueError, match=sentence):
        model(**BATCH)


test_what_it_cannot_serve_is_refused = refused(
    (lambda: attnreg.StructuralMask(1, heads=[-1]), "Expected `heads` to be at least 0, got -1"),
    (lambda: attnreg.StructuralMask(1, heads=[0, 3])(site()), r"Expected `heads` of .* to be below 3, got \[3\]"),
    (lambda: attnreg.attach(bert(), attnreg.StructuralMask(1, heads=[0, 9])), r"Expected `heads` of bert.* to be below 4, got \[9\]"),
    (lambda: attnreg.StructuralMask(1).check([attnreg.SiteInfo(stack="cross")], None), "StructuralMask needs self-attention, got cross-attention at attention"),
    (lambda: functional.ancestor_mask(torch.tensor([0, 3, -1])), r"Expected `parents` in -1..2, got \[0, 3, -1\]"),
)  # fmt: skip


def test_a_graph_is_made_by_the_attached_model_only():
    with pytest.raises(RuntimeError, match="This forward pass has no graph: call the attached model"):
        attnreg.StructuralMask(some_graph)(site())


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (handwritten.local, "at layers.0 each query has its own keys: choose other attention"),
        (handwritten.pooled_queries, "layers.0 has 3 queries and 6 keys: choose other attention"),
    ],
)
def test_queries_and_keys_that_are_not_one_sequence_are_refused(form, sentence):
    model, ids = handwritten.Layers(form).train(), torch.arange(1, 13).view(2, 6)
    with pytest.raises(ValueError, match=f"StructuralMask compares positions of one sequence, but {sentence}"):  # noqa: SIM117
        with attnreg.attach(model, attnreg.StructuralMask(1), example_inputs=(ids,)):
            model(ids)


def test_a_distance_is_written_down_and_a_function_is_not(tmp_path):
    provider = attnreg.StructuralMask(2, heads=(0, 1), keep_first=True)
    config = {"graph": 2, "heads": [0, 1], "keep_first": True}
    assert json.loads(json.dumps(describe(provider))) == {"provider": "StructuralMask", "config": config}
    provider.save_pretrained(tmp_path / "p")
    assert attnreg.StructuralMask.from_pretrained(tmp_path / "p").config == config
    with pytest.raises(ValueError, match="StructuralMask cannot be saved, because JSON cannot store one of its arg"):
        attnreg.StructuralMask(some_graph).save_pretrained(tmp_path / "q")
