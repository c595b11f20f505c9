# ruff: noqa: PT017 (an error may come, or not)
"""Attaching, passes by every entry, modes, replays, copies, changes and exceptions, in random order.

A reference computes each pass by hand: with the masks that the regularizer was asked for, where the machine's own
bookkeeping says that the pass is masked, and without masks elsewhere.
"""

import copy
import functools
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.errors import NoAttentionError
from attnreg.injection.attachment import handles
from attnreg.injection.running.attached_module import AttachedModule

H, D, LAYERS = 2, 3, 3


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.qkv, self.fused = nn.Linear(H * D, 3 * H * D), fused

    def forward(self, x):
        q, k, v = self.projected(x)
        if self.fused:
            return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + ((q @ k.mT / D**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def projected(self, x):
        return (each.unflatten(-1, (H, D)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, H * D), nn.Linear(H * D, 2)
        self.blocks = nn.ModuleList(Block(fused=layer == 1) for layer in range(LAYERS))
        self.checkpoints = self.fails = False

    def encode(self, ids):
        x = self.embed(ids)
        for layer, block in enumerate(self.blocks):
            if self.fails and layer == 1:
                raise ZeroDivisionError
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x

    def forward(self, ids):
        return self.head(self.encode(ids).mean(1))


def by_hand(block, x, keep):
    """Attention by its formula; ``keep`` is its mask, ``None`` without one."""
    q, k, v = block.projected(x)
    scores = q @ k.mT / D**0.5
    if keep is not None:
        dead = ~keep.any(-1, keepdim=True)
        scores = scores.masked_fill(~keep, -torch.inf).masked_fill(dead, 0.0)  # all dropped: uniform
    return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Remembering(attnreg.MaskProvider):
    """Drops scores, and remembers what was dropped where, under which seed."""

    def __init__(self):
        super().__init__()
        self.asked, self.handle = [], None

    def forward(self, site):
        keep = site.keep(0.5)
        self.asked.append((site.layer, keep, self.handle.seed))
        return attnreg.Mask(scores=keep)


WHOLE = {
    "call": (lambda model, ids: model(ids), True),
    "forward": (lambda model, ids: model.forward(ids), True),
    "functional_call": (lambda model, ids: functional_call(model, dict(model.named_parameters()), (ids,)), True),
    "method": (lambda model, ids: model.encode(ids), False),
}
PARTS = {
    f"block {i}": functools.partial(lambda i, model, ids: model.blocks[i](model.embed(ids)), i) for i in range(LAYERS)
}
WITHIN = "nothing", "disabled", "probing", "replay"


class Machine(RuleBasedStateMachine):
    steps = masked = refused = 0  # of all machines

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.provider, self.handle = Model().double(), None, None
        self.replaced = set()  # blocks, since the model was attached
        self.masks = {}  # by seed, layer and length
        self.waiting = []  # losses whose backward pass has not run, with the gradients that it must give
        self.happened = False  # something between forward and backward that may be refused

    @invariant()
    def count(self):
        Machine.steps += 1

    @invariant()
    def marks_are_there_if_it_is_attached(self):
        assert attnreg.is_attached(self.model) == (self.handle is not None)
        if self.handle is None:
            assert not any({"forward", "_attnreg"} & vars(module).keys() for module in self.model.modules())

    @precondition(lambda self: self.handle is None)
    @rule()
    def attach(self):
        self.provider, self.replaced = Remembering(), set()
        self.handle = self.provider.handle = attnreg.attach(
            self.model, self.provider, example_inputs=(torch.zeros(2, 4, dtype=torch.long),)
        )
        self.happened = True
        assert [site.layer for site in self.handle.sites] == list(range(LAYERS))
        assert not self.provider.asked

    @precondition(lambda self: self.handle is not None)
    @rule(chance=st.integers(0, 2))
    def detach(self, chance):
        if chance and not self.replaced:
            return
        try:
            self.handle.detach()
        except RuntimeError as error:
            assert "waits for its backward pass" in str(error)
            assert self.waiting
            self.waiting.clear()
            gc.collect()
            self.handle.detach()
        self.handle, self.happened = None, True

    @rule(training=st.booleans())
    def train(self, training):
        self.happened |= training != self.model.training
        self.model.train(training)

    @precondition(lambda self: self.handle is not None)
    @rule()
    def step(self):
        try:
            self.handle.step()
        except NoAttentionError as error:
            assert self.replaced
            assert "was replaced after it was attached" in str(error)
            Machine.refused += 1
        self.happened = True

    @rule(layer=st.integers(0, LAYERS - 1), chance=st.integers(0, 19))
    def replace_a_block(self, layer, chance):
        if chance:  # passes of a changed model are refused, so that little else would be tried
            return
        self.model.blocks[layer] = Block(fused=layer == 1).double().train(self.model.training)
        self.replaced.add(layer)
        self.happened = True

    @rule()
    def go_on_with_a_copy(self):
        if self.provider is not None:
            self.provider.asked.clear()
        copied = copy.deepcopy(self.model)
        if self.handle is None:
            assert not attnreg.is_attached(copied)
        else:
            (handle,) = handles(copied)
            assert handle is not self.handle
            self.handle, self.provider = handle, handle.provider
        self.model = copied
        self.waiting.clear()

    @rule(layer=st.integers(0, LAYERS - 1))
    def copy_a_part(self, layer):
        block, x = copy.deepcopy(self.model.blocks[layer]), torch.randn(2, 4, H * D, dtype=torch.float64)
        assert not attnreg.is_attached(block)
        torch.testing.assert_close(block(x), by_hand(block, x, None))

    @rule(ids=st.integers(0, 9999), length=st.integers(2, 6), entry=st.sampled_from([*WHOLE, *PARTS]),
          within=st.sampled_from(WITHIN), gradients=st.booleans(), checkpoints=st.booleans(), fails=st.booleans())  # fmt: skip
    def run(self, ids, length, entry, within, gradients, checkpoints, fails):
        model, handle = self.model, self.handle
        tokens = (torch.arange(2 * length).view(2, length) * 7 + ids) % 10
        is_whole = entry in WHOLE
        call, has_head = WHOLE[entry] if is_whole else (PARTS[entry], False)
        layers = range(LAYERS) if is_whole else [int(entry[-1])]
        seed = self.handle.seed if handle is not None else None
        within = within if handle is not None and (within != "replay" or seed is not None) else "nothing"
        acts = handle is not None and within != "disabled" and (within != "nothing" or (model.training and gradients))
        model.checkpoints, model.fails = checkpoints and gradients, fails and is_whole and ids % 5 == 0
        block = nullcontext() if within == "nothing" else getattr(handle, within)()
        if handle is not None:
            self.provider.asked.clear()
        try:
            with torch.set_grad_enabled(gradients), block:
                out = call(model, tokens)
        except NoAttentionError as error:
            assert self.replaced
            assert acts or gradients  # blocks that were replaced in training mode stay in it
            assert "replaced" in str(error)
            Machine.refused += 1
            return
        except ZeroDivisionError:
            assert fails
            return
        finally:
            is_checkpointed, model.checkpoints, model.fails = model.checkpoints, False, False
            if within != "nothing":
                self.happened = True
        asked = {} if handle is None else {layer: keep for layer, keep, _ in self.provider.asked}
        if acts and is_whole and not (entry == "method" and len(self.replaced) == LAYERS):  # then only `step` can tell
            assert not self.replaced, "a changed model was not noticed"
        if acts and not self.replaced:
            assert sorted(layer for layer, _, _ in self.provider.asked) == list(layers), "a pass was not noticed"
            Machine.masked += 1
        elif not acts:
            assert not asked, "masked, though it should not be"
        self.check_seeds(acts, within, seed, length, is_whole)
        with torch.set_grad_enabled(gradients):
            expected = model.embed(tokens)
            for layer in layers:
                expected = by_hand(model.blocks[layer], expected, asked.get(layer))
            expected = model.head(expected.mean(1)) if has_head else expected
        torch.testing.assert_close(out, expected)
        if gradients:
            parameters = list(model.parameters())
            wanted = torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True)
            self.waiting = [*self.waiting[-3:], (out.square().sum(), parameters, wanted, is_checkpointed and is_whole)]
            if len(self.waiting) == 1:
                self.happened = False

    @rule(ids=st.integers(0, 9999), length=st.integers(2, 6), entry=st.sampled_from([*WHOLE]))
    def train_on_the_whole(self, ids, length, entry):
        self.masked_pass(ids, length, entry)

    @rule(ids=st.integers(0, 9999), length=st.integers(2, 6), entry=st.sampled_from([*PARTS]))
    def train_on_a_part(self, ids, length, entry):
        self.masked_pass(ids, length, entry)

    @rule(ids=st.integers(0, 9999), length=st.integers(2, 6), entry=st.sampled_from([*WHOLE]))
    def train_with_checkpoints(self, ids, length, entry):
        self.masked_pass(ids, length, entry, checkpoints=True)

    @rule(ids=st.integers(0, 9999), entry=st.sampled_from([*WHOLE, *PARTS]), checkpoints=st.booleans())
    def train_and_go_back(self, ids, entry, checkpoints):
        self.masked_pass(ids, 4, entry, checkpoints=checkpoints)
        self.backward(last=True)

    def masked_pass(self, ids, length, entry, *, checkpoints=False):
        """Attach if the model is not attached as it is now, and run a training pass."""
        if self.replaced and self.handle is not None:
            self.detach(chance=0)
        if self.handle is None:
            self.attach()
        if not self.model.training:
            self.train(training=True)
        self.run(ids, length, entry, "nothing", gradients=True, checkpoints=checkpoints, fails=False)

    def check_seeds(self, acts, within, seed, length, is_whole):
        """One seed gives one mask, by whichever entry, and rates are those of the masks."""
        if not acts or not self.provider.asked:
            return
        seeds = {given for _, _, given in self.provider.asked}
        if within == "replay":
            assert seeds == {seed}
        if is_whole and within != "nothing":
            assert len(seeds) == 1
        assert self.handle.seed in seeds
        rates = self.handle.drop_rates()
        for layer, keep, given in self.provider.asked:
            before = self.masks.setdefault((given, layer, length), keep)
            assert torch.equal(keep, before), "two masks under one seed"
            if given == self.provider.asked[-1][2]:
                assert rates[f"encoder.{layer}"] == pytest.approx(1 - float(keep.float().mean()), abs=1e-6)

    @precondition(lambda self: self.waiting)
    @rule(last=st.booleans())
    def backward(self, last):
        loss, parameters, wanted, is_checkpointed = self.waiting.pop(-1 if last else 0)
        if self.handle is not None:
            self.provider.asked.clear()
        try:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:
            assert is_checkpointed
            assert self.happened, f"refused without a reason: {error}"
            assert str(error).startswith("Gradient checkpointing "), error
            Machine.refused += 1
            return
        for name, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert (a is None) == (b is None), name
            if a is not None:
                torch.testing.assert_close(a, b)


def drive(examples, steps):
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    Machine.steps = Machine.masked = Machine.refused = 0
    run_state_machine_as_test(Machine, settings=profile)
    return Machine


def test_some_steps_in_any_order():
    drive(5, 25)


@pytest.mark.slow
def test_ten_thousand_steps_in_any_order():
    driven = drive(250, 50)
    assert driven.steps >= 10_000
    assert driven.masked >= driven.steps / 4  # training passes that are compared with those by hand
    assert driven.refused > 0


def test_a_pass_that_is_not_noticed_is_found(monkeypatch):
    forward = AttachedModule.forward

    def blind(shadow, *args, **kwargs):  # to passes that begin at a part of the model
        if shadow.passes.latest.whole:
            return forward(shadow, *args, **kwargs)
        shadow.next()
        return shadow.plain(*args, **kwargs)

    monkeypatch.setattr(AttachedModule, "forward", blind)
    with pytest.raises(AssertionError, match="a pass was not noticed"):
        drive(50, 25)
    assert Machine.steps < 300
