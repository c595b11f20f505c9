"""FreeLB against its algorithm in float64, sequence by sequence, with the perturbation given by another way."""

import copy

import pytest
import torch
import transformers as hf

import attnreg
from attnreg.errors import InputError
from attnreg.training import SAM, FineTuning, FreeLBLoss
from tests.helpers.method_cases import assert_stepped, bert, sgd
from tests.helpers.objectives import IDS, MASK, PADDED, heads

SIZES = {"vocab_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}


def perturbed_loss(model, batch, delta):
    """The loss on embeddings that are given; those of the model are looked up in another way."""
    table = model.get_input_embeddings().weight
    embedded = torch.stack([torch.stack([table[token] for token in row]) for row in batch["input_ids"]])
    rest = {name: value for name, value in batch.items() if name != "input_ids"}
    return model(inputs_embeds=embedded + delta, **rest).loss


def slow_loss(model, batch, delta, steps, step_size, radius):
    losses = []
    for _ in range(steps):
        delta = delta.detach().requires_grad_()
        losses.append(perturbed_loss(model, batch, delta))
        (gradient,) = torch.autograd.grad(losses[-1], delta, retain_graph=True)
        following = []
        for row, ascent, real in zip(delta.detach(), gradient, batch["attention_mask"], strict=True):
            ascent = ascent * real[:, None]
            row = row + step_size * ascent / ascent.square().sum().sqrt()
            following.append(row * min(1.0, radius / float(row.square().sum().sqrt())))
        delta = torch.stack(following)
    return sum(losses) / steps


def check_step(model, batch, objective, delta, slow):
    before = copy.deepcopy(model).train()
    loss = slow_loss(before, batch, delta, **slow)
    method = FineTuning(model, sgd(model), objective=objective, max_grad_norm=None)
    assert method.step(batch).loss.item() == pytest.approx(loss.item(), abs=1e-12)
    assert_stepped(model, before, loss)
    assert not model.get_input_embeddings()._forward_hooks


@heads
def test_a_step_follows_the_gradient_of_the_algorithm(head, options, labels):
    slow = {"steps": 4, "step_size": 0.5, "radius": 0.9}
    none = torch.zeros(3, 4, 16, dtype=torch.float64)
    check_step(bert(head, 0.0, **options), {**PADDED, "labels": labels}, FreeLBLoss(**slow, start=0.0), none, slow)


def test_a_causal_model_with_tied_embeddings():
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES, tie_word_embeddings=True, max_position_embeddings=8)
    model = hf.LlamaForCausalLM(config).double()
    slow = {"steps": 2, "step_size": 0.5, "radius": 0.5}
    batch = {**PADDED, "labels": torch.where(MASK == 1, IDS, -100)}
    check_step(model, batch, FreeLBLoss(2, 0.5, 0.5, start=0), torch.zeros(3, 4, 8, dtype=torch.float64), slow)


def test_it_begins_anywhere_near_the_embeddings_but_not_at_padding(monkeypatch):
    drawn = []
    monkeypatch.setattr(attnreg.functional, "seeded_uniform", lambda seed, shape, device: drawn[0])
    drawn.append(torch.rand(3, 4, 16))
    delta = (2 * drawn[0].double() - 1) * 0.3 / (16 * MASK.sum(1)).sqrt()[:, None, None] * MASK[..., None]
    slow = {"steps": 3, "step_size": 0.2, "radius": 0.25}
    check_step(bert(dropout=0.0, num_labels=3), PADDED, FreeLBLoss(**slow, start=0.3), delta, slow)
    assert (delta.flatten(1).norm(dim=1) <= 0.3).all()


def losses_of_passes(model, objective, batch=PADDED, provider=None):
    seen = []

    def noted(forward, batch):
        inner = forward.run
        forward.run = lambda batch: (seen.append(inner(batch)), seen[-1])[1]
        return objective(forward, batch)

    FineTuning(model, sgd(model), provider, objective=noted).step(batch)
    return [loss.item() for loss, _ in seen]


def test_all_passes_of_a_step_draw_the_same_and_steps_do_not():
    model = bert(dropout=0.4, num_labels=3)
    objective = FreeLBLoss(3, step_size=0.0, start=0.0)
    steps = [losses_of_passes(model, objective, provider=attnreg.DropKey(0.3) if n == 0 else None) for n in range(2)]
    assert all(len(set(losses)) == 1 for losses in steps)
    assert steps[0][0] != steps[1][0]


def test_a_random_start_differs_from_step_to_step():
    model = bert(dropout=0.0, num_labels=3)
    losses = [losses_of_passes(copy.deepcopy(model), FreeLBLoss(2, start=1.0))[0] for _ in range(3)]
    assert len(set(losses)) == 3


def test_each_sequence_has_its_own_ball_also_where_a_model_transposes_them():
    sizes = {"vocab_size": 20, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8, "num_labels": 3}
    config = hf.XLNetConfig(**sizes, dropout=0.0, summary_last_dropout=0.0)
    torch.manual_seed(0)
    model = hf.XLNetForSequenceClassification(config).double()
    alone = [{name: value[[row]] for name, value in PADDED.items()} for row in range(3)]
    objective = FreeLBLoss(3, step_size=0.5, radius=0.8, start=0.0)
    together = losses_of_passes(copy.deepcopy(model), objective)
    each = [losses_of_passes(copy.deepcopy(model), objective, batch) for batch in alone]
    assert together == pytest.approx(torch.tensor(each).mean(0).tolist(), rel=1e-6)
    assert together[-1] > together[0]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_gradient_checkpointing_changes_nothing():
    ends = []
    for checkpoints in (False, True):
        model = bert(dropout=0.1, num_labels=3)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(1)
        method = FineTuning(model, sgd(model), attnreg.DropKey(0.3), objective=FreeLBLoss(3, step_size=0.5))
        losses = [method.step(PADDED).loss for _ in range(2)]
        ends.append(torch.cat([*(p.detach().flatten() for p in model.parameters()), torch.stack(losses)]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(InputError, match="FreeLB needs gradient checkpointing with `use_reentrant=False`"):
        FineTuning(model, sgd(model), objective=FreeLBLoss()).step(PADDED)


def test_frozen_embeddings_are_perturbed_too():
    model = bert(dropout=0.0, num_labels=3)
    model.get_input_embeddings().requires_grad_(False)
    losses = losses_of_passes(model, FreeLBLoss(2, 0.5, 0.5, start=0))
    assert losses[1] > losses[0]


def test_it_trains_in_other_methods():
    model = bert(dropout=0.1, num_labels=3)
    assert SAM(model, sgd(model), attnreg.DropKey(0.1), objective=FreeLBLoss()).step(PADDED).loss.isfinite()


def test_a_loss_that_does_not_depend_on_the_embeddings_is_refused():
    model = bert(num_labels=3)
    method = FineTuning(model, sgd(model), objective=FreeLBLoss())
    model.bert.embeddings.LayerNorm.register_forward_hook(lambda *args: args[-1].detach())
    with pytest.raises(ValueError, match="FreeLB needs a loss that depends on the token embeddings"):
        method.step(PADDED)
