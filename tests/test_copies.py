"""A copy of a part of an attached model is plain; one of the whole is attached to a copy of the regularizer."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import attnreg
from attnreg.injection.attachment import handles
from tests.test_after_attach import IDS, small


def test_a_copy_of_a_part_is_plain():
    model = small()
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(1.0) & attnreg.HiddenDropout(0.5))
    block = copy.deepcopy(model.encoder.layer[1])
    assert not attnreg.is_attached(block)
    x = torch.randn(2, 5, 16)
    with handle.disabled():
        expected = model.encoder.layer[1](x)
    assert torch.equal(block(x), expected)
    assert not any(held is handle.provider or isinstance(held, nn.Module) for held in vars(block).values())
    encoder = copy.deepcopy(model.encoder)
    with handle.disabled():
        assert torch.equal(encoder(x)[0], model.encoder(x)[0])
    handle.detach()
    assert torch.equal(block(x), expected)
    with attnreg.attach(copy.deepcopy(model), attnreg.AttentionLayerDrop(1.0)) as other:
        assert len(other.sites) == 3


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [pickled, saved])
def test_a_pickled_part_is_plain_and_a_pickled_model_attached(again):
    model, x = small(), torch.randn(2, 5, 16)
    of_plain = len(pickle.dumps(model.encoder.layer[1]))
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(1.0) & attnreg.HiddenDropout(0.5))
    with handle.disabled():
        expected = model.encoder.layer[1](x)
    block = again(model.encoder.layer[1])
    assert not attnreg.is_attached(block)
    assert torch.equal(block(x), expected)
    assert len(pickle.dumps(model.encoder.layer[1])) < 1.2 * of_plain
    for whole, copied in ((again(model), lambda each: each), (again(handle), lambda each: each._passes.model)):
        (other,) = handles(copied(whole))
        assert other is not handle
        for _ in range(2):
            copied(whole)(input_ids=IDS)
            assert {name: rate for name, rate in other.drop_rates().items() if "output" not in name} == {
                f"encoder.{layer}": 1.0 for layer in range(3)
            }
        assert handle.drop_rates() == {}
        again(other).detach()
        other.detach()
        assert not attnreg.is_attached(copied(whole))
        assert not any("forward" in vars(module) for module in copied(whole).modules())


class Holder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.last, self.model = model.encoder.layer[2], model


@pytest.mark.parametrize("what", ["model", "holder", "handle", "pair"])
def test_a_copy_of_the_whole_is_attached_to_a_copy(what):
    model = small()
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(1.0))
    if what == "model":
        copied = copy.deepcopy(model)
    elif what == "holder":  # in which a part comes first
        copied = copy.deepcopy(Holder(model)).model
    elif what == "handle":
        copied = copy.deepcopy(handle)._passes.model
    else:
        _, copied = copy.deepcopy((handle, model))
    (other,) = handles(copied)
    assert other is not handle
    assert copied is not model
    copied(input_ids=IDS)
    assert other.drop_rates() == {f"encoder.{layer}": 1.0 for layer in range(3)}
    assert handle.drop_rates() == {}
    other.detach()
    assert not attnreg.is_attached(copied)
    assert not any("forward" in vars(module) for module in copied.modules())
    assert attnreg.is_attached(model)
