"""Contrastive fine-tuning, one of the tries of a fit: its loss, its batches, and the head that it ends with."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from attnreg.experiments.fit.contrast import Contrast, PairedBatches, contrastive_loss, in_pairs
from attnreg.experiments.fit.tries import Try
from attnreg.experiments.setup.batches import in_order
from attnreg.experiments.tasks.models.linear_head import head_and_features


def slow_loss(states, labels):
    """Eq. 2 of Khosla et al., one pair after the other."""
    states = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in states.tolist()]
    n = len(states)
    alike = [[sum(a * b for a, b in zip(states[i], states[j], strict=True)) / 0.1 for j in range(n)] for i in range(n)]
    losses = []
    for i in range(n):
        total = sum(math.exp(alike[i][a]) for a in range(n) if a != i)
        of_class = [p for p in range(n) if p != i and labels[p] == labels[i]]
        if of_class:
            losses.append(-sum(math.log(math.exp(alike[i][p]) / total) for p in of_class) / len(of_class))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize(
    "labels", [[0, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]], ids=str
)
def test_the_loss_is_that_of_all_pairs(labels):
    states = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = contrastive_loss(states, torch.tensor(labels)).item()
    assert found == pytest.approx(slow_loss(states, labels), abs=1e-12)


@pytest.mark.parametrize("labels", [[0], [0, 1]], ids=str)
def test_rows_without_another_of_their_class_change_no_weight(labels):
    states = torch.randn(len(labels), 5, requires_grad=True)
    contrastive_loss(states, torch.tensor(labels)).backward()
    assert torch.equal(states.grad, torch.zeros_like(states))


@pytest.mark.parametrize(("shares", "size"), [([1, 1], 16), ([2, 1], 16), ([9, 1], 32), ([1] * 6, 16), ([1] * 50, 16)])
def test_batches_have_pairs_and_other_classes_and_little_padding(shares, size):
    draw = np.random.default_rng(0)
    labels = draw.permutation(np.repeat(np.arange(len(shares)), 40 * np.array(shares)))
    lengths = draw.integers(3, 90, len(labels))
    order = in_pairs(labels, lengths, size, np.random.default_rng(1))
    assert sorted(order) == [*range(len(labels))]
    assert (order != in_pairs(labels, lengths, size, np.random.default_rng(2))).mean() > 0.5

    def batches(of, some):
        return [of[some[begin : begin + size]] for begin in range(0, len(some), size)]

    paired = np.concatenate([[(batch == each).sum() > 1 for each in batch] for batch in batches(labels, order)])
    assert paired.mean() > 0.85
    assert np.mean([len({*batch.tolist()}) > 1 for batch in batches(labels, order)]) > 0.85
    widths = [np.mean([batch.max() for batch in batches(lengths, some)]) for some in (order, draw.permutation(order))]
    assert widths[0] < 0.92 * widths[1]


def test_batches_hold_each_row_once_and_depend_on_seed_and_epoch(bench):
    rows, labels = bench.encoded[0].rows.select(range(50)), bench.labels[:50]

    def texts(seed, epoch):
        batches = PairedBatches(rows, labels, 16, bench.kind, seed, torch.device("cpu"))
        found = [*batches.epoch(epoch)]
        assert len(found) == len(batches) == 4
        return [
            row[mask.bool()].tolist()
            for each in found
            for row, mask in zip(each["input_ids"], each["attention_mask"], strict=True)
        ]

    first = texts(0, 0)
    assert sorted(first) == sorted(rows["input_ids"][:])
    assert first == texts(0, 0)
    assert texts(0, 1) != first != texts(1, 0)


@pytest.mark.parametrize(("way", "penalty"), [("contrasts", 1.0), ("fits_head", 0.1)])
def test_it_ends_with_a_head_fitted_to_what_it_has_learned(way, penalty, bench):
    train, held = np.arange(80), np.arange(80, 120)
    which = Try(3, 1e-3, **{way: True})
    network = bench.trained(which, train, 0, lambda: None)
    head, states, _ = head_and_features(network, in_order(bench.encoded[0].rows, 64, bench.kind, torch.device("cpu")))
    assert not head._forward_hooks
    spread = states[train].std().item()
    fitted = LogisticRegression(C=penalty).fit(states[train] / spread, bench.labels[train])
    difference = np.diff(bench.logits(network, bench.encoded[0].rows.select(held)))[:, 0]
    np.testing.assert_allclose(difference, fitted.decision_function(states[held] / spread), atol=1e-2)
    before = contrastive_loss(bench.encoded[0].states[held], torch.tensor(bench.labels[held]))
    assert contrastive_loss(states[held], torch.tensor(bench.labels[held])) < before


def test_what_is_contrasted_is_what_the_head_reads():
    head, states, labels = torch.nn.Linear(5, 2), torch.randn(6, 4, 5), torch.tensor([0, 1, 0, 1, 1, 0])
    rows, last = range(6), [0, 1, 2, 3, 3, 3]  # the token that a decoder reads
    contrast = Contrast(head)
    for read, logits in ((states[:, 0], lambda out: out), (states, lambda out: out[rows, last])):
        forward = SimpleNamespace(predict=lambda batch, read=read, logits=logits: (None, logits(head(read))))
        assert contrast(forward, {"labels": labels}) == pytest.approx(contrastive_loss(logits(read), labels).item())


@pytest.mark.parametrize("way", ["contrasts", "fits_head"])
def test_a_network_that_diverges_loses(way, bench):
    logits = bench.out_of_fold(Try(3, 1e30, **{way: True}), np.arange(80), np.arange(80, 120), 0, lambda: None)
    assert not np.isfinite(logits).all()
