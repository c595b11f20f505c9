"""Scheduled: an argument follows its knots, over training or over depth, and nothing that cannot change is accepted."""

import copy
import inspect
import itertools
import math

import numpy as np
import pytest
import torch

import attnreg
from attnreg.regularizer.abilities import PATIENCE
from tests.helpers.cases import refused
from tests.helpers.models import encoder
from tests.helpers.provider_cases import BUILT_IN
from tests.helpers.reference import close

SITE = attnreg.AttentionSite(shape=(50, 4, 30, 30), num_layers=3)


def interpolated(knots, x):
    """Slowly: the segment around x, from the definition of a line through two points."""
    if x <= knots[0][0]:
        return knots[0][1]
    for (a, p), (b, q) in itertools.pairwise(knots):
        if a <= x <= b:
            return p + (q - p) * (x - a) / (b - a)
    return knots[-1][1]


KNOTS = [
    [(0, 0.4), (0.5, 0.0), (1, 0.4)],  # Scheduled DropHead
    [(0.25, 0.1), (0.75, 0.9)],
    [(0, 0.3)],
]


@pytest.mark.parametrize("knots", KNOTS, ids=len)
def test_an_argument_follows_its_knots_over_training(knots):
    torch.manual_seed(0)
    inner = attnreg.AttentionDropout(0.5, "scores")
    provider = attnreg.Scheduled(inner, total_steps=20, p=knots)
    for step in range(25):
        expected = interpolated(knots, min(step / 20, 1.0))
        assert float(inner.p) == pytest.approx(expected, abs=1e-12)
        assert close((~provider(SITE).scores).float().mean(), expected, 180_000)
        provider.step()


@pytest.mark.parametrize(("knots", "rates"), [([(0, 0.4), (1, 0.0)], [0.4, 0.2, 0.0]), ([(0, 1.0)], [1.0] * 3)])
def test_an_argument_follows_its_knots_over_depth(knots, rates):
    torch.manual_seed(0)
    provider = attnreg.Scheduled(attnreg.DropKey(share_queries=True), over="depth", p=knots)
    for layer, p in enumerate(rates):
        site = attnreg.AttentionSite(shape=(500, 4, 8, 30), layer=layer, num_layers=3)
        keep = provider(site).scores
        assert keep.shape == (500, 4, 1, 30)
        assert close((~keep).float().mean(), p, keep.numel())
    only = provider(attnreg.AttentionSite(shape=(9, 9, 9, 9))).scores  # an only layer is the first
    assert float((~only).float().mean()) == pytest.approx(rates[0], abs=0.1)


@pytest.mark.parametrize(
    ("inner", "knots", "ends"),
    [
        (attnreg.DropKey(), [(0, 1.0), (1, 0.0)], (1.0, 0.0)),
        # Stochastic depth: whole blocks, the more often the deeper they are: the linear rule of Huang et al. (2016).
        (attnreg.LayerDrop(), [(0, 0.0), (1, 1.0)], (0.0, 1.0)),
    ],
)
def test_depth_counts_the_layers_of_a_model(inner, knots, ends):
    model, x, seen = encoder(), torch.randn(20, 6, 8), []
    with attnreg.attach(model, attnreg.Scheduled(inner, over="depth", p=knots)) as handle:
        for _ in range(60):
            model(x)
            seen.append(list(handle.drop_rates().values()))
    first, middle, last = (sum(rates) / 60 for rates in zip(*seen, strict=True))
    assert (first, last) == ends
    assert 0.2 < middle < 0.8


@pytest.mark.parametrize("inner", [attnreg.LayerDrop, attnreg.AttentionLayerDrop])
def test_progressive_layer_dropping_is_the_papers_schedule(inner):
    """Zhang and He, 2020: theta(t) = (1 - theta) exp(-gamma t) + theta; layer i of L is kept at 1 - i / L (1 - theta(t))."""
    theta, gamma, steps, depth = 0.4, 5.0, 20, 3
    schedule = {"over": "depth", "growth": gamma, "p": [(0, (1 - theta) / depth), (1, 1 - theta)]}
    provider = attnreg.Scheduled(inner(), total_steps=steps, **schedule)
    for t in range(steps + 3):
        theta_t = (1 - theta) * math.exp(-gamma / steps * t) + theta
        for i in range(1, depth + 1):
            provider.inner(attnreg.AttentionSite(shape=(1, 1, 2, 2), layer=i - 1, num_layers=depth))
            assert math.isclose(1 - float(provider.provider.p), 1 - i / depth * (1 - theta_t), rel_tol=1e-12)
        provider.step()


