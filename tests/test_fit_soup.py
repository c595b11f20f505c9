"""The last step of a fit: trainings on all rows, which take turns while time is left, and the mean of their weights."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from attnreg.experiments.fit import soup
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.race import Race
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.fit.soup import mean_of, trained_on_all
from attnreg.experiments.fit.tries import Try
from attnreg.experiments.setup.batches import in_order
from attnreg.experiments.tasks.models.linear_head import head_and_features
from tests.helpers.bench import MadeUp

PLAIN, LP_FT, CONTRASTIVE = Try(2, 1e-3), Try(2, 1e-3, fits_head=True), Try(2, 1e-3, contrasts=True)


@pytest.mark.parametrize(
    "ways", [[PLAIN], [PLAIN] * 3, [LP_FT], [LP_FT] * 3, [CONTRASTIVE, LP_FT], [LP_FT, CONTRASTIVE, LP_FT]], ids=str
)
def test_the_mean_of_networks_is_that_of_their_weights(ways, bench):
    rows, trainings = np.arange(80), [*zip(ways, [3, 4, 6], strict=False)]
    networks = [bench.trained(way, rows, seed, lambda: None) for way, seed in trainings]
    mean, done = mean_of(bench, iter(trainings), rows, lambda: None)
    assert (done, mean.training) == (ways, False)
    alone = {name: torch.stack([each.state_dict()[name] for each in networks]) for name in networks[0].state_dict()}
    assert len(ways) == 1 or any(len(weights.unique(dim=0)) > 1 for weights in alone.values())
    is_fitted = ways[0].ends_with_fit and len(ways) > 1  # its head, to the states of the mean network
    for name, weight in mean.state_dict().items():
        if not (is_fitted and name.startswith("classifier")):
            torch.testing.assert_close(weight, alone[name].mean(0, dtype=torch.float64).float(), rtol=0, atol=1e-6)
    if is_fitted:
        head, states, _ = head_and_features(mean, in_order(bench.encoded[0].rows, 64, bench.kind, torch.device("cpu")))
        penalty = 1.0 if ways[0].contrasts else 0.1
        regression = LogisticRegression(C=penalty).fit(states[rows] / states[rows].std(), bench.labels[rows])
        np.testing.assert_allclose(
            head(states).diff()[:, 0].detach(), regression.decision_function(states / states[rows].std()), atol=1e-2
        )


def test_no_network_waits_in_memory_while_the_next_is_trained(bench, monkeypatch):
    train, made = bench.trained, []

    def trained(*given):
        gc.collect()
        assert not any(network() for network in made)
        made.append(weakref.ref(network := train(*given)))
        return network

    monkeypatch.setattr(bench, "trained", trained)
    done = mean_of(bench, [(Try(1, 1e-3), seed) for seed in range(3)], np.arange(40), lambda: None)[1]
    assert len(done) == len(made) == 3


@pytest.fixture
def trained(monkeypatch):
    """The ways and seeds that are trained on all rows, a second for a pass, where a race has scored some tries."""
    time, made = [0.0], []
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: time[0]))

    def mean_of(bench, trainings, rows, tick):
        for way, seed in trainings:
            made.append((way, seed))
            time[0] += way.passes
            tick()
        return torch.nn.Identity(), [way for way, _ in made]

    monkeypatch.setattr(soup, "mean_of", mean_of)
    rows = Rows.checked([f"text {number}" for number in range(40)], [number % 2 for number in range(40)])

    def run(left, best, right):
        race = Race(MadeUp(rows, time, right.get), rows, Clock(time[0] + left, lambda text: None), 7, None)
        race.train(itertools.product(right, race.all_folds[:5]))
        race.clock = Clock(left, lambda text: None)
        made.clear()
        assert trained_on_all(race, best)[1] == [way for way, _ in made]
        return made

    return run


@pytest.mark.parametrize(
    ("left", "way", "count"),
    [(-5, PLAIN, 1), (4.3, PLAIN, 1), (4.5, PLAIN, 2), (8, PLAIN, 3), (999, PLAIN, 4), (999, Try(), 1)],
)
def test_the_best_is_trained_again_while_time_is_left(left, way, count, trained):
    assert trained(left, way, {way: 1.0}) == [(way, seed) for seed in [7, 8, 9, 10][:count]]


@pytest.mark.parametrize("best", [CONTRASTIVE, LP_FT, Try(2, 1e-3, fits_head=True, ad_drop=True)], ids=str)
def test_contrastive_fine_tuning_and_lp_ft_take_turns(best, trained):
    right = {CONTRASTIVE: 0.9, Try(4, 1e-3, contrasts=True): 0.6, LP_FT: 0.9, Try(4, 1e-3, fits_head=True): 0.6}
    other = LP_FT if best.contrasts else CONTRASTIVE
    assert [way for way, _ in trained(999, best, {**right, PLAIN: 0.95, best: 0.8})] == [best, other] * 2


@pytest.mark.parametrize(
    ("best", "right"),
    [
        (CONTRASTIVE, {CONTRASTIVE: 0.95, LP_FT: 0.5}),  # it loses
        (CONTRASTIVE, {CONTRASTIVE: 0.8, Try(2, 1e-3, fits_head=True, max_length=256): 0.9, PLAIN: 0.9}),
        (PLAIN, {PLAIN: 0.8, LP_FT: 0.9, CONTRASTIVE: 0.9}),  # its head moves with the network
        (LP_FT, {LP_FT: 0.8, Try(4, 1e-3, fits_head=True): 0.9}),
    ],
)
def test_others_take_no_turn(best, right, trained):
    assert [way for way, _ in trained(999, best, right)] == [best] * 4


def test_time_for_a_turn_is_that_of_its_passes(trained):
    right = {CONTRASTIVE: 0.8, (longer := Try(6, 1e-3, fits_head=True)): 0.9}
    first, second = CONTRASTIVE.passes, longer.passes
    assert [way for way, _ in trained(first + 1.1 * second, CONTRASTIVE, right)] == [CONTRASTIVE]
    assert [way for way, _ in trained(first + 1.3 * second, CONTRASTIVE, right)] == [CONTRASTIVE, longer]
