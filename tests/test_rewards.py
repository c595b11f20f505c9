"""REINFORCE on a case small enough to enumerate; scores, rewards and winners."""

import itertools
import types

import pytest
import scipy.stats
import torch
import transformers as hf

import attnreg
from attnreg.attendout.credit import reinforce_loss
from attnreg.attendout.rewards import (
    MetricScore,
    Referee,
    by_evidence,
    correctness,
    greedy,
    negative_loss,
    proportional,
    standardized_gap,
)
from attnreg.errors import InputError
from attnreg.training import Reinforce, Rewards
from tests.helpers.games import make_batches, make_game
from tests.helpers.method_cases import bert

INPUTS = {"input_ids": torch.tensor([[1, 2]])}
ACTIONS = [torch.tensor(bits).view(1, 1, 1, 2, 2) for bits in itertools.product([False, True], repeat=4)]
REWARDS = dict(enumerate(torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()))
BASELINE = 0.3


def index_of(keep):
    return int((keep.flatten().long() * torch.tensor([8, 4, 2, 1])).sum())


@pytest.fixture
def net():
    torch.manual_seed(0)
    made = attnreg.GNetProvider(4, 3, 1, 2, initial_keep=0.6).double()
    made.calibrate(INPUTS)
    return made


def parameters(net):
    net = net.network
    norm = net.embedding_norm
    return [net.tokens.weight, net.positions.weight, norm.weight, norm.bias, net.qkv.weight, net.qkv.bias, net.bias]


def expected_reward(net):
    """By enumeration: sum over all actions of probability times reward."""
    p = torch.sigmoid(net.logits(INPUTS))
    return sum(torch.where(a, p, 1 - p).prod() * REWARDS[index_of(a)] for a in ACTIONS)


def policy_gradient(net, action):
    loss = reinforce_loss(net.log_prob(INPUTS, action), REWARDS[index_of(action)] - BASELINE)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters(net))])


def exact_gradient(net):
    """Of minus the expected reward; log P(a) is a mean over the 4 units, so everything is a quarter of it."""
    return torch.cat([-g.flatten() / 4 for g in torch.autograd.grad(expected_reward(net), parameters(net))])


def test_exact_expectation_of_the_estimate_is_the_gradient_of_the_expected_reward(net):
    with torch.no_grad():
        p = torch.sigmoid(net.logits(INPUTS))
        chances = [float(torch.where(a, p, 1 - p).prod()) for a in ACTIONS]
    assert sum(chances) == pytest.approx(1.0, abs=1e-12)
    expectation = sum(c * policy_gradient(net, a) for c, a in zip(chances, ACTIONS, strict=True))
    assert (expectation - exact_gradient(net)).abs().max() < 1e-12


LABELS = {
    "classes": (torch.tensor([0, 1, 1]), {"num_labels": 2}),
    "numbers": (torch.tensor([0.5, 1.0, -2.0]).double(), {"num_labels": 1}),
    "several": (torch.eye(3).double(), {"num_labels": 3, "problem_type": "multi_label_classification"}),
}


class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch)


@pytest.mark.parametrize("of", LABELS)
def test_scores_are_per_sample(of):
    labels, options = LABELS[of]
    model = bert(**options).eval()
    batch = {"input_ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "labels": labels}
    with torch.no_grad():
        score = negative_loss(model, batch)
        assert score.shape == (3,)
        assert score.mean().item() == pytest.approx(-model(**batch).loss.item(), abs=1e-12)
        assert torch.equal(negative_loss(Wrapper(model), batch), score)
        if not labels.is_floating_point():
            right = model(**batch).logits.argmax(1) == labels
            assert torch.equal(correctness(model, batch), right.float())


def test_token_scores_leave_out_ignored_labels_and_have_no_metric():
    model = bert(hf.BertForTokenClassification, num_labels=3).eval()
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[0, -100, 2]])}
    with torch.no_grad():
        assert negative_loss(model, batch).item() == pytest.approx(-model(**batch).loss.item(), abs=1e-12)
    with pytest.raises(InputError, match=r"A metric needs one label per row, got labels of shape \(1, 3\)"):
        MetricScore(lambda a, b: 0.0)(model, batch)


