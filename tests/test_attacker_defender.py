"""AttendOut's game."""

import copy
import dataclasses
import math

import pytest
import torch

import attnreg
from attnreg.attendout.attacker_defender import copy_learner
from attnreg.training import AttackerDefender, FineTuning, Reinforce, Rewards, Rounds
from tests.helpers.cases import refused
from tests.helpers.games import make_batches, make_game
from tests.helpers.method_cases import adamw, bert, weights


def moments(learner):
    return torch.cat([learner.optimizer.state[p]["exp_avg"].flatten() for p in learner.model.parameters()])


def test_both_start_equal_and_train_on_the_same_batch_but_only_the_attacker_under_masks():
    game = make_game(steps=100)
    assert torch.equal(weights(game.networks["defender"]), weights(game.networks["attacker"]))
    assert not attnreg.is_attached(game.networks["defender"])
    assert attnreg.is_attached(game.networks["attacker"])
    torch.manual_seed(5)
    alone = bert(dropout=0.0)
    game = make_game(copy.deepcopy(alone), steps=100)
    plain = FineTuning(alone, adamw(alone))
    for batch in make_batches(3):
        game.step(batch)
        plain.step(batch)
    assert torch.equal(weights(game.networks["defender"]), weights(plain.model))
    assert not torch.equal(weights(game.networks["attacker"]), weights(plain.model))
    assert all(0.2 < float(rate) < 0.8 for rate in game.drop_rates().values())


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_the_winner_is_copied_to_the_other_with_its_optimizer(chance):
    game = make_game(steps=3, winner=lambda a, d: torch.tensor(chance))
    first = make_batches(2)
    for batch in first:
        game.step(batch)
    before = {name: (weights(n), moments(getattr(game, name))) for name, n in game.networks.items()}
    assert not torch.equal(before["defender"][0], before["attacker"][0])
    torch.manual_seed(1)
    unbroken = copy.deepcopy(game)
    unbroken.course = dataclasses.replace(unbroken.course, steps=100)
    torch.manual_seed(1)
    unbroken.step(first[0])
    torch.manual_seed(1)
    result = game.step(first[0])
    name = "attacker" if chance else "defender"
    assert result.events == {"winner": name}
    for learner in (game.attacker, game.defender):
        assert torch.equal(weights(learner.model), weights(unbroken.networks[name]))
        assert torch.equal(moments(learner), moments(getattr(unbroken, name)))
    game.step(first[1])  # nothing is shared: they part again
    assert not torch.equal(weights(game.networks["defender"]), weights(game.networks["attacker"]))


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_others_in_a_composition_learn_with_the_attacker_alone():
    model = bert(dropout=0.0)
    masks = attnreg.AdversarialAttention.for_model(model, initial_keep=0.6, price=0.1, sampled=False)
    schedule = attnreg.BernoulliScheduleProvider([(0, 0.0), (0.5, 0.0), (1, 0.5)], total_steps=8)
    alone, learned = copy.deepcopy(model), copy.deepcopy(masks)
    optimizer = adamw(alone)
    optimizer.add_param_group({"params": learned.parameters(), "weight_decay": 0.0, "lr": 0.3})
    warm, batches = make_batches(1, seed=5)[0], make_batches(2)
    generator = attnreg.GNetProvider.for_model(model, initial_keep=1 - 1e-12)  # keeps everything
    parts = {"rewards": Rewards(make_batches(2, seed=9))}
    parts["rounds"] = Rounds(9, winner=lambda a, d: torch.tensor(0.0), warmup_steps=1)
    both = generator & masks & schedule
    game = AttackerDefender(model, both, adamw, provider_lr=0.3, scheduler_factory=falling, **parts)
    slow = {"optimizer": optimizer, "scheduler": falling(optimizer)}
    FineTuning(alone, **slow).step(warm)
    method = FineTuning(alone, provider=learned, **slow)
    game.step(warm)
    for batch in batches:
        game.step(batch)
        method.step(batch)
    assert torch.allclose(weights(game.attacker.model), weights(alone), atol=1e-6)
    assert torch.allclose(weights(masks), weights(learned), atol=1e-6)
    copy_learner(game.attacker, game.defender)  # whose moments change again in the next step
    assert not {*masks.parameters()} & game.defender.optimizer.state.keys()
    game.step(warm)
    before = copy.deepcopy([game.attacker.optimizer.state[parameter]["exp_avg"] for parameter in masks.parameters()])
    game._finish_round({})  # the Defender wins, and says nothing about the masks of the Attacker
    assert torch.equal(weights(game.attacker.model), weights(game.defender.model))
    for parameter, moment in zip(masks.parameters(), before, strict=True):
        assert torch.equal(game.attacker.optimizer.state[parameter]["exp_avg"], moment)
    assert [group["lr"] for group in game.attacker.optimizer.param_groups] == [5e-3 * 0.5**4, 0.3 * 0.5**4]
    assert int(schedule.steps) == 4  # the warm-up is a part of training


def test_the_winner_is_drawn_with_its_chance():
    torch.manual_seed(0)
    even = lambda model, batch: torch.zeros(len(batch["labels"]))  # noqa: E731
    game = make_game(score=even, winner=lambda a, d: torch.tensor(0.8))
    networks = game.networks["defender"], game.networks["attacker"]
    wins = [game._referee.judge(*networks).attacker_wins for _ in range(200)]
    assert abs(sum(wins) / 200 - 0.8) < 5 * math.sqrt(0.8 * 0.2 / 200)


