"""A model on another device, such as a GPU: no tensor of the CPU meets one of it, and the host waits for none of them.

The meta device stands for it, on which both raise.
"""

from contextlib import nullcontext

import pytest
import torch
import transformers as hf

import attnreg
from attnreg.draws import Drawn
from attnreg.injection.running.rates import DropRates
from attnreg.masks import Mask
from tests.helpers.provider_cases import CASES, MATRIX

ELSEWHERE = torch.device("meta")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
PASSES = 2


@pytest.mark.parametrize("case", [case for case in CASES if case.role == MATRIX], ids=str)
def test_passes_on_another_device_mix_no_devices_and_read_no_values(case, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda device, **_: nullcontext())  # which the meta device does not have
    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=20, intermediate_size=16, attention_dropout=0.1, **SIZES)
    model, ids = hf.LlamaForCausalLM(config), torch.randint(3, 20, (2, 6))
    provider = case.make(model)
    handle = attnreg.attach(model, provider, own_dropout="seeded")
    for number in range(1 + PASSES):
        batch = {"input_ids": ids, "labels": ids}
        provider.attribute(model, batch)
        model(**batch).loss.backward()
        if number == 0:  # a first pass may look at its batch
            handle.step()
            ids = ids.to(ELSEWHERE)
            for module in (model, provider):
                module.to(ELSEWHERE)
    assert all(parameter.grad.device == ELSEWHERE for parameter in model.parameters())


@pytest.mark.parametrize("drawn", [False, True])
def test_a_decision_about_a_layer_is_read_on_the_cpu_wherever_the_layer_is(drawn):
    valid = torch.ones(1, 1, 1, 4, dtype=torch.bool, device=ELSEWHERE)
    site = attnreg.AttentionSite(layer=0, shape=(2, 2, 4, 4), valid=valid, device=ELSEWHERE)
    mask = Mask(scores=torch.tensor(False))
    if drawn:
        mask = mask & Mask(drawn=(Drawn(1, 0.5, site.shape, ELSEWHERE),))
    rates = DropRates()
    rates.note_mask(site, mask, quiet=True)
    rates.count()
    assert rates.latest["encoder.0"].device == ELSEWHERE
