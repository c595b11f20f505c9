"""Loops of one's own: each call of the table in docs/trainer.md that a loop leaves out is told, or raises."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import attnreg
from attnreg.errors import AsleepWarning
from tests.helpers.trainers import Rows, bert

PAGE = (Path(__file__).parents[1] / "docs" / "trainer.md").read_text(encoding="utf-8")
EPOCHS = 4  # of four batches: more than `patience` training passes


def priced():
    return attnreg.ConcreteDropout(2, 0.2)


# What a loop leaves out of the calls in the table, with a regularizer that needs it; and what it is told.
LEFT_OUT = {
    "handle.step()": (lambda: attnreg.Scheduled(attnreg.DropKey(), 9, p=[(0, 0.3), (1, 0)]), "has not moved in 12 training passes: call `handle.step()`"),
    "provider.on_epoch(epoch)": (lambda: attnreg.CrossTuning(attnreg.DropKey(0.3)), "was never told the epoch: call `provider.on_epoch("),
    "provider.attribute(model, batch)": (attnreg.AttributionProvider, "needs `provider.attribute(model, batch)` before each training step"),
    "provider.penalty()": (lambda: attnreg.AttentionEntropy(0.1), "Nobody has added the penalty of AttentionEntropy to the loss in 12 training passes"),
    "provider.learned_parameters()": (priced, "have gradients, but have not changed in 12 training passes. Add them to the optimizer"),
}  # fmt: skip
NOT_OF_A_STEP = {  # the model's attachment, and what only some loops have
    "attnreg.attach(model, provider)", "provider.to(device)", "provider.save_pretrained(folder)", "handle.detach()",
}  # fmt: skip


def test_every_call_of_the_page_is_left_out_here():
    [table] = re.findall(r"^\| call \|.*?\n\n", PAGE, re.M | re.S)
    calls = {call for row in table.strip().splitlines()[2:] for call in re.findall(r"`([^`]+\))`", row.split("|")[1])}
    assert calls == {*LEFT_OUT, *NOT_OF_A_STEP}


def in_a_loop(provider, without):
    """A plain loop, with all calls but one."""
    model = bert()
    handle = attnreg.attach(model, provider)
    learned = [] if without == "provider.learned_parameters()" else provider.learned_parameters()
    optimizer = torch.optim.SGD([*model.parameters(), *learned], lr=1e-3)
    for epoch in range(EPOCHS):
        if without != "provider.on_epoch(epoch)":
            provider.on_epoch(epoch)
        model.train()
        for batch in DataLoader(Rows(), batch_size=4):
            if without != "provider.attribute(model, batch)" and handle.active:
                provider.attribute(model, batch)
            loss = model(**batch).loss
            if without != "provider.penalty()" and (penalty := provider.penalty()) is not None:
                loss = loss + penalty
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if without != "handle.step()":
                handle.step()


@pytest.mark.parametrize("call", LEFT_OUT)
@pytest.mark.usefixtures("patience")
def test_what_a_loop_leaves_out_is_told(call):
    make, says = LEFT_OUT[call]
    told = []
    for without in (None, call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AsleepWarning)
            try:
                in_a_loop(make(), without)
            except RuntimeError as error:
                told.append([str(error)])
            else:
                told.append([str(each.message) for each in caught if each.category is AsleepWarning])
    assert told[0] == []
    assert len(told[1]) == 1
    assert says in told[1][0]