def test_rewards_and_winners():
    a, d = torch.tensor([0.4, 0.1, 0.7, 0.2]), torch.tensor([0.1, 0.2, 0.3, 0.2])
    gaps = a - d
    t = gaps.mean() / (gaps.std() / 2)
    assert Reinforce(reward="gap").rewards(gaps) == pytest.approx(0.15)
    assert Reinforce(reward="scaled").rewards(gaps) == pytest.approx(0.15)
    assert Reinforce(reward="standardized").rewards(gaps) == pytest.approx(float(t))
    assert torch.equal(Reinforce(reward="gap", per="sample").rewards(gaps), gaps)
    assert standardized_gap(gaps) == pytest.approx(float(t))
    assert standardized_gap(gaps * 1e-5) == pytest.approx(float(t), abs=1e-4)
    assert float(by_evidence(a, d)) == pytest.approx(scipy.stats.norm.cdf(float(t)), abs=1e-5)
    assert greedy(a, d) == 1
    assert greedy(d, a) == 0
    assert proportional(a, d) == pytest.approx(1.4 / 2.2)
    for winner in (by_evidence, greedy, proportional):
        assert winner(d, d) == 0.5
    assert standardized_gap(torch.tensor([2.0])) == 1


CHANCES = [(0.6, 0.2, 0.75), (0.3, 0.0, 1.0), (0.0, 0.0, 0.5), (0.2, -0.1, 1.0)]
CHANCES += [(-0.2, -0.6, 0.75), (-0.1, -0.1, 0.5), (0.0, -0.4, 1.0)]


@pytest.mark.parametrize(("attacker", "defender", "chance"), CHANCES)
def test_the_proportional_winner_is_defined_for_scores_of_any_sign(attacker, defender, chance):
    a, d = torch.tensor([attacker]), torch.tensor([defender])
    assert float(proportional(a, d)) == pytest.approx(chance)
    assert float(proportional(d, a)) == pytest.approx(1 - chance)


def test_a_metric_scores_all_rows_of_a_round_together():
    """Matthews' correlation of all scored rows is no mean over batches."""
    seen = []

    def metric(labels, predictions):
        seen.append((labels, predictions))
        return 10.0 * len(seen)

    rewards = make_batches(3, seed=9)
    game = make_game(steps=1, batches=rewards, score=MetricScore(metric))
    result = game.step(make_batches(1)[0])
    assert [len(labels) for labels, _ in seen] == [12, 12]  # once for each network
    assert seen[0][0] == torch.cat([batch["labels"] for batch in rewards]).tolist()
    assert (result.logs["defender_score"], result.logs["attacker_score"]) == (10.0, 20.0)
    assert result.logs["attacker_chance"] == 1.0  # without rows' scores, the better one wins
    with pytest.raises(InputError, match="Expected `per` 'round' with a metric as score"):
        make_game(score=MetricScore(metric), credit=Reinforce(per="sample"))


def test_each_round_may_have_rows_of_its_own():
    rounds, asked = make_batches(4, seed=9), []

    def rows(number):
        asked.append(number)
        return [rounds[number]]

    seen = []

    def score(network, batch):
        seen.append(id(batch))
        return torch.zeros(len(batch["labels"]))

    game = make_game(steps=2, batches=rows, score=score)
    for batch in make_batches(6):
        game.step(batch)
    assert asked == [0, 1, 2]
    assert seen == [id(rounds[number]) for number in (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize("number", [4, 5])
def test_reward_rows_keep_their_order_over_processes(number):
    batches = [{"input_ids": torch.tensor([[each]])} for each in range(number)]
    dealt = []
    for processes in (1, 2, 3):
        updaters = [types.SimpleNamespace(rank=rank, processes=processes) for rank in range(processes)]
        each = [Referee(updater, Rewards(batches), "greedy")._batches() for updater in updaters]
        dealt.append([int(batch["input_ids"]) for batches_of_one in each for batch in batches_of_one])
    assert dealt == [[*range(number)]] * 3
