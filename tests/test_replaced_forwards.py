"""Mixout and LoRA Dropout replace the forward of linear layers: how they draw, and that nothing of them stays behind."""

import copy
import functools
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.bert.modeling_bert import BertLayer

import attnreg
from attnreg.training import LoRADropout, Mixout
from tests.helpers.method_cases import bert, moved, sgd
from tests.helpers.models import adapted
from tests.helpers.objectives import BATCH
from tests.helpers.passes import Traces

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks


def mixed(model):
    method = Mixout(model, sgd(model), p=0.5)
    moved(model)
    return method


def dropped(model):
    return LoRADropout(model, 0.5, 0.25)


cases = pytest.mark.parametrize(("make", "replace"), [(bert, mixed), (adapted, dropped)], ids=["Mixout", "LoRADropout"])


def run(model):
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**BATCH).loss
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


@cases
def test_copies_and_gradient_checkpointing_draw_the_same(make, replace):
    model = make().train()
    replaced = replace(model)
    attnreg.attach(model, attnreg.DropKey(0.3))
    expected = run(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(clone), expected)
    for block in model.modules():
        if isinstance(block, BertLayer):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    assert torch.equal(run(model), expected)
    replaced.detach()
    assert not torch.equal(run(model), expected)


@cases
def test_the_model_in_eval_mode_and_detached_is_plain(make, replace):
    model = make().eval()
    before, replaced, random = Traces(model), replace(model), torch.get_rng_state()
    plain, now = model(**BATCH).logits, Traces(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert (now.keys, now.parameters) == (before.keys, before.parameters)
    replaced.detach()
    replaced.detach()
    assert torch.equal(model(**BATCH).logits, plain)
    assert vars(Traces(model)) == vars(before)
