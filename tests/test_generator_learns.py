"""A Generator learns where there is something to learn: an oracle rewards what it drops, at default learning rates."""

import math

import pytest
import torch

import attnreg
from attnreg.attendout.credit import Teacher
from attnreg.training import Reinforce
from attnreg.training.method import Updater

PLANTED = 3


def batch():
    """Sixteen sentences of eight tokens, each with the planted one in one place after the first."""
    ids = torch.randint(4, 30, (16, 8))
    ids[:, 0] = 1
    ids[torch.arange(16), torch.randint(1, 8, (16,))] = PLANTED
    return {"input_ids": ids, "labels": torch.zeros(16, dtype=torch.long)}


def rates(generator, inputs, of=None):
    """Mean probability of dropping by layer; of the planted key, of the others, or of all."""
    dropped = 1 - generator.keep_probability(inputs)[:, :, 0]
    is_planted = (inputs["input_ids"] == PLANTED)[:, None, None].expand(dropped.shape)
    chosen = {None: torch.ones_like(is_planted), True: is_planted, False: ~is_planted}[of]
    return (dropped * chosen).sum((0, 2, 3)) / chosen.sum((0, 2, 3))


def taught(goal, *, width=32, decisions="unit", per="round", rounds=120):
    """A Generator after rounds of two steps, whose reward is the share that it dropped, or kept, of some keys."""
    torch.manual_seed(0)
    generator = attnreg.GNetProvider(30, width, 3, 8, initial_keep=0.8, decisions=decisions)
    baseline = "leave-one-out" if per == "sample" else "moving"
    teacher = Teacher(Reinforce(per=per, baseline=baseline), generator, Updater())
    first = batch()
    generator.calibrate(first)
    before = rates(generator, first)
    for _ in range(rounds):
        gaps = []
        for _ in range(2):
            inputs = batch()
            teacher.draw(inputs)
            dropped = 1 - generator.keep.float().mean((1, 2, 3))  # of each key, over layers and queries
            if goal == "plant":
                dropped = dropped[inputs["input_ids"] == PLANTED][:, None]
            gaps.append(dropped.mean(1) if goal != "keep" else 1 - dropped.mean(1))
        teacher.update(torch.cat(gaps))
    return generator, before


WAYS = {
    "paper": {"rounds": 240},
    "key": {"decisions": "key", "rounds": 50},
    "type": {"decisions": "type", "rounds": 50},
    "word": {"decisions": "word", "rounds": 50},
    "sample": {"per": "sample", "rounds": 40},
    "wide": {"per": "sample", "rounds": 20, "width": 384},
}


def ways(*usual):
    """All ways; those that are not usual are slow tests."""
    rows = [pytest.param(way, id=name, marks=[] if name in usual else pytest.mark.slow) for name, way in WAYS.items()]
    return pytest.mark.parametrize("way", rows)


@pytest.mark.parametrize(("goal", "sign"), [("drop", 1), ("keep", -1)])
@ways("key")
def test_in_every_layer_it_drops_more_or_less_as_it_is_rewarded(way, goal, sign):
    generator, before = taught(goal, **way)
    assert (sign * (rates(generator, batch()) - before) > 0.05).all()


@ways("key", "sample")
def test_rewarded_for_dropping_one_key_it_drops_this_key_more_than_any_other(way):
    generator, _ = taught("plant", **way)
    torch.manual_seed(5)
    inputs = {"input_ids": torch.cat([batch()["input_ids"] for _ in range(40)])}
    planted, others = rates(generator, inputs, of=True), rates(generator, inputs, of=False)
    assert (torch.logit(planted) > torch.logit(others) + 0.1).all()  # in rates, they are close where all are high
    dropped = 1 - generator.keep_probability(inputs)[:, :, 0].mean((1, 2))  # of each key, over layers and queries
    by_token = [dropped[inputs["input_ids"] == token].mean() for token in range(4, 30)]
    assert dropped[inputs["input_ids"] == PLANTED].mean() > max(by_token)


@pytest.mark.parametrize("decisions", ["unit", "key"])
def test_every_layer_answers_alike(decisions):
    """Layer 0 could not move before its embeddings were normalized: its logits spread a hundredth of the others'."""
    torch.manual_seed(0)
    model = attnreg.GNetProvider(30, 32, 3, 8, decisions=decisions)
    spread = model.logits(batch()).std((0, 2, 3, 4))
    assert spread.min() > 0.2 * spread.max()
    means = [torch.sigmoid(model.logits(batch())[:, layer]).mean() for layer in range(3)]
    gradients = [torch.autograd.grad(mean, model.network.tokens.weight)[0].norm() for mean in means]
    assert min(gradients) > 0.1 * max(gradients)


def test_noise_leaves_the_rates_of_a_wide_generator_about_where_they_were():
    """With a learning rate that does not fall with the width, they run to 0 or 1 within six rounds."""
    furthest = []
    for seed in range(3):
        torch.manual_seed(seed)
        generator = attnreg.GNetProvider(30, 384, 6, 8, initial_keep=0.9)
        teacher = Teacher(Reinforce(), generator, Updater())
        first = batch()
        generator.calibrate(first)
        for _ in range(10):
            teacher.draw(batch())
            teacher.update(torch.randn(1))
        furthest.append((torch.logit(rates(generator, first)) - math.log(0.1 / 0.9)).abs().max())
    assert sorted(furthest)[1] < 1.2
