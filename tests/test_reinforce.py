"""REINFORCE with rewards per sample, leave-one-out baselines and scaled rewards, by the formula."""

import copy

import pytest
import torch

import attnreg
from attnreg.attendout.credit import Teacher, sparse_embeddings
from attnreg.errors import InputError
from attnreg.masks import pack, unpack
from attnreg.training import AttackerDefender, Reinforce, Rewards, Rounds
from attnreg.training.method import Updater
from tests.helpers.cases import bert_in_float64, refused
from tests.helpers.games import make_batches, make_game
from tests.helpers.method_cases import adamw, bert, weights


def generator(**options):
    torch.manual_seed(0)
    net = attnreg.GNetProvider(20, 8, 2, 16, initial_keep=0.6, **options).double()
    net.calibrate(make_batches(1)[0])
    return net


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=1.0)


def teacher_of(net, updater=None, **options):
    credit = Reinforce(**{"reward": "gap", "optimizer_factory": sgd, **options})
    return Teacher(credit, net, updater or Updater(), max_grad_norm=None)


def assert_updated(net, twin):
    """A step of gradient descent with rate 1 leads from the twin, which holds the gradient, to the G-Net."""
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs - theirs.grad, atol=1e-12)


def test_masks_survive_packing():
    for shape in [(3,), (2, 5, 3), (1, 8), (0, 4)]:
        mask = torch.rand(shape) < 0.5
        packed = pack(mask)
        assert torch.equal(unpack(packed), mask)
        assert packed[0].numel() == -(-mask.numel() // 8)


@pytest.mark.parametrize(
    ("kind", "decisions"), [("moving", "unit"), ("moving", "type"), ("moving", "batch"), ("leave-one-out", "key")]
)
def test_each_sample_is_weighted_by_its_own_advantage(kind, decisions):
    net = generator(decisions=decisions)
    twin = copy.deepcopy(net)
    teacher = teacher_of(net, per="sample", baseline=kind)
    teacher.baseline, teacher.rounds = 0.3, 4
    batches, keeps = make_batches(3), []
    for batch in batches:
        teacher.draw(batch)
        keeps.append(net.keep)
    rewards = torch.randn(12, dtype=torch.float64)
    teacher.update(rewards)
    loss = 0.0
    for number, reward in enumerate(rewards):
        others = [float(r) for i, r in enumerate(rewards) if i != number]
        baseline = sum(others) / 11 if kind == "leave-one-out" else 0.3
        log_prob = twin.log_prob(batches[number // 4], keeps[number // 4])[number % 4]
        loss = loss - (float(reward) - baseline) * log_prob / 12
    loss.backward()
    assert_updated(net, twin)
    assert teacher.baseline == pytest.approx(0.3 + 0.1 * (float(rewards.mean()) - 0.3))


@pytest.mark.parametrize("per", ["round", "sample"])
def test_only_the_rows_of_embeddings_that_a_batch_uses_are_touched(monkeypatch, per):
    """A table's gradient is sparse until it is added to the round's sum, which is dense and equals the dense one."""
    net, kinds = generator(), []
    twin, batch = copy.deepcopy(net), make_batches(1)[0]
    teacher = teacher_of(net, per=per)
    teacher.rounds, gradients = 1, torch.autograd.grad

    def noting(*words, **options):
        found = gradients(*words, **options)
        kinds.extend(each.is_sparse for each in found if each is not None)
        return found

    monkeypatch.setattr(torch.autograd, "grad", noting)
    for _ in range(2):
        torch.manual_seed(3)
        teacher.draw(batch)
    teacher.update(torch.tensor([-1.0]))
    assert sum(kinds) == 4  # tokens and positions, in both steps
    assert not net.network.tokens.sparse
    twin.log_prob(batch, net.keep).mean().backward()
    assert_updated(net, twin)
    with pytest.raises(KeyError), sparse_embeddings(net):
        raise KeyError
    assert not net.network.tokens.sparse


class Second(Updater):
    """The second of two processes, of which the first has drawn five samples; nothing is averaged."""

    processes, rank = 2, 1

    def gathered(self, values):
        return [5, *values]

    def average_gradients(self, parameters):
        pass


def test_rewards_of_other_rows_are_paired_in_order_and_again_from_the_first():
    """Each process pairs its own samples."""
    few, many = torch.randn(3), torch.randn(13)
    for pairs in ([(Updater(), few), (Updater(), few.repeat(3)[:8])], [(Second(), many), (Updater(), many[5:])]):
        updated = []
        for updater, rewards in pairs:
            net = generator()
            teacher = teacher_of(net, updater, per="sample")
            teacher.rounds = 1
            torch.manual_seed(3)
            for batch in make_batches(2):
                teacher.draw(batch)
            teacher.update(rewards)
            updated.append(weights(net))
        assert torch.allclose(*updated)


def test_scaled_rewards_keep_their_scale_and_no_difference_gives_no_update():
    net = generator()
    teacher = teacher_of(net, reward="scaled")
    before = weights(net)
    for reward in (0.7, 0.7, 0.7):  # always the same: no difference to the baseline
        teacher.draw(make_batches(1)[0])
        teacher.update(torch.tensor(reward))
    assert torch.equal(weights(net), before)
    sizes = []
    for reward in (1e-3, -1e-3, 1e-6):
        teacher.baseline = 0.0
        sizes.append(float(teacher._scaled(torch.tensor(reward))))
    assert sizes[0] == pytest.approx(1.0)
    assert sizes[1] == pytest.approx(-1.0)
    assert abs(sizes[2]) < 2e-3
    square = (0.1 * 0.9**2 + 0.1 * 0.9 + 0) * 1e-6 / (1 - 0.9**3)
    assert sizes[2] == pytest.approx(1e-6 / square**0.5, rel=1e-3)


test_settings_that_do_not_fit = refused(
    (lambda: Reinforce(reward="x"), "Expected `reward` to be one of scaled, gap, standardized"),
    (lambda: Reinforce(per="x"), "Expected `per` to be one of round, sample"),
    (lambda: Reinforce(momentum=1.0), r"Expected `momentum` to be a probability in \[0, 1\)"),
    (lambda: Reinforce(baseline="leave-one-out"), "Expected `per` 'sample' with baseline 'leave-one-out'"),
    (lambda: Reinforce(reward="standardized", per="sample"), "Expected `per` 'round' with reward 'standardized'"),
    (lambda: Reinforce(learning_rate=-1.0), "Expected `learning_rate` to be 0 or more"),
    (lambda: Reinforce(optimizer_factory="adam"), "Expected `optimizer_factory` to be a function of"),
)


def test_the_generator_of_a_composition_learns_under_it():
    model = bert(dropout=0.0)
    net = attnreg.GNetProvider.for_model(model, initial_keep=0.5)
    both, rewards = net & attnreg.AttentionDropout(0.5, "scores"), Rewards(make_batches(2, seed=9))
    game = AttackerDefender(model, both, adamw, rewards=rewards, rounds=Rounds(1))
    assert game.generator is net
    first, *rest = make_batches(4)
    game.step(first)
    before = weights(net)
    for batch in rest:
        game.step(batch)
    assert not torch.equal(weights(net), before)
    assert all(float(rate) > 0.6 for rate in game.drop_rates().values())  # 1 - 0.5 * 0.5
    for none in (attnreg.AttentionDropout(0.1), net & copy.deepcopy(net), attnreg.CrossTuning(net)):
        with pytest.raises(InputError, match=r"Expected one Generator, .* alone or in a composition, got [02] in"):
            AttackerDefender(bert(), none, adamw)


class Peeks(attnreg.MaskProvider):
    """Runs the model once more before each training step, as no provider of this project does."""

    def attribute(self, model, batch):
        model(**batch)

    def forward(self, site):
        return None


def test_masks_that_another_pass_took_are_an_error():
    model = bert()
    game = AttackerDefender(model, attnreg.GNetProvider.for_model(model) & Peeks(), adamw)
    with pytest.raises(InputError, match="Another forward pass took the Generator's masks"):
        game.step(make_batches(1)[0])
    first_pass = attnreg.AttributionProvider(0.5, 0.5, first_pass="train")  # is not masked, so it draws no masks
    model = bert()
    AttackerDefender(model, attnreg.GNetProvider.for_model(model) & first_pass, adamw).step(make_batches(1)[0])


def test_the_choices_of_a_row_share_its_reward():
    net = generator()
    twin = copy.deepcopy(net)
    teacher = teacher_of(net, per="sample")
    teacher.rounds = 1
    batch = {"input_ids": torch.randint(1, 20, (2, 3, 5)), "labels": torch.tensor([0, 1])}
    teacher.draw(batch)
    teacher.update(torch.tensor([1.0, 0.0]))
    (-twin.log_prob(batch, net.keep)[:3].mean() / 2).backward()
    assert_updated(net, twin)


def test_a_game_without_masks_is_one_of_selection():
    model = bert(dropout=0.0)
    game = AttackerDefender(model, None, adamw, rounds=Rounds(2))
    for batch in make_batches(4):
        result = game.step(batch)
        assert torch.equal(weights(game.attacker.model), weights(game.defender.model))  # nothing parts them
    assert game.rounds == 2
    assert "baseline" not in result.logs
    assert game.drop_rates() == {}
    with pytest.raises(InputError, match="`credit` has no effect without a Generator"):
        AttackerDefender(bert(), None, adamw, credit=Reinforce())


def test_a_game_without_selection_copies_nobody():
    game = make_game(steps=1, winner="none")
    for batch in make_batches(3):
        game.step(batch)
    assert not torch.equal(weights(game.attacker.model), weights(game.defender.model))
    assert sum(game.wins.values()) == 3


@pytest.mark.parametrize("per", ["round", "sample"])
def test_a_generator_with_frozen_tokens_learns_the_rest(per):
    model = bert_in_float64().float()
    generator = attnreg.GNetProvider.for_model(model)
    frozen = generator.network.tokens.weight.requires_grad_(False)
    before = {name: each.detach().clone() for name, each in generator.named_parameters()}
    credit = Reinforce(per=per, reward="gap")
    game = AttackerDefender(model, generator, adamw, rounds=Rounds(1), credit=credit)
    for _ in range(3):
        game.step(make_batches(1)[0])
    moved = {name for name, each in generator.named_parameters() if not torch.equal(each, before[name])}
    assert moved
    assert torch.equal(frozen, before["network.tokens.weight"])
