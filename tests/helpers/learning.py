"""A toy problem for providers that learn, and what each of them must do on it."""

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

import attnreg
from attnreg.training import FineTuning
from tests.helpers import method_cases


class Toy(nn.Module):
    """One attention layer. Noise in its output raises the loss, or lowers it with ``sign=-1``."""

    def __init__(self, sign=1, size=8):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.sign = sign
        self.requires_grad_(False)

    def forward(self, x):
        out, _ = self.attention(x, x, x, need_weights=False)
        return ModelOutput(loss=self.sign * 10 * out.pow(2).mean(), logits=out)


TEXT = {"input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "labels": torch.tensor([0, 1])}


def bert():
    """A tiny classifier of texts."""
    return method_cases.bert().float().train()


def batch(size=8):
    return {"x": torch.randn(4, 6, size, generator=torch.Generator().manual_seed(2)) + 1.0}


def train(model, provider, steps=40, lr=0.05):
    """Train the provider alone; gives its drop rate in the last pass."""
    handle = attnreg.attach(model, provider, example_inputs=batch())
    trainer = FineTuning(model, torch.optim.Adam(provider.parameters(), lr=lr), handle)
    torch.manual_seed(1)
    for _ in range(steps):
        trainer.step(batch())
    handle.detach()
    return sum(trainer.drop_rates().values())


def site(**options):
    return attnreg.AttentionSite(**{"shape": (2, 4, 8, 8), "num_layers": 2, **options})


def assert_penalty(provider, places, total):
    """The penalty and its gradient are those of the total, however often masks were drawn at the places."""
    for _ in range(2):
        for place in places:
            provider(place)
        assert provider.penalty().shape == ()
        assert provider.penalty().item() == pytest.approx(total.item(), abs=1e-12)
    ours = torch.autograd.grad(provider.penalty(), list(provider.parameters()))
    theirs = torch.autograd.grad(total, list(provider.parameters()))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(ours, theirs, strict=True))
