"""Attention in methods besides forward is masked, or said once; and so is what never runs, or is recorded."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import attnreg
from attnreg.errors import CoverageWarning, NoAttentionError


class Encoding(nn.Module):
    """Computes attention in a method of its own, or in one of another module."""

    def __init__(self):
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 2)

    def attend(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    def encode(self, ids):
        return self.attend(self.words(ids))

    def again(self, x):
        return self.attend(x) + x

    def forward(self, ids):
        return self.head(self.again(self.encode(ids)).mean(1))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Encoding()

    def forward(self, ids):
        return self.inner.encode(ids).mean(1)


def test_attention_in_a_method_of_the_model():
    model, ids = Encoding(), torch.randint(0, 20, (3, 6))
    x = model.words(ids).detach()
    with torch.no_grad():
        plain = model.encode(ids), model.again(x)
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=(ids,))
    assert len(handle.sites) == 2
    out, seed = model.encode(ids), handle.seed
    assert not torch.equal(out, plain[0])
    assert handle.drop_rates().keys() == {"encoder.0"}
    assert not torch.equal(model.encode(ids), out)
    with handle.replay(seed):
        assert torch.equal(model.encode(ids), out)
    handle.step()
    model.again(x)
    assert handle.drop_rates().keys() == {"encoder.1"}
    model(ids)
    assert handle.drop_rates().keys() == {"encoder.0", "encoder.1"}
    copied = copy.deepcopy(model)
    assert not torch.equal(copied.encode(ids), copied.encode(ids))
    copied.encode = types.MethodType(Encoding.encode, copied)  # the method that it calls is masked, too
    assert not torch.equal(copied.encode(ids), copied.encode(ids))
    with torch.no_grad():
        assert torch.equal(model.encode(ids), plain[0])
    with handle.disabled():
        assert torch.equal(model.again(x), plain[1])
    handle.detach()
    assert torch.equal(model.encode(ids), plain[0])
    assert not {"encode", "again", "attend"} & vars(model).keys()


def test_attention_in_a_method_of_another_module():
    model, ids = Around(), torch.randint(0, 20, (3, 6))
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=(ids,))
    expected, seed = model(ids), handle.seed
    with handle.replay(seed):
        assert torch.equal(model.inner.encode(ids).mean(1), expected)
    assert not torch.equal(model.inner.encode(ids).mean(1), expected)
    handle.detach()
    assert torch.equal(model.inner.encode(ids), model.inner.encode(ids))


class Beside(nn.Module):
    """Methods that forward never calls."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)

    def forward(self, x):
        return self.block(x)

    def fused(self, x):
        return F.scaled_dot_product_attention(x, x, x)

    def written(self, x):
        return F.dropout((x @ x.mT).softmax(-1), 0.1) @ x

    def probabilities(self, x):
        return self.block(x).softmax(-1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, since torch 2.14
def test_attention_in_a_method_that_forward_never_calls_is_said_once():
    model, x = Beside(), torch.randn(2, 4, 8)
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)):
        for method in ("fused", "written"):
            with pytest.warns(CoverageWarning, match=rf"`Beside\.{method}` computes attention that is not masked"):
                getattr(model, method)(x)
            getattr(model, method)(x)
        model.probabilities(x)
        torch.func.vmap(model.fused)(x[None])
        assert not torch.equal(model.probabilities(x), model.probabilities(x))
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,), modules="block*"):
        model.fused(x)
    assert not {"fused", "written", "probabilities"} & vars(model).keys()


def test_a_pass_within_a_pass_is_refused():
    model, x = Beside(), torch.randn(2, 4, 8)
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


def test_attention_that_never_runs_is_said_once():
    model, x = Two(), torch.randn(2, 4, 8)
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)):
        for _ in range(99):
            model(x, both=False)
        with pytest.warns(
            CoverageWarning, match=r"1 masked module\(s\) did not run in 100 training passes: second\.self_attn\."
        ):
            model(x, both=False)
        for _ in range(101):
            model(x, both=False)


def test_attention_that_runs_no_more_is_said_once():
    model, x = Two(), torch.randn(2, 4, 8)
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(x,)):
        for number in range(199):
            model(x, both=number < 100)
        with pytest.warns(CoverageWarning, match=r"did not run in 100 training passes: second\.self_attn\."):
            model(x, both=False)
        for _ in range(201):
            model(x, both=False)


RECORDERS = {
    "jit": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, x: make_fx(model)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("record", RECORDERS.values(), ids=RECORDERS)
def test_a_recorded_pass_would_repeat_its_masks(record):
    model, x = Encoding(), torch.randint(0, 20, (3, 6))
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
