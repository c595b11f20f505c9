"""Nothing sleeps unnoticed: one warning where a regularizer cannot act as it should."""

import functools
import re
import warnings

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.errors import AsleepWarning
from attnreg.integrations import AttnRegCallback
from attnreg.regularizer.abilities import PATIENCE, asleep_for
from attnreg.training import FineTuning
from tests.helpers.cases import BERT
from tests.helpers.regularizers import Costly
from tests.helpers.trainers import Rows, arguments


def train(model, steps, *, after=lambda: None):
    """Warnings of so many training passes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(**BERT.batch()).logits.sum().backward()
            after()
    return [str(each.message) for each in caught if each.category is AsleepWarning]


def test_cross_tuning_without_an_epoch():
    model = BERT.build()
    handle = attnreg.attach(model, attnreg.CrossTuning(attnreg.AttentionLayerDrop(0.5)))
    (message,) = train(model, 3)
    assert message.startswith(
        "CrossTuning does not alternate, because it does not know the epoch: call `provider.on_epoch("
    )
    handle.detach()
    provider = attnreg.AttentionDropout(0.1) & attnreg.CrossTuning(attnreg.AttentionLayerDrop(0.5))
    provider.on_epoch(0)
    attnreg.attach(model, provider)
    assert train(model, 3) == []
    attnreg.detach(model)
    restored = attnreg.CrossTuning(attnreg.AttentionLayerDrop(0.5))
    restored.load_state_dict(provider.providers[1].state_dict())  # the epoch may come from a checkpoint
    attnreg.attach(model, restored)
    assert train(model, 1) == []


@pytest.mark.parametrize(
    ("make", "moves"),
    [
        (lambda: attnreg.BernoulliScheduleProvider([(0, 0.1), (1, 0.0)], 10), True),
        pytest.param(
            lambda: attnreg.Scheduled(attnreg.DropHead(), 10, p=[(0, 0.2), (1, 0)]), True, marks=pytest.mark.slow
        ),
        (lambda: attnreg.BernoulliScheduleProvider([(0, 0.1)], 10), False),
        pytest.param(lambda: attnreg.DropHead(0.2), False, marks=pytest.mark.slow),
    ],
)
def test_a_schedule_that_nobody_steps(make, moves, patience):
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    x = torch.randn(1, 3, 8)
    for stepped in (False, True):
        with attnreg.attach(model, make()) as handle, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(2 * patience):
                model(x)
                if stepped and number % 8 == 7:  # gradients are added up over eight
                    handle.step()
        messages = [str(each.message) for each in caught]
        assert len(messages) == int(moves and not stepped)
        assert all("has not moved in 12 training passes: call `handle.step()`" in message for message in messages)


def test_layers_with_constant_rates_of_their_own_are_no_schedule():
    assert attnreg.BernoulliScheduleProvider([[(0, 0.1)], [(0, 0.2)]], 10).why_asleep(2 * PATIENCE) is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
def test_what_is_learned_in_no_optimizer(kind, patience):
    model = BERT.build()
    provider = attnreg.ConcreteDropout.for_model(model, 0.1)
    for held in (False, True):
        parameters = [*model.parameters(), *(provider.learned_parameters() if held else [])]
        optimizer = kind(parameters, lr=1e-3)
        with attnreg.attach(model, provider) as handle:
            messages = train(model, 1, after=provider.penalty)
            messages += train(model, patience + 5, after=optimizer.step)
            assert handle.provider.logits.grad is not None
        assert len(messages) == int(not held)
        assert all("have not changed in 12 training passes" in message for message in messages)


def test_what_is_frozen_at_first_is_not_said_to_stand_still(patience):
    model = BERT.build()
    provider = attnreg.ConcreteDropout.for_model(model, 0.1)
    optimizer = torch.optim.SGD([*model.parameters(), *provider.learned_parameters()], lr=1e-3)
    with attnreg.attach(model, provider):
        provider.requires_grad_(False)
        messages = train(model, 1)
        provider.requires_grad_(True)
        provider.penalty()
        assert not [*messages, *train(model, patience + 5, after=optimizer.step)]


def test_a_generator_that_nobody_trains(patience):
    model = BERT.build()
    for known in (False, "learns", "loaded", "frozen"):
        net = attnreg.GNetProvider.for_model(model)
        if known == "learns":
            net.sample(BERT.batch())
            net.prepare(BERT.batch())
        elif known == "loaded":
            net.load_state_dict(attnreg.GNetProvider.for_model(model).state_dict())
        elif known == "frozen":
            net.requires_grad_(False)
        with attnreg.attach(model, net):
            messages = train(model, patience + 5)
        assert [message[:28] for message in messages] == ["GNetProvider has not learned"] * (not known)


@pytest.mark.parametrize("make", [lambda: attnreg.AttentionEntropy(0.1), Costly, lambda: attnreg.CrossTuning(attnreg.DropHead(0.1) & Costly(), offset=0)])  # fmt: skip
def test_a_penalty_that_nobody_adds(make, patience):
    model = BERT.build()
    for added in (False, True):
        with attnreg.attach(model, make()) as handle:
            handle.provider.on_epoch(0)
            [*messages] = train(model, 2 * patience, after=handle.provider.penalty if added else lambda: None)
        assert len(messages) == int(not added)
        assert all("added the penalty of" in message and "in 12 training passes" in message for message in messages)


def test_fine_tuning_refuses_an_optimizer_without_what_is_learned():
    model = BERT.build()
    provider = attnreg.ConcreteDropout.for_model(model, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"The optimizer does not hold 1 parameters that ConcreteDropout learns. Call"):
        FineTuning(model, optimizer, provider)
    optimizer.add_param_group({"params": provider.learned_parameters()})
    attnreg.detach(model)
    FineTuning(model, optimizer, provider)


def test_too_few_epochs():
    provider = attnreg.CrossTuning(attnreg.AttentionLayerDrop(0.5), every=3, offset=2)
    assert asleep_for(provider, 2).startswith(
        "CrossTuning first acts in epoch 3, but training ends after epoch 2: train for longer"
    )
    assert asleep_for(attnreg.AttentionDropout(0.1) & provider, 1)
    assert asleep_for(provider, 3) is None


def trainer(tmp_path, handle, model, **options):
    return hf.Trainer(
        model,
        arguments(tmp_path, num_train_epochs=1),
        train_dataset=Rows(2),
        callbacks=[AttnRegCallback(handle)],
        **options,
    )


def test_in_the_trainer(tmp_path):
    model = BERT.build()
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(0.5))
    with pytest.warns(AsleepWarning, match=r"is not the model that AttentionLayerDrop is attached to \(`model_init`"):
        trainer(tmp_path, handle, None, model_init=BERT.build).train()
    with pytest.warns(AsleepWarning, match="is not the model that AttentionLayerDrop is attached to"):
        trainer(tmp_path, handle, BERT.build()).train()
    trainer(tmp_path, handle, model).train()
    handle.detach()
    with pytest.warns(AsleepWarning, match="The handle of AttnRegCallback is detached"):
        trainer(tmp_path, handle, model).train()
    handle = attnreg.attach(model, attnreg.CrossTuning(attnreg.AttentionLayerDrop(0.5)))
    with pytest.warns(AsleepWarning, match="CrossTuning first acts in epoch 2, but training ends after epoch 1"):
        trainer(tmp_path, handle, model).train()


def test_a_report_says_what_was_dropped_and_what_the_model_drops_itself():
    model = BERT.build()
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.2
    provider = attnreg.AttentionLayerDrop(1.0)
    with attnreg.attach(model, provider) as handle:
        assert "none yet" in handle.report()
        model(**BERT.batch())
        handle.provider.p = 0.0
        for _ in range(3):
            model(**BERT.batch())
        lines = handle.report().splitlines()
        assert lines[0].split() == ["site", "drop", "rate", "module"]
        assert lines[1].split() == ["encoder.0", "0.250", "bert.encoder.layer.0.attention.self"]
        assert len(lines) == 3


def test_a_masked_part_in_eval_mode_within_a_model_that_trains():
    model = BERT.build()
    handle = attnreg.attach(model, attnreg.DropHead(0.5))
    model.bert.eval()
    for _ in range(PATIENCE - 1):
        one_pass(model, handle)
        handle.step()
    one_pass(model, handle)
    with pytest.warns(AsleepWarning, match=r"no training pass in 100 optimizer steps. The model is in eval mode"):
        handle.step()


def one_pass(model, handle):
    model(**BERT.batch())


def without_gradients(model, handle):
    with torch.no_grad():
        model(**BERT.batch())


CAUSES = {
    "": one_pass,
    "The model is in eval mode: call `model.train()`.": lambda model, handle: one_pass(model.eval(), handle),
    "The latest forward pass had no gradients: call the model outside `torch.no_grad()`.": without_gradients,
    "The regularizer is in eval mode: call `provider.train()`.": lambda model, handle: handle.provider.eval(),
    "CrossTuning does not act in this epoch: see `provider.on_epoch`.": lambda model, handle: handle.provider.on_epoch(0),
    "The regularizer is detached.": lambda model, handle: handle.detach(),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_the_report_and_the_warning_name_the_cause(cause):
    model = BERT.build()
    handle = attnreg.attach(model, attnreg.CrossTuning(attnreg.DropHead(0.5)))
    handle.provider.on_epoch(1)
    CAUSES[cause](model, handle)
    assert ("none yet" in handle.report()) == bool(cause)
    assert [*handle.report().notes] == [cause] * bool(cause)
    with handle.disabled():
        assert [*handle.report().notes] in ([], [cause], ["Masks are off within `handle.disabled()`."])
    for _ in range(PATIENCE - 1):
        handle.step()
    says = f"{type(model).__name__} had no training pass in 100 optimizer steps. {cause or 'Attach to the model'}"
    with pytest.warns(AsleepWarning, match=re.escape(says)):
        handle.step()
    for _ in range(PATIENCE + 1):
        handle.step()  # it is said once
    handle.detach()
    assert handle.report().endswith("The regularizer is detached.")
