"""A copy of a part of an attached model is plain; one of the whole is attached to a copy of the regularizer."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import attnreg
from attnreg.injection.attachment import handles
from tests.helpers.models import small


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("again", [copy.deepcopy, pickled, saved])
def test_a_copy_of_a_part_is_plain(again):
    model, x = small(), torch.randn(2, 5, 16)
    of_plain = len(pickle.dumps(model.encoder.layer[1]))
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(1.0) & attnreg.HiddenDropout(0.5))
    block, encoder = again(model.encoder.layer[1]), again(model.encoder)
    assert not attnreg.is_attached(block)
    with handle.disabled():
        expected = model.encoder.layer[1](x)
        assert torch.equal(encoder(x)[0], model.encoder(x)[0])
    assert torch.equal(block(x), expected)
    assert not any(held is handle.provider or isinstance(held, nn.Module) for held in vars(block).values())
    assert len(pickle.dumps(model.encoder.layer[1])) < 1.2 * of_plain
    handle.detach()
    assert torch.equal(block(x), expected)
    with attnreg.attach(copy.deepcopy(model), attnreg.AttentionLayerDrop(1.0)) as other:
        assert len(other.sites) == 3


class Holder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.last, self.model = model.encoder.layer[2], model


WHOLES = {
    # what is copied, made of a model and its handle; the model in the copy
    "model": (lambda model, handle: model, lambda copied: copied),
    "holder": (lambda model, handle: Holder(model), lambda copied: copied.model),  # in which a part comes first
    "handle": (lambda model, handle: handle, lambda copied: copied._passes.model),
    "pair": (lambda model, handle: (handle, model), lambda copied: copied[1]),
}


@pytest.mark.parametrize("again", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize(("whole", "model_of"), WHOLES.values(), ids=WHOLES)
def test_a_copy_of_the_whole_is_attached_to_a_copy(whole, model_of, again):
    model = small()
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(1.0) & attnreg.HiddenDropout(0.5))
    copied = model_of(again(whole(model, handle)))
    (other,) = handles(copied)
    assert other is not handle
    assert copied is not model
    for _ in range(2):
        copied(input_ids=torch.arange(12).view(2, 6))
        rates = {name: rate for name, rate in other.drop_rates().items() if "output" not in name}
        assert rates == {f"encoder.{layer}": 1.0 for layer in range(3)}
    assert handle.drop_rates() == {}
    again(other).detach()
    other.detach()
    assert not attnreg.is_attached(copied)
    assert not any("forward" in vars(module) for module in copied.modules())
    assert attnreg.is_attached(model)
