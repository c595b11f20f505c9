"""Every specimen can be trained for a step, and nothing in it is random."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.sweep.zoo import WARNINGS, specimens

pytestmark = [pytest.mark.slow, *map(pytest.mark.filterwarnings, WARNINGS)]

# What is random in training, whatever the configuration says.
RANDOM = {"groupvit": "groups are drawn", "groupvit_vision_model": "groups are drawn", "vilt": "patches are taken in a random order"}  # fmt: skip
INFINITE = {"grounding-dino": "the scores of no word", "mm-grounding-dino": "the scores of no word"}


def run(model, inputs, seed):
    """All real numbers in an output, from whatever it nests."""
    torch.manual_seed(seed)
    leaves = [x for x in tree_leaves(model(**inputs)) if isinstance(x, torch.Tensor)]
    return [torch.view_as_real(x) if x.is_complex() else x for x in leaves if x.is_complex() or x.is_floating_point()]


@pytest.mark.parametrize("specimen", specimens(), ids=str)
def test_a_step_of_training(specimen):
    torch.manual_seed(0)
    model = specimen.make().train()
    inputs = specimen.inputs(model)
    outputs = run(model, inputs, seed=1)
    assert outputs
    again = run(model, inputs, seed=2)
    same = [torch.equal(x, y) for x, y in zip(outputs, again, strict=True)]
    assert all(same) != (specimen.name in RANDOM)
    finite = [x[x.isfinite()] for x in outputs]
    if specimen.name in INFINITE:
        assert not any(x.isnan().any() for x in outputs)
    else:
        assert all(x.numel() == y.numel() for x, y in zip(finite, outputs, strict=True))
    sum(x.square().mean() for x in finite if x.requires_grad and x.numel()).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
