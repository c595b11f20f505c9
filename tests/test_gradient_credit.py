"""Credit by gradient, against exact derivatives on a small case in float64."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
import transformers as hf

import attnreg
from attnreg.attendout import gradient_credit
from attnreg.attendout.decisions import Decisions
from attnreg.errors import InputError
from attnreg.training import AttackerDefender, GradientCredit, Rewards, Rounds
from attnreg.training.method import Updater
from tests.method_cases import weights
from tests.test_attacker_defender import adamw, make_batches, make_game, make_model


def case(**options):
    """An Attacker without dropout, its G-Net, a teacher that does not change it, and two batches."""
    model = make_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager").double()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # away from the symmetry of an untrained model
    generator = attnreg.GNetProvider.for_model(model, initial_keep=0.6, **options).double()
    attnreg.attach(model, generator)
    batch, reward = make_batches(2)
    optimizer = torch.optim.SGD(generator.parameters(), lr=1.0)
    return model, generator, batch, reward, optimizer


def teacher_of(model, generator, reward, optimizer, **options):
    credit = GradientCredit(**{"price": 0.0, "averaging": 0.0, "optimizer_factory": lambda _: optimizer, **options})
    return credit.teacher(generator, Updater(), max_grad_norm=None, attacker=model, reward_batch=lambda number: reward)


def reward_gradient(model, reward):
    model.eval()
    gradients = torch.autograd.grad(model(**reward).loss, list(model.parameters()), allow_unused=True)
    model.train()
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), gradients, strict=True)]


def cosine(model, batch, direction, *, create_graph=False):
    """The cosine of the angle between the two gradients."""
    gradients = training_gradient(model, batch, create_graph)
    products = sum((v * g).sum() for v, g in zip(direction, gradients, strict=True) if g is not None)
    squares = [sum((each**2).sum() for each in found if each is not None) for found in (direction, gradients)]
    return products / (squares[0] * squares[1]).sqrt()


def training_gradient(model, batch, create_graph):
    loss = model(**batch).loss
    return torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph, allow_unused=True)


@pytest.mark.parametrize("decisions", ["unit", "key"])
def test_the_finite_difference_is_the_derivative_of_the_cosine(decisions, monkeypatch):
    monkeypatch.setattr(gradient_credit, "STEP", 1e-4)  # the usual one has an error of its square
    model, generator, batch, reward, optimizer = case(decisions=decisions)
    teacher = teacher_of(model, generator, reward, optimizer)
    before = weights(model)
    exact_direction = reward_gradient(model, reward)
    length = math.sqrt(sum(float((v**2).sum()) for v in exact_direction))
    direction = teacher._direction(reward)
    for (name, ours), theirs in zip(direction.items(), (v for v in exact_direction if v.any()), strict=True):
        assert torch.allclose(ours * length / 1e-4, theirs, atol=1e-10), name
    with generator.relaxed(batch, 0.5) as relaxed:
        across, factor = teacher._across(batch, direction)
        up, down = (teacher._slopes(batch, relaxed.masks, across, sign) for sign in (1, -1))
        exact = torch.autograd.grad(cosine(model, batch, exact_direction, create_graph=True), relaxed.masks)
    for high, low, slope in zip(up, down, exact, strict=True):
        ours = (high - low) / 2 * factor / 1e-4
        assert (ours - slope).abs().max() < 1e-5 * slope.abs().max()
        assert slope.abs().max() > 0
    assert torch.equal(weights(model), before)  # to the bit
    assert model.training


def test_the_mean_slope_over_a_decisions_values_is_the_difference_between_keeping_and_dropping():
    model, generator, batch, reward, _ = case(decisions="key")
    direction = reward_gradient(model, reward)
    nodes, shares = np.polynomial.legendre.leggauss(24)
    with generator.relaxed(batch, 0.5) as relaxed:
        mask = relaxed.masks[0]

        def set_to(value):
            mask.data[1, 0, :, 2] = value

        def slope_at(value):
            set_to(value)
            return float(
                torch.autograd.grad(cosine(model, batch, direction, create_graph=True), mask)[0][1, 0, :, 2].sum()
            )

        integral = sum(share / 2 * slope_at((1 + node) / 2) for node, share in zip(nodes, shares, strict=True))
        ends = []
        for value in (0.0, 1.0):
            set_to(value)
            ends.append(float(cosine(model, batch, direction)))
        at_the_end = slope_at(1.0)
    assert integral == pytest.approx(ends[1] - ends[0], rel=1e-5)
    assert abs(at_the_end - integral) > 0.1 * abs(integral)  # a slope at one value would not do


@pytest.mark.parametrize("each", ["unit", "key"])
def test_the_gradient_is_that_of_the_expectation_over_hard_decisions(each):
    logits = torch.tensor([[-1.5, 0.3, 2.0]], dtype=torch.float64).expand(1, 1, 1, 3, 3)
    samples = 20_000
    units = torch.ones(samples, 3, 3, dtype=torch.bool)
    units[:, :, 2] = False
    relaxed = Decisions(each, 1, logits.expand(samples, -1, -1, -1, -1), units).draw_relaxed(share=0.25)
    (mask,) = relaxed.masks
    (mask**3 + torch.sin(3 * mask)).sum().backward()  # a loss of each decision alone, far from linear
    found = relaxed.gradient([mask.grad]).sum(-2)[:, 0, 0]  # (samples, keys)
    probability = torch.sigmoid(logits[0, 0, 0, 0])
    expected = 3 * probability * (1 - probability) * (1 + math.sin(3))  # 3 queries
    expected[2] = 0.0  # not valid
    error = found.std(0) / math.sqrt(samples)
    assert (found.mean(0) - expected).abs().le(5 * error).all()
    assert error[:2].max() < 0.05 * expected[:2].min()
    share = (relaxed.weights[..., :2] > 0).double().mean()
    assert share == pytest.approx(0.25, abs=0.02)


def test_the_update_ascends_the_expected_cosine_of_hard_masks():
    model, generator, batch, reward, _ = case()
    teacher = teacher_of(model, generator, reward, torch.optim.SGD(generator.parameters(), lr=0.3))
    direction = reward_gradient(model, reward)

    def cosines():
        found = []
        for seed in range(60):  # the same draws before and after
            torch.manual_seed(seed)
            found.append(float(cosine(model, batch, direction)))
        return torch.tensor(found)

    generator.calibrate(batch)
    before = cosines()
    for seed in range(60):
        torch.manual_seed(1000 + seed)
        teacher.draw(batch)
    gains = cosines() - before
    assert gains.mean() > 5 * gains.std() / math.sqrt(len(gains))


def test_a_batch_with_a_longer_gradient_does_not_count_more():
    after = []
    for factors in ([1.0, 1.0], [1.0, 100.0], [0.01, 1.0]):
        model, generator, _, reward, optimizer = case()
        teacher = teacher_of(model, generator, reward, optimizer)
        for seed, (batch, factor) in enumerate(zip(make_batches(2, seed=5), factors, strict=True)):
            teacher._loss_function = lambda output, batch, factor=factor: factor * output["loss"]
            torch.manual_seed(seed)
            teacher.draw(batch)
        after.append(weights(generator))
    for other in after[1:]:
        assert torch.allclose(other, after[0], rtol=1e-6, atol=1e-9)


def test_masks_are_drawn_with_the_moving_average_of_the_weights():
    held = {}
    for averaging in (0.0, 0.7):
        model, generator, batch, reward, optimizer = case()
        generator.calibrate(batch)
        teacher = teacher_of(model, generator, reward, optimizer, averaging=averaging)
        held[averaging] = [weights(generator)]
        for seed in range(5):
            torch.manual_seed(seed)
            teacher.draw(batch)
            held[averaging].append(weights(generator))
    average = held[0.0][0]
    for latest, ours in zip(held[0.0][1:], held[0.7][1:], strict=True):
        average = 0.7 * average + 0.3 * latest
        assert torch.allclose(ours, average, atol=1e-12)
    assert not torch.allclose(held[0.7][-1], held[0.0][-1], atol=1e-3)


def test_the_price_leads_back_to_the_initial_rate():
    divergence = []
    for rate in (0.0, 0.03):
        model, generator, batch, reward, _ = case()
        generator.calibrate(batch)
        generator.network.bias.data += 2.0
        optimizer = torch.optim.SGD(generator.parameters(), lr=rate)
        teacher = teacher_of(model, generator, reward, optimizer, price=100.0)
        for _ in range(20):
            teacher.draw(batch)
        divergence.append(float((generator.keep_probability(batch) - 0.6).abs().mean()))
    assert divergence[1] < 0.5 * divergence[0]


def test_the_models_own_dropout_is_the_same_in_both_passes_and_draws_nothing_for_later():
    model = make_model()
    torch.manual_seed(0)
    generator = attnreg.GNetProvider.for_model(model)
    attnreg.attach(model, generator)
    batch, reward = make_batches(2)
    teacher = teacher_of(model, generator, reward, torch.optim.SGD(generator.parameters(), lr=0.1))
    still = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with generator.relaxed(batch, 0.5) as relaxed:
        state = torch.get_rng_state()
        up, down = (teacher._slopes(batch, relaxed.masks, still, sign) for sign in (1, -1))
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(up, down, strict=True))


def test_the_game_with_credit_by_gradient_learns_at_every_step():
    game = make_game(make_model(), credit=GradientCredit(), winner="none", steps=2)
    seen = []
    for batch in make_batches(6):
        game.step(batch)
        seen.append(weights(game.generator))
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert game.rounds == 3
    assert all(p.grad is None for p in game.attacker.model.parameters())


def test_relaxed_masks_leave_a_deeper_decoder_alone():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=20, max_position_embeddings=16, **sizes, **heads))
    batch = {"input_ids": torch.randint(3, 20, (2, 5)), "labels": torch.randint(3, 20, (2, 4))}
    generator = attnreg.GNetProvider.for_model(model)
    game = AttackerDefender(
        model, generator, adamw, credit=GradientCredit(), rewards=Rewards([batch]), rounds=Rounds(1)
    )
    before = weights(generator)
    game.step(batch)
    assert not torch.equal(weights(generator), before)


def test_a_copy_of_the_game_has_a_course_of_its_own():
    game = make_game(make_model(), credit=GradientCredit(), winner="none", batches=make_batches(3, seed=9))
    game.step(make_batches(1)[0])
    other = pickle.loads(pickle.dumps(copy.deepcopy(game)))
    asked = {}
    for name, one in (("game", game), ("copy", other)):
        asked[name], next_batch = [], one._referee.next_batch
        one._teacher.reward_batch = lambda number, seen=asked[name], of=next_batch: seen.append(number) or of(number)
    for _ in range(2):
        other.step(make_batches(1)[0])
    game.step(make_batches(1)[0])
    assert asked == {"game": [1], "copy": [1, 2]}


def test_what_cannot_be_taught_by_gradient_is_refused():
    model = make_model()
    with pytest.raises(InputError, match="AttentionDropout cannot be taught by gradient: it has no `relaxed` masks"):
        teacher_of(model, attnreg.AttentionDropout(0.1), None, None)
