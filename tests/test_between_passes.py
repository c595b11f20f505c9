"""What happens between a forward pass and its backward pass, in which gradient checkpointing repeats the masks."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from tests.helpers import handwritten
from tests.helpers.passes import Recomputing

IDS = torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS}


class Block(nn.Module):
    """A checkpoint around an attention."""

    def __init__(self, attention, reentrant, keeps_state):
        super().__init__()
        self.attention, self.given = attention, {"use_reentrant": reentrant, "preserve_rng_state": keeps_state}

    def forward(self, *args):
        return checkpoint(self.attention, *args, **self.given)


def checkpointed(reentrant, keeps_state=True):
    torch.manual_seed(0)
    model = handwritten.Layers(handwritten.plain).double().train()
    if reentrant is not None:
        model.layers = nn.ModuleList(Block(layer, reentrant, keeps_state) for layer in model.layers)
    return model


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def expected(provider, forward=nullcontext):
    model = checkpointed(None)
    with attnreg.attach(model, provider, example_inputs=INPUTS) as handle:
        torch.manual_seed(1)
        with forward(handle):
            loss = model(IDS).pow(2).sum()
        loss.backward()
    return gradients(model)


@pytest.mark.parametrize("keeps_state", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("forward", [lambda handle: nullcontext(), lambda handle: handle.disabled()])
@pytest.mark.parametrize("backward", [lambda handle: nullcontext(), lambda handle: handle.disabled()])
def test_a_repetition_is_masked_if_and_only_if_the_first_was(forward, backward, reentrant, keeps_state):
    model = checkpointed(reentrant, keeps_state)
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS) as handle:
        torch.manual_seed(1)
        with forward(handle):
            loss = model(IDS).pow(2).sum()
        with backward(handle):
            loss.backward()
    assert torch.allclose(gradients(model), expected(attnreg.AttentionDropout(0.5), forward))


CHANGED = "epoch or step, or the training mode, have changed"
CHANGES = {
    "eval": (lambda model, handle: model.eval(), "or the training mode, have changed since the forward pass"),
    "provider.eval": (lambda model, handle: handle.provider.eval(), "have changed since the forward pass"),
    "epoch": (lambda model, handle: handle.provider.on_epoch(2), "because its settings, epoch or step, or"),
    "rate": (lambda model, handle: setattr(handle.provider.provider, "p", 0.1), "because its settings, epoch or step, or"),
    "step": (lambda model, handle: handle.step(), CHANGED),
    "step and pass": (lambda model, handle: (handle.step(), model(IDS)), CHANGED),
    "step and eval": (lambda model, handle: (handle.step(), model.eval()), CHANGED),
    "detach": (lambda model, handle: handle.detach(), "waits for its backward pass"),
    "leave": (lambda model, handle: handle.__exit__(None, None, None), "waits for its backward pass"),
}  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_a_repetition_cannot_undo_is_refused(change, reentrant):
    model = checkpointed(reentrant)
    provider = attnreg.CrossTuning(attnreg.AttentionDropout(0.5))
    provider.on_epoch(1)
    handle = attnreg.attach(model, provider, example_inputs=INPUTS)
    torch.manual_seed(1)
    loss = model(IDS).pow(2).sum()
    act, message = CHANGES[change]
    with pytest.raises(RuntimeError, match=message):  # noqa: PT012 (either)
        act(model, handle)
        loss.backward()
    if change in ("detach", "leave"):
        loss.backward()  # nothing has changed
        assert torch.allclose(gradients(model), expected(attnreg.AttentionDropout(0.5)))
        handle.detach()


def test_a_part_that_was_called_alone_is_not_what_is_repeated():
    model = checkpointed(False)
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS):
        for block in (model.layers[1], model.layers[0]):  # the second leaves torch's generator as it found it
            block.attention(model.embeddings(IDS), None)
        loss = model(IDS).pow(2).sum()
        loss.backward()  # was refused: the same state of the generator, and two seeds


def test_detaching_after_a_step_waits_for_the_backward_pass_too():
    model = checkpointed(False)
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS)
    loss = model(IDS).sum()
    handle.step()
    with pytest.raises(RuntimeError, match="waits for its backward pass"):
        handle.detach()
    del loss
    handle.detach()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_loss_that_is_deleted_waits_for_nothing(reentrant):
    model = checkpointed(reentrant)
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS):
        loss = model(IDS).sum()
        del loss
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS)
    kept = model(IDS).sum()
    handle.__exit__(KeyError, KeyError(), None)  # an error in the block is not hidden by another
    assert not attnreg.is_attached(model)
    del kept


@pytest.mark.parametrize("reentrant", [True, False])
def test_attaching_before_the_backward_pass_is_refused(reentrant):
    model = checkpointed(reentrant)
    loss = model(IDS).pow(2).sum()
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS)
    with pytest.raises(RuntimeError, match="its forward pass was before `attach`, or"):
        loss.backward()
    handle.detach()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_forward_pass_in_a_hook_of_a_backward_pass_is_a_new_one(reentrant):
    model = checkpointed(reentrant)
    seeds, outs = [], []
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS) as handle:

        def another(gradient):
            with torch.enable_grad():
                outs.append(model(IDS).detach())
            seeds.append(handle.seed)

        torch.manual_seed(1)
        out = model(IDS)
        seeds.append(handle.seed)
        out.register_hook(another)
        out.pow(2).sum().backward()
        with torch.no_grad(), handle.replay(seeds[1]):
            assert torch.allclose(model(IDS), outs[0])
    assert seeds[0] != seeds[1]
    assert torch.allclose(gradients(model), expected(attnreg.AttentionDropout(0.5)))


@pytest.mark.parametrize("enabled", [True, False])
def test_parts_in_reentrant_checkpoints_are_plain_or_refused(enabled):
    model = checkpointed(None)
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS) as handle:
        x = model.embeddings(IDS)
        with nullcontext() if enabled else handle.disabled():
            for layer in model.layers:
                x = checkpoint(layer, x, None, use_reentrant=True)
        if enabled:
            with pytest.raises(RuntimeError, match="cannot mask a forward pass that repeats one without gradients"):
                x.sum().backward()
        else:
            x.sum().backward()


def test_a_checkpoint_of_another_library_is_refused():
    model = checkpointed(None)
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=INPUTS) as handle:
        plain = model.layers[1].forward
        model.layers[1].forward = lambda x, *args: Recomputing.apply(lambda x: plain(x, *args), x)
        with pytest.raises(RuntimeError, match=r"layers.1 runs in an autograd.Function \(Recomputing.forward\)"):
            model(IDS)
        with handle.disabled():
            model(IDS).sum().backward()
            loss = model(IDS).sum()
        with pytest.raises(RuntimeError, match="it is not known whether it was masked: its forward pass was before"):
            loss.backward()
