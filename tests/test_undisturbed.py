"""What looks at a model leaves it as it was: also layers that act in ``train()``, statistics, and global generators."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import attnreg
from attnreg.experiments.tasks.models.linear_head import fit_linear_head
from attnreg.training import SAM
from tests.helpers.method_cases import BATCH, bert, same, sgd


class Merging(nn.Linear):
    """Adds an adapter to its weights in eval mode, as loralib's layers do."""

    def __init__(self, size):
        super().__init__(size, size)
        self.adapter, self.merged = nn.Parameter(torch.randn(size, size)), False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.adapter.T


class Noisy(nn.Module):
    """Draws from the generators of Python and numpy."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(random.random() + np.random.rand() if self.training else 0.0)
        return x + self.seen[-1]


def model():
    made = bert()
    size = made.config.hidden_size
    made.bert.pooler.dense = Merging(size).double()
    frozen = nn.BatchNorm1d(size).double()
    made.dropout = nn.Sequential(nn.BatchNorm1d(size).double(), frozen, Noisy())
    made.train()
    frozen.eval()
    return made


def state(of):
    modules = {name: (each.training, getattr(each, "merged", None)) for name, each in of.named_modules()}
    values = {name: value.clone() for name, value in of.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in of.named_parameters()}
    hooks, numpy = [len(each._forward_hooks) for each in of.modules()], np.random.get_state()
    return modules, values, gradients, hooks, random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state()


def look(of, provider):
    with attnreg.attach(of, provider):
        provider.attribute(of, BATCH)


LOOKS = {
    "attach": lambda of: attnreg.attach(of, attnreg.DropKey(0.1)).detach(),
    "doctor": attnreg.doctor,
    "ad-drop": lambda of: look(of, attnreg.AttributionProvider()),
    "ad-drop in training mode": lambda of: look(of, attnreg.AttributionProvider(first_pass="train")),
    "learned rates": lambda of: look(of, attnreg.LearnableBernoulli.for_model(of)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_model_is_left_as_it_was(name):
    of = model()
    of(**BATCH).loss.backward()
    before = state(of)
    LOOKS[name](of)
    assert same(before, state(of))


def test_frozen_statistics_stay_frozen_while_rates_are_learned():
    of, modes = model(), []
    of.dropout[1].register_forward_hook(lambda module, *_: modes.append(module.training))
    LOOKS["learned rates"](of)
    first, second = of.dropout[2].seen[-2:]
    assert first == second > 0  # both passes draw alike
    assert modes
    assert not any(modes)


def test_both_passes_of_sam_draw_alike_from_every_generator():
    of = model()
    SAM(of, sgd(of)).step(BATCH)
    first, second = of.dropout[2].seen
    assert first == second > 0


def test_fitting_a_linear_head_leaves_other_layers_as_they_were():
    of = model()
    modules, values, *_ = state(of)
    fit_linear_head(of, [BATCH])
    now = state(of)
    assert now[0] == modules
    assert {name for name in values if not torch.equal(values[name], now[1][name])} == {
        "classifier.weight",
        "classifier.bias",
    }
