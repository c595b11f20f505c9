"""Names of 0.1.0 work with a warning that says what to write, or the changelog says where they went."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import attnreg
from attnreg.integrations import RegularizedTrainer
from attnreg.training import CrossEntropy, FineTuning, R3FLoss, RDropLoss
from tests.helpers.cases import MODELS
from tests.helpers.repository import ROOT
from tests.helpers.trainers import QUIET, Rows, arguments, bert

pytestmark = QUIET

MOVED = {
    "attnreg.integrations": ["ADDropTrainer", "Seq2SeqADDropTrainer", "RDropTrainer"],
    "attnreg.training": ["RDrop", "R3F", "TwoPass", "WeightedCrossEntropy"],
}
GONE = {
    "attnreg.training": ["named_optimizer"],
    "attnreg.functional": [
        "arm_gradient",
        "head_importance",
        "keep_at",
        "opposite_draws",
        "rescaled_heads",
        "window_mask",
        "without_top",
    ],
}


def old(package, name):
    return getattr(importlib.import_module(package), name)


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in MOVED for name in MOVED[package]])
def test_a_moved_name_is_there_but_not_listed(package, name):
    assert old(package, name).__doc__
    assert name not in importlib.import_module(package).__all__


def test_the_changelog_says_where_names_went():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = text[text.index("### Moving from 0.1.0") : text.index("## [0.1.0]")]
    for names in (*MOVED.values(), *GONE.values()):
        assert [name for name in names if f"`{name}" not in section] == []
    for package, names in GONE.items():
        assert not [name for name in names if hasattr(importlib.import_module(package), name)]


@pytest.mark.parametrize(
    ("name", "options", "objective"),
    [("RDrop", {"alpha": 0.5}, RDropLoss(0.5)), ("R3F", {"weight": 2.0, "eps": 0.1}, R3FLoss(2.0, 0.1))],
)
def test_a_method_steps_as_what_replaces_it(name, options, objective):
    case = next(case for case in MODELS if case.name == "bert")
    ends = []
    for make in (
        lambda model, optimizer, drop: old("attnreg.training", name)(model, optimizer, drop, **options),
        lambda model, optimizer, drop: FineTuning(model, optimizer, drop, objective=objective),
    ):
        model = case.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        if not ends:
            with pytest.warns(DeprecationWarning, match=f"{name} goes in 0.3: use FineTuning"):
                method = make(model, optimizer, attnreg.DropKey(0.2))
        else:
            method = make(model, optimizer, attnreg.DropKey(0.2))
        method.step({**case.batch(), "labels": torch.tensor([0, 1, 1])})
        ends.append(model.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(*map(dict.values, ends), strict=True))


def test_weights_of_classes_are_those_of_cross_entropy():
    logits, labels = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    with pytest.warns(DeprecationWarning, match="use CrossEntropy"):
        found = old("attnreg.training", "WeightedCrossEntropy")([0.5, 2.0])
    expected = CrossEntropy(torch.nn.Identity(), weights=[0.5, 2.0])
    outputs = SimpleNamespace(logits=logits)
    assert torch.equal(found(outputs, {"labels": labels}), expected(outputs, {"labels": labels}))


@pytest.mark.parametrize("name", MOVED["attnreg.integrations"])
def test_a_trainer_is_a_regularized_one(name, tmp_path):
    kind = hf.Seq2SeqTrainingArguments if "Seq2Seq" in name else hf.TrainingArguments
    options = {"alpha": 0.5} if name == "RDropTrainer" else {}
    with pytest.warns(DeprecationWarning, match=f"{name} goes in 0.3"):
        trainer = old("attnreg.integrations", name)(bert(), arguments(tmp_path, kind), train_dataset=Rows(), **options)
    assert isinstance(trainer, RegularizedTrainer)
    if options:
        assert trainer._objective.alpha == 0.5
    else:  # its default in 0.1.0
        settings, expected = (ad_drop.provider for ad_drop in (trainer.handle.provider, attnreg.ADDrop()))
        assert repr(settings) == repr(expected) == repr(attnreg.AttributionProvider())
