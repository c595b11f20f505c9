"""Child-Tuning against its formulas, written out slowly in float64."""

import copy
import math

import pytest
import torch

import attnreg
from attnreg.training import ChildTuning, FineTuning
from tests.helpers.method_cases import bert, sgd, weights
from tests.helpers.objectives import BATCH, IDS

DATA = [{name: value[:2] for name, value in BATCH.items()}, {name: value[2:] for name, value in BATCH.items()}]


def moved(model, step):
    before = weights(model)
    step()
    return weights(model) - before


def test_a_random_child_moves_by_its_gradient_over_p():
    plain = bert(dropout=0.0)
    model = copy.deepcopy(plain)
    method = ChildTuning(model, sgd(model), p=0.3, max_grad_norm=0.05)
    whole = FineTuning(plain, sgd(plain), max_grad_norm=0.05)
    full = moved(plain, lambda: whole.step(BATCH))
    child = moved(model, lambda: method.step(BATCH))
    updated, real = child != 0, full.abs() > 1e-12
    torch.testing.assert_close(child[updated], full[updated] / 0.3, rtol=1e-6, atol=1e-12)
    share, n = updated[real].double().mean().item(), int(real.sum())
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / n)
    again = moved(model, lambda: method.step(BATCH)) != 0
    both = (again & updated)[real].double().mean().item()
    assert abs(both - 0.09) < 5 * math.sqrt(0.09 * 0.91 / n)  # drawn anew


def test_its_draws_leave_dropout_alone():
    model = bert()
    method = ChildTuning(model, sgd(model), attnreg.AttentionDropout(0.2), p=0.3)
    torch.manual_seed(3)
    method.step(BATCH)
    state = torch.get_rng_state()
    plain = bert()
    whole = FineTuning(plain, sgd(plain), attnreg.AttentionDropout(0.2))
    torch.manual_seed(3)
    whole.step(BATCH)
    assert torch.equal(torch.get_rng_state(), state)


def slow_fisher(model):
    """Squared gradients of log P(y | x), row by row."""
    model.eval()
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for ids, label in zip(IDS, BATCH["labels"], strict=True):
        log_p = model(input_ids=ids[None]).logits.log_softmax(-1)[0, label]
        gradients = torch.autograd.grad(log_p, list(model.parameters()))
        for name, gradient in zip(sums, gradients, strict=True):
            sums[name] += gradient**2 / 3
    return sums


def test_the_child_has_the_highest_fisher_information_of_the_pretrained_weights():
    model = bert()
    fisher = slow_fisher(copy.deepcopy(model))
    values = torch.cat([value.flatten() for name, value in fisher.items() if not name.startswith("classifier")])
    line = values.sort(descending=True).values[round(0.25 * len(values)) - 1]
    random = torch.get_rng_state()
    method = ChildTuning(model, sgd(model), attnreg.AttentionDropout(0.5), mode="D", p=0.25, data=iter(DATA))
    torch.set_rng_state(random)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    method.step(BATCH)
    assert {*method.child} == {name for name in fisher if not name.startswith("classifier")}
    for name, mask in method.child.items():
        assert torch.equal(mask, fisher[name] >= line), name
    for name, parameter in model.named_parameters():
        changed = parameter != before[name]
        assert not (changed & ~method.child[name]).any() if name in method.child else changed.all()
    assert sum(int(mask.sum()) for mask in method.child.values()) == round(0.25 * len(values))
    chosen = {name: mask.clone() for name, mask in method.child.items()}
    method.step(BATCH)
    assert all(torch.equal(method.child[name], mask) for name, mask in chosen.items())


def test_a_loss_of_ones_own_decides_too():
    def weighted(outputs, batch):
        return (outputs.loss * torch.where(batch["labels"] == 1, 1.0, 0.0)).mean()

    children = []
    for data, options in ((DATA, {"loss_function": weighted}), ([{k: v[1:] for k, v in BATCH.items()}], {})):
        model = bert()
        method = ChildTuning(model, sgd(model), mode="D", data=data, **options)
        method.step(BATCH)
        children.append(method.child)
    assert all(torch.equal(mask, children[1][name]) for name, mask in children[0].items())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_weight_decay_alone_moves_what_is_masked(weight_decay):
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    method = ChildTuning(model, optimizer, mode="D", p=0.1, data=DATA)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        method.step(BATCH)
    for name, mask in method.child.items():
        expected = before[name] * (1 - 1e-2 * weight_decay) ** 3
        torch.testing.assert_close(model.get_parameter(name)[~mask], expected[~mask], rtol=0, atol=1e-15)


def test_frozen_and_left_out_weights_are_no_candidates():
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    optimizer = torch.optim.SGD(model.bert.encoder.parameters(), lr=0.1)
    method = ChildTuning(model, optimizer, mode="D", data=DATA)
    method.step(BATCH)
    assert {name.split(".")[1] for name in method.child} == {"encoder"}


@pytest.mark.parametrize(("options", "says"), [({"mode": "D"}, "needs `data`, batches of"), ({"data": DATA}, "and only for it")])  # fmt: skip
def test_wrong_arguments(options, says):
    model = bert()
    with pytest.raises(ValueError, match=says):
        ChildTuning(model, sgd(model), attnreg.AttentionDropout(0.1), **options)
    assert not attnreg.is_attached(model)


@pytest.mark.parametrize("loss_function", [None, lambda outputs, batch: 0.0 * outputs.loss])
def test_data_that_tells_nothing_is_refused(loss_function):
    model = bert()
    method = ChildTuning(model, sgd(model), mode="D", data=DATA if loss_function else [], loss_function=loss_function)
    with pytest.raises(ValueError, match="ChildTuning needs a finite Fisher information"):
        method.step(BATCH)
