"""What the dry run measured, and what scores look like, is read off each pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnreg
from attnreg.errors import NoAttentionError
from tests.sweep.checks import Answer


class Sharp(nn.Module):
    """Self-attention whose scores of a token with itself are about 1024, others within 100."""

    def __init__(self, fused, change=lambda scores: scores):
        super().__init__()
        self.words, self.fused, self.change = nn.Embedding(99, 1024), fused, change

    def forward(self, ids):
        x = self.words(ids)
        if self.fused:
            return F.scaled_dot_product_attention(x, x, x, scale=1.0)
        return self.change(x @ x.mT).softmax(-1) @ x


def no_self(site):
    return attnreg.Mask(scores=~torch.eye(site.shape[-1], dtype=torch.bool).expand(site.shape))


@pytest.mark.parametrize("fused", [True, False])
def test_sharp_scores_are_not_the_models_own_mask(fused):
    torch.manual_seed(0)
    model, ids = Sharp(fused).train(), torch.randperm(99)[:24].view(3, 8)
    x = model.words(ids)
    expected = (x @ x.mT).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf).softmax(-1) @ x
    with attnreg.attach(model, Answer(no_self), example_inputs=(ids,)) as handle:
        assert torch.allclose(model(ids), expected, atol=1e-5)
        assert handle.drop_rates() == {"encoder.0": 1 / 8}
        with torch.no_grad(), handle.probing():
            assert torch.allclose(model(ids), expected, atol=1e-5)


PADDING = torch.arange(8) >= 6
WAYS = {
    "added": lambda scores: scores + PADDING * -100.0,
    "added in place": lambda scores: scores.add_(PADDING * -1000.0),
    "subtracted": lambda scores: scores - 100.0 * PADDING,
    "filled": lambda scores: scores.masked_fill(PADDING, -100.0),
    "chosen": lambda scores: torch.where(PADDING, torch.tensor(-1000.0), scores),
    "two values": lambda scores: scores + PADDING * -100.0 * torch.arange(8).clamp(max=7),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_of_low_numbers_is_the_models_own(way):
    torch.manual_seed(0)
    model, ids = Sharp(False, WAYS[way]).train(), torch.randperm(99)[:24].view(3, 8)
    model.words.weight.data /= 32
    nothing = Answer(lambda site: attnreg.Mask(scores=torch.zeros(site.shape[-2:], dtype=torch.bool)))
    with attnreg.attach(model, nothing, example_inputs=(ids,)):
        assert torch.allclose(model(ids), model.words(ids)[:, :6].mean(1, keepdim=True), atol=1e-6)


class PaddedKeys(nn.Module):
    """Attention that pads its keys to a multiple of 8."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)

    def forward(self, ids):
        x = self.words(ids)
        keys = F.pad(x, (0, 0, 0, -ids.shape[1] % 8))
        scores = x @ keys.mT
        scores[..., ids.shape[1] :] = -1e9
        return scores.softmax(-1) @ keys


def test_padded_keys_are_no_sinks():
    shapes = []

    def last(site):
        shapes.append(site.shape)
        keep = torch.ones(site.shape, dtype=torch.bool)
        keep[..., -1] = False
        return attnreg.Mask(scores=keep)

    model = PaddedKeys().train()
    with attnreg.attach(model, Answer(last), example_inputs=(torch.randint(0, 50, (2, 5)),)) as handle:
        for length, keys in ((8, 8), (5, 8), (11, 16)):
            model(torch.randint(0, 50, (4, length)))
            assert shapes[-1] == (4, 1, length, keys)
            assert handle.drop_rates() == {"encoder.0": 1 / 8 if length == 8 else 0}


class Prefixed(nn.Module):
    """Attention to learned keys before those of the tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.prefix, self.number = nn.Embedding(50, 32), nn.Parameter(torch.randn(1, 3, 32)), 3

    def forward(self, ids):
        x = self.words(ids)
        keys = torch.cat([self.prefix[:, : self.number].expand(len(x), -1, -1), x], 1)
        return (x @ keys.mT).softmax(-1) @ keys


def test_the_number_of_sinks_is_read_off_each_pass():
    shapes = []
    model = Prefixed().train()
    provider = Answer(lambda site: shapes.append(site.shape))
    with attnreg.attach(model, provider, example_inputs=(torch.randint(0, 50, (2, 5)),)):
        for model.number in (3, 0):
            model(torch.randint(0, 50, (4, 8)))
        assert shapes == [(4, 1, 8, 8)] * 2
        model.number = 2
        with pytest.raises(NoAttentionError, match="2 columns that belong to no query, but 3 when the model was att"):
            model(torch.randint(0, 50, (4, 8)))
