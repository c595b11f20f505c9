"""The doctor: each kind of fault is found, by the module's name, and none where there is none."""

import copy
import itertools
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from tests.helpers.cases import BERT, MODELS, SEQ2SEQ, SMALL, TEXT, keep_few_activations, sample
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.own_dropout_cases import SOUND, Drawing


class Awake(nn.Dropout):
    def train(self, mode=True):
        return super().train(True)


class Always(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.2)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x if self.training else x * self.calls


class Forgetful(nn.Module):
    """Draws other numbers when checkpointing repeats it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x):
        return (
            checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False) if self.training else self.inner(x)
        )


class Switching(nn.Module):
    """Computes something else while gradients are on, so that a reentrant checkpoint repeats another function."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def run(self, x):
        return self.inner(x) * (2 if torch.is_grad_enabled() else 1)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=True) if self.training else self.inner(x)


GENERATOR = torch.Generator()
OWN_GENERATOR = Drawing(lambda x: x * torch.rand(x.shape, generator=GENERATOR))
FAULTS = {
    "awake": (Awake(0.5), ["In training mode after `model.eval()`: 1", "Random in eval mode: 1"]),
    "always": (Always(), ["Random in eval mode: 1"]),
    "asleep": (nn.Dropout(0.3).eval(), ["In eval mode while the model trains, so that dropout does nothing: 1"]),
    "own generator": (OWN_GENERATOR, ["Two passes of one seed differ, first in 1"]),
    "python": (Drawing(lambda x: x * random.random()), ["Numbers come from Python's generator"]),
    "numpy": (Drawing(lambda x: x * float(np.random.rand())), ["Numbers come from numpy's generator"]),
    "counting": (Counting(), ["Two passes in eval mode differ, first in 1"]),
    "forgetful": (Forgetful(), ["Gradient checkpointing draws other numbers when it repeats 1.inner.1"]),
    "switching": (Switching(), ["Gradient checkpointing changes the gradients of 0."]),
    "frozen": (nn.BatchNorm1d(4).requires_grad_(False), ["Frozen, but running statistics move in training mode: 1"]),
}
X = {"input": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))}


def around(part):
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(part), nn.Linear(4, 2)).train()
    model[1].train(part.training)
    return model


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(name):
    part, says = FAULTS[name]
    found = attnreg.doctor(around(part), X).faults
    assert len(found) == len(says)
    assert all(sentence.startswith(start) for sentence, start in zip(found, says, strict=True)), found


def test_all_faults_of_one_model_are_found():
    model = nn.Sequential(nn.Linear(4, 4), *(copy.deepcopy(part) for part, _ in FAULTS.values())).train()
    for child, (part, _) in zip(model[1:], FAULTS.values(), strict=True):
        child.train(part.training)
    found = " ".join(attnreg.doctor(model, X).faults)
    for says in ("after `model.eval()`", "Random in eval mode", "does nothing", "of one seed differ", "Python's and numpy's generator", "Gradient checkpointing", "running statistics"):  # fmt: skip
        assert says in found, says


CHANGES = ("plain", "attached", "checkpointed", "reentrant")


@pytest.mark.parametrize(
    ("case", "change"),
    sample(
        itertools.product(MODELS, CHANGES),
        lambda case, change: change == "attached" or (case is BERT and change != "reentrant"),
    ),
    ids=str,
)
def test_clean_models_have_no_fault(case, change):
    model = case.build().train()
    repeats = change in ("checkpointed", "reentrant")
    if repeats:
        if not getattr(model, "supports_gradient_checkpointing", False):
            pytest.skip("has no gradient checkpointing")
        keep_few_activations(model, {"use_reentrant": change == "reentrant"})
    if change == "attached":
        attnreg.attach(model, attnreg.DropHead(0.3))
    report = attnreg.doctor(model)
    assert report.faults == [], report
    assert "No fault was found." in report
    assert ("draws (gradient checkpointing" in report) == repeats


def test_gradients_that_a_checkpoint_loses_are_a_fault():
    model = MODELS[0].build().train()
    model.bert.embeddings.requires_grad_(False)
    keep_few_activations(model, {"use_reentrant": True})
    model.disable_input_require_grads()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        (found,) = attnreg.doctor(model).faults
    assert found.startswith("Gradient checkpointing changes the gradients of bert.encoder.layer.0")
    model.enable_input_require_grads()
    assert attnreg.doctor(model).faults == []


def test_only_checkpoints_are_blamed_for_what_they_do():
    model = around(Forgetful()).train()
    model[1].forward = lambda x: checkpoint(model[1].inner[0], x, use_reentrant=False)
    assert attnreg.doctor(model, X).faults == []
    model.append(copy.deepcopy(OWN_GENERATOR))  # outside the checkpoint, so that any two passes differ
    report = attnreg.doctor(model, {"input": X["input"]})
    (found,) = report.faults
    assert found.startswith("Two passes of one seed differ, first in 3")
    assert "from those without gradient checkpointing" not in report


