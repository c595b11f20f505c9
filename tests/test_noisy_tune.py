"""NoisyTune against its formula, and what it refuses."""

import copy
import json

import peft
import pytest
import torch
import transformers as hf
from torch import nn

from attnreg.experiments.tasks import get_task, load_model
from attnreg.training import noisy_tune
from tests.helpers import task_data as made
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.method_cases import bert


@torch.no_grad()
def test_the_noise_is_the_formula_matrix_by_matrix():
    model = bert()
    before = copy.deepcopy(model)
    torch.manual_seed(1)
    noisy_tune(model, 0.3)
    torch.manual_seed(1)
    for (name, new), old in zip(model.named_parameters(), before.parameters(), strict=True):
        uniform = torch.rand(old.shape, dtype=torch.float64)
        deviation = float(((old - old.mean()) ** 2).sum() / (old.numel() - 1)) ** 0.5
        torch.testing.assert_close(new, old + deviation * 0.3 * (uniform - 0.5), rtol=0, atol=1e-12)
        assert torch.equal(new, old) == (deviation == 0), name  # biases of 0 and LayerNorm's ones stay


def test_tied_single_and_half_precision_weights():
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, **sizes)).bfloat16()
    model.register_parameter("temperature", nn.Parameter(torch.ones(1)))
    old = model.transformer.wte.weight.clone()
    noisy_tune(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (model.lm_head.weight - old).abs().max() <= 0.15 / 2 * old.float().std() * 1.1
    assert model.temperature.item() == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def quantized():
    model = bert()
    model.classifier.weight = nn.Parameter(torch.ones(2, 16, dtype=torch.int8), requires_grad=False)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (quantized, r"noise to classifier.weight, which is quantized or has no values: load the model in float32"),
        (lambda: peft.get_peft_model(bert(), peft.LoraConfig(target_modules=["query"])), "below the adapters"),
        (lambda: nn.Linear(2, 2, device="meta"), "which is quantized or has no values"),
    ],
)
def test_what_it_cannot_change_is_refused(make, says):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says):
        noisy_tune(model)
    assert all(value.is_meta or torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("intensity", [-0.1, float("nan"), "much"])
def test_arguments_out_of_range(intensity):
    with pytest.raises(ValueError, match="Expected `intensity`"):
        noisy_tune(bert(), intensity)


def test_a_recipe_begins_with_it(cli, tmp_path, undrawn):
    made.tiny_bert(tmp_path / "bert")
    made.write(tmp_path / "nli", train=16, validation=8)
    common = ["--task", "mnli", "--data-dir", tmp_path / "nli", "--model", tmp_path / "bert", "--epochs", 1]
    options = [*common, "--learning-rate", 1e-9, "--noisy-tune", 0.5, "--output-dir", tmp_path / "run"]
    ran(cli("recipe", "finetune", *options))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["noisy_tune"] == 0.5
    plain, _ = load_model(get_task("mnli"), str(tmp_path / "bert"))
    noisy, _ = load_model(get_task("mnli"), str(tmp_path / "run" / "model"))
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    old, new = plain.get_parameter(name), noisy.get_parameter(name)
    assert (new - old).std().item() == pytest.approx(0.5 / 12**0.5 * old.std().item(), rel=0.1)
    assert_sentence(
        cli("recipe", "finetune", *common, "--noisy-tune", 0.5, "--lora-rank", 2), 2, "--noisy-tune exclude each other"
    )