def test_scores_are_taken_in_eval_mode_on_the_reward_batches_in_turn():
    seen = []

    def score(network, batch):
        seen.append((network.training, id(batch)))
        return torch.zeros(len(batch["labels"]))

    rewards = make_batches(3, seed=9)
    game = make_game(steps=1, batches=rewards, batches_per_round=2, score=score)
    for batch in make_batches(3):
        game.step(batch)
    assert not any(training for training, _ in seen)
    order = [0, 1, 2, 0, 1, 2]
    assert [i for _, i in seen] == [id(rewards[i]) for i in order for _ in range(2)]
    assert all(network.training for network in game.networks.values())


def test_without_reward_batches_the_rounds_own_samples_are_scored(monkeypatch):
    rewarded, seen = [], []
    own = Reinforce.rewards
    monkeypatch.setattr(Reinforce, "rewards", lambda credit, gaps: rewarded.append(gaps) or own(credit, gaps))

    def score(network, batch):
        seen.append(batch)
        return torch.rand(len(batch["labels"]))

    game = make_game(steps=3, batches=None, credit=Reinforce(reward="gap"), score=score)
    batches = make_batches(3)
    for batch in batches:
        game.step(batch)
    assert rewarded[0].shape == (12,)
    assert [id(batch) for batch in seen] == [id(batch) for batch in batches for _ in range(2)]
    assert game._teacher.baseline == pytest.approx(float(rewarded[0].mean()), rel=1e-5)


def test_warmup_trains_the_defender_alone():
    game = make_game(steps=100, warmup_steps=2)
    plain = bert()
    method = FineTuning(plain, adamw(plain))
    for number, batch in enumerate(make_batches(3)):
        torch.manual_seed(number)
        result = game.step(batch)
        if number < 2:
            assert set(result.logs) == {"defender_loss"}
            torch.manual_seed(number)
            method.step(batch)
        if number == 1:
            for network in game.networks.values():
                assert torch.equal(weights(network), weights(plain))
            assert torch.equal(moments(game.attacker), moments(game.defender))
    assert set(result.logs) == {"defender_loss", "attacker_loss"}


def test_memory_does_not_grow_with_the_round():
    """Between steps, nothing is held of a round but the sum of its gradients: not a mask, not an input."""
    held = []
    for steps in (1, 40):
        game = make_game(steps=100)
        for batch in make_batches(steps):
            game.step(batch)
        state = game.state_dict()
        held.append([gradient.shape for gradient in state["teacher"]["gradients"][0]])
        assert state["teacher"]["draws"] == [[]]
        assert state["referee"]["played"] == [[]]
        assert state["moves"] == steps
    assert held[0] == held[1]


test_options_that_do_not_fit = refused(
    (lambda: make_game(steps=0), "Expected `steps` to be at least 1, got 0"),
    (lambda: make_game(warmup_steps=-1), "Expected `warmup_steps` to be at least 0"),
    (lambda: make_game(batches_per_round=-1), "Expected `batches_per_round` to be at least 1"),
    (lambda: make_game(score="f1"), "Expected `score` to be one of loss, accuracy, got 'f1'"),
    (lambda: make_game(winner="x"), "Expected `winner` to be one of evidence, greedy, proportional"),
    (lambda: make_game(returns="generator"), "Expected `returns` to be one of"),
    (lambda: make_game(batches=[]), "Expected `batches` of `rewards` to be a list of at least one batch"),
    (lambda: make_game(batches={"input_ids": 1}), "Expected `batches` of `rewards` to be a list of at least one batch"),
    (lambda: make_game(warmup_steps=4, game_steps=3), "Expected `game_steps` to be at least 4, got 3"),
    (lambda: make_game(warmup_steps=5, game_steps=5), "No step is left for the game between `warmup_steps` 5 and `game_steps` 5"),
    (lambda: make_game(decisions="type", credit=Reinforce(per="sample", baseline="leave-one-out")), "'leave-one-out' needs decisions per sample"),
)  # fmt: skip


@pytest.mark.parametrize("returns", ["attacker", "defender"])
def test_after_the_game_the_returned_network_goes_on_alone(returns):
    game = make_game(steps=2, game_steps=5, returns=returns)
    batches = make_batches(8)
    for batch in batches[:5]:
        result = game.step(batch)
        assert result.loss == result.logs[f"{returns}_loss"]
        assert game.model is game.networks[returns]
    assert set(game.networks) == {"attacker", "defender"}
    other = game.networks["defender" if returns == "attacker" else "attacker"]
    left, before = weights(other), weights(game.model)
    generator = weights(game.generator)
    results = [game.step(batch) for batch in batches[5:]]
    assert game.rounds == 3  # the last one, of one step, was finished when the game ended
    assert game.state_dict()["moves"] == 0
    assert all(parameter.grad is None for parameter in game.generator.parameters())
    assert list(game.networks) == [returns]
    assert game.networks[returns] is game.model
    assert torch.equal(weights(other), left)
    assert torch.equal(weights(game.generator), generator)
    assert not torch.equal(weights(game.model), before)
    assert not any(result.events for result in results)
    assert all(list(result.logs) == [f"{returns}_loss"] for result in results)
    assert bool(game.drop_rates()) == (returns == "attacker")