def test_sparse_gradients_under_checkpointing():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), Forgetful()).train()
    model[1].forward = lambda x: checkpoint(model[1].inner[0], x, use_reentrant=False)
    assert attnreg.doctor(model, {"input": torch.ones(2, 3, dtype=torch.long)}).faults == []


def test_the_table():
    model = around(nn.Sequential(nn.Dropout(0.25), nn.BatchNorm1d(4), Always()))
    model[1].append(nn.Dropout(0.4))
    model[1].forward = lambda x: model[1][2](model[1][1](model[1][0](x)))
    rows = {row[0]: row[1:] for row in attnreg.doctor(model, X).rows}
    assert rows == {
        "module": ("draws", "rate", "in"),
        "1.0": ("bernoulli_", "0.25", "train"),
        "1.1": ("nothing; statistics of the batch", "", "train"),
        "1.2": ("bernoulli_", "0.2", "train, eval"),
        "1.3": ("nothing in these passes", "0.4", ""),
    }


def test_seeded_draws_are_in_the_table():
    model = MODELS[0].build()
    handle = attnreg.seeded(model)
    report = attnreg.doctor(model)
    assert report.faults == []
    rows = {row[0]: row[1:] for row in report.rows[1:]}
    assert rows["bert.embeddings"] == ("from the seed of the pass", "0.1", "train")
    model(**MODELS[0].batch())
    drawn = {name if name in dict(model.named_modules()) else "the model" for name in handle.own_draws}
    assert rows.keys() == drawn
    assert rows["the model"] == ("randint, from the seed of the pass", "0.1", "train")  # the seed is drawn there


def test_the_gap_between_the_modes():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double().train()
    x = torch.randn(6, 4, dtype=torch.float64)
    report = attnreg.doctor(model, {"input": x})
    torch.manual_seed(0)
    gap = (model(x).log_softmax(-1) - model.eval()(x).log_softmax(-1)).abs()
    most, mean = gap.max().item(), gap.mean().item()
    assert f"differ by {most:.2g} at most between training and eval mode, and by {mean:.2g}" in report


def test_what_is_refused():
    with pytest.raises(ValueError, match="Expected a model or a Trainer, got str"):
        attnreg.doctor("bert")
    with pytest.raises(ValueError, match="Cannot make inputs for Linear: pass `inputs`"):
        attnreg.doctor(nn.Linear(2, 2))
    classifier = hf.GPT2ForSequenceClassification(hf.GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2))
    says = r"Cannot make inputs for GPT2For.* \(ValueError: .* padding token is defined\.\): pass `inputs`"
    with pytest.raises(ValueError, match=says):
        attnreg.doctor(classifier)


HEADS = {
    "choices": lambda: hf.BertForMultipleChoice(hf.BertConfig(**TEXT, **SMALL)),
    "end": lambda: hf.BartForSequenceClassification(hf.BartConfig(**SEQ2SEQ)),
    "image": lambda: hf.CLIPModel(
        hf.CLIPConfig(text_config={**TEXT, **SMALL}, vision_config={**SMALL, "image_size": 8, "patch_size": 4})
    ),
}


@pytest.mark.parametrize("needs", HEADS)
def test_heads_that_need_more_than_tokens_get_it(needs):
    assert attnreg.doctor(HEADS[needs]()).faults == []


def test_a_trainer(tmp_path):
    model = MODELS[0].build()
    trainer = hf.Trainer(model, hf.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert attnreg.doctor(trainer).faults == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by torch itself
def test_compiled():
    report = attnreg.doctor(MODELS[0].build().train(), compiled=True)
    assert "Compiled and eager outputs in eval mode differ by" in report


def test_the_command(cli, tmp_path):
    MODELS[0].build().save_pretrained(tmp_path / "model")
    assert "No fault was found." in ran(cli("doctor", tmp_path / "model")).output
    sound = hf.Wav2Vec2Config(**SOUND, mask_time_prob=0.5, mask_time_length=2)  # SpecAugment draws from numpy
    hf.Wav2Vec2ForCTC(sound).save_pretrained(tmp_path / "sound")
    done = cli("doctor", tmp_path / "sound")
    assert done.exit_code == 1
    assert FAULTS["numpy"][1][0] in done.output
    assert_sentence(cli("doctor", tmp_path / "other"), 1, "No model .*other: there is no such folder")
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert_sentence(
        cli("doctor", tmp_path / "run"), 1, "Expected MODEL to be .* got .*run, the folder of a run: give .*run.model"
    )
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "architectures": ["BertConfig"]}))
    assert "No fault was found." in ran(cli("doctor", tmp_path / "model")).output
    config.write_text(json.dumps({**content, "vocab_size": 2}))
    assert_sentence(cli("doctor", tmp_path / "model"), 1, "Cannot load a model of transformers from .*: RuntimeError")
    (tmp_path / "model/model.safetensors").write_bytes(b"damaged")
    assert_sentence(cli("doctor", tmp_path / "model"), 1, "Cannot load a model of transformers from")
