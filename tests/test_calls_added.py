"""How many Python frames and C calls a mask adds to a layer of a forward pass."""

import sys

import pytest
import torch
import transformers as hf

import attnreg
from tests.helpers.cases import NO_DROPOUT, SMALL, TEXT

IDS = torch.randint(1, 40, (2, 8), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS).index_put((torch.tensor([1]), torch.tensor([7])), torch.tensor(0))
#: by name: the regularizer, and the most that it may add to a layer on a CPU
ADDED = {
    "scores": (lambda: attnreg.AttentionDropout(0.1, placement="scores"), 150),
    "weights": (lambda: attnreg.AttentionDropout(0.1), 150),
    "DropHead": (lambda: attnreg.DropHead(0.1), 150),
    "keys": (lambda: attnreg.DropKey(0.1, share_queries=True), 150),
    "DropHead & DropKey": (lambda: attnreg.DropHead(0.1) & attnreg.DropKey(0.1), 180),
    "and TokenDropout": (lambda: attnreg.DropHead(0.1) & attnreg.DropKey(0.1) & attnreg.TokenDropout(0.1), 210),
    "HiddenDropout": (lambda: attnreg.HiddenDropout(0.1), 150),
}


def calls(layers, make=None):
    """Count the calls of one training pass of a BERT."""
    config = hf.BertConfig(**{**TEXT, **SMALL, **NO_DROPOUT, "num_hidden_layers": layers})
    model, count = hf.BertModel(config, add_pooling_layer=False).train(), 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    handle = None if make is None else attnreg.attach(model, make())
    for _ in range(2):  # the first pass imports and fills caches
        model(input_ids=IDS, attention_mask=PADDED)
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        model(input_ids=IDS, attention_mask=PADDED)
    finally:
        sys.setprofile(before)
    if handle is not None:
        handle.detach()
    return count


@pytest.mark.parametrize("name", ADDED)
def test_a_mask_adds_few_calls_to_a_layer(name):
    make, most = ADDED[name]
    added = (calls(6, make) - calls(2, make) - calls(6) + calls(2)) / 4
    assert 0 < added <= most
