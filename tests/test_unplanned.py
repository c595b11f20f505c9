"""Attention that never runs is said once; a pass within a pass, or one that is recorded, is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import attnreg
from attnreg.errors import CoverageWarning, NoAttentionError


class Encoding(nn.Module):
    """Computes attention in a method of its own."""

    def __init__(self):
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 2)

    def attend(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    def encode(self, ids):
        return self.attend(self.words(ids))

    def forward(self, ids):
        return self.head(self.encode(ids).mean(1))


class One(nn.Module):
    """One block."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)

    def forward(self, x):
        return self.block(x)


def test_a_pass_within_a_pass_is_refused():
    model, x = One(), torch.randn(2, 4, 8)
    model.block.register_forward_pre_hook(lambda module, given: model.block.self_attn(x, x, x) and None)
    with (
        attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)),
        pytest.raises(NoAttentionError, match=r"called more often .* do not call the model within its own forward"),
    ):
        model(x)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x, both=True):
        x = self.first(x)
        return self.second(x) if both else x


def test_attention_that_never_runs_is_said_once(patience):
    model, x = Two(), torch.randn(2, 4, 8)
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)):
        for _ in range(patience - 1):
            model(x, both=False)
        with pytest.warns(
            CoverageWarning, match=r"1 masked module\(s\) did not run in 12 training passes: second\.self_attn\."
        ):
            model(x, both=False)
        for _ in range(patience + 1):
            model(x, both=False)


def test_attention_that_runs_no_more_is_said_once(patience):
    model, x = Two(), torch.randn(2, 4, 8)
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)):
        for number in range(2 * patience - 1):
            model(x, both=number < patience)
        with pytest.warns(CoverageWarning, match=r"did not run in 12 training passes: second\.self_attn\."):
            model(x, both=False)
        for _ in range(2 * patience + 1):
            model(x, both=False)


RECORDERS = {
    "jit": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, x: make_fx(model)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("record", RECORDERS.values(), ids=RECORDERS)
def test_a_recorded_pass_would_repeat_its_masks(record):
    model, x = nn.Sequential(Encoding()), torch.randint(0, 20, (3, 6))
    with (
        attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)),
        pytest.raises(RuntimeError, match=r"torch\.jit\.trace, torch\.fx and CUDA graphs would repeat the masks"),
    ):
        record(model, x)


def test_a_step_notices_that_all_masked_blocks_are_gone():
    model, x = Two(), torch.randn(2, 4, 8)
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)) as handle:
        model.second(model.first(x))
        handle.step()
        model.first, model.second = Two().first, Two().second
        model.second(model.first(x))  # no masked module runs
        with pytest.raises(NoAttentionError, match="first was replaced after it was attached"):
            handle.step()