def test_several_arguments_at_once_and_within_a_composition():
    inner = attnreg.AttributionProvider(method="random")
    provider = attnreg.OnLayers(attnreg.Scheduled(inner, 4, p=[(0, 0.1), (1, 0.5)], q=[(0, 1), (1, 0)]), [0])
    (provider & attnreg.DropHead(0.1)).step()
    assert (float(inner.p), float(inner.q)) == (pytest.approx(0.2), pytest.approx(0.75))


@pytest.mark.parametrize(("knots", "growth"), [(KNOTS[0], None), (KNOTS[1], None), (KNOTS[1], 0.7)])
def test_a_schedule_continues_after_saving_and_copying(tmp_path, knots, growth):
    provider = attnreg.Scheduled(attnreg.DropHead(), 8, growth=growth, p=knots)
    for _ in range(5):
        provider.step()
    provider.save_pretrained(tmp_path / "p")
    for again in (attnreg.Scheduled.from_pretrained(tmp_path / "p"), copy.deepcopy(provider)):
        assert again.provider.p == provider.provider.p
        again.step()
        share = 1 if growth is None else 1 - math.exp(-0.7 * 6 / 8)
        assert float(again.provider.p) == pytest.approx(interpolated(knots, 6 / 8) * share)


def test_only_a_schedule_over_training_waits_for_steps():
    over_training, over_depth = (
        attnreg.Scheduled(attnreg.DropHead(), 9, over, p=[(0, 0.2), (1, 0)]) for over in ("training", "depth")
    )
    assert "schedule of Scheduled" in over_training.why_asleep(PATIENCE)
    assert over_depth.why_asleep(PATIENCE) is None


test_what_cannot_be_scheduled_is_refused = refused(
    (lambda: attnreg.Scheduled(attnreg.DropHead(), p=[(0, 1)]), "needs `total_steps`"),
    (lambda: attnreg.Scheduled(attnreg.DropHead(), over="depth", growth=1, p=[(0, 1)]), "needs `total_steps`"),
    (lambda: attnreg.Scheduled(attnreg.DropHead(), 9, growth=0, p=[(0, 1)]), "Expected `growth` to be above 0"),
    (lambda: attnreg.Scheduled(attnreg.DropHead(), 9), "needs an argument of DropHead to change"),
    (lambda: attnreg.Scheduled(attnreg.DropHead(), 9, q=[(0, 1)]), r"can change \(p\), got 'q'"),
    (lambda: attnreg.Scheduled(attnreg.ConcreteDropout(2), 9, p=[(0, 0.1)]), "ConcreteDropout .*, got 'p'"),
    (lambda: attnreg.Scheduled(attnreg.DropHead(), 9, p=[(0, 1.5)]), "`p` to be a probability .*, got 1.5"),
    (lambda: attnreg.Scheduled(attnreg.DropHead(), 9, p=[(2, 0.1)]), r"a share of all steps .* got 2\."),
    (lambda: attnreg.Scheduled(attnreg.DropHead(), 9, p=[("0", 0.1)]), r"a share of all steps .* got '0'\."),
    (lambda: attnreg.Scheduled(attnreg.DropHead(), 9, p=[(True, 0.1)]), r"a share of all steps .* got True\."),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_knots_may_be_numbers_of_numpy(dtype):
    knots = zip(np.linspace(0, 1, 3, dtype=dtype), np.linspace(0, 0.4, 3), strict=True)
    scheduled = attnreg.Scheduled(attnreg.DropHead(), 2, p=[*knots])
    scheduled.step()
    assert scheduled.provider.p == pytest.approx(0.2)


def test_every_schedulable_argument_is_read_at_each_call():
    """A provider that lists an argument must read it in forward or penalty, not only when it is constructed."""
    for cls in BUILT_IN.values():
        methods = [m for name, m in vars(cls).items() if inspect.isfunction(m) and name != "__init__"]
        source = "".join(inspect.getsource(method) for method in methods)
        assert all(f"self.{name}" in source for name in cls.schedulable), cls
