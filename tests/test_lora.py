"""LoRA on the command line: what trains, what is saved, who loads it, and what is refused."""

import json
import re
import shutil
import signal
import sys

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from attnreg.errors import InputError
from attnreg.experiments.tasks import get_task, load_model
from attnreg.experiments.tasks.models.lora import parameter_counts, with_lora
from attnreg.experiments.tasks.models.pretrained import load_pretrained
from tests.helpers import task_data as made
from tests.helpers.commands import assert_sentence, invoke, ran, read_lines, result_of
from tests.helpers.method_cases import same
from tests.helpers.recipe_cases import evaluated_again
from tests.helpers.runs import assert_goes_on

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks
SMALL = ["--device", "cpu", "--epochs", 2, "--batch-size", 16, "--learning-rate", 1e-2, "--max-length", 32]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Tiny models and made-up data."""
    root = tmp_path_factory.mktemp("lora")
    made.tiny_bert(root / "bert")
    torch.manual_seed(0)
    model, tokenizer = load_model(get_task("agreement-completion"))
    model.save_pretrained(root / "gpt2")
    tokenizer.save_pretrained(root / "gpt2")
    made.write(root / "nli", train=32, validation=16)
    made.write(root / "ner", train=32, validation=16, maker=made.entities)
    made.write(root / "swag", train=32, validation=16, maker=made.endings)
    return root


def finetune(places, task="mnli", folder="nli", model="bert"):
    return [*("--task", task, "--data-dir", places / folder, "--model", places / model), *SMALL]


def trained_names(model):
    names = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {re.sub(r"^base_model\.model\.|\.modules_to_save|\.default", "", name) for name in names}


def test_only_adapters_and_new_modules_train(places):
    task = get_task("rte")
    model, _, new, _ = load_pretrained(task, str(places / "bert"))
    assert new == {"classifier.weight", "classifier.bias"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = with_lora(model, "AutoModelForSequenceClassification", new, rank=3)
    layers = [f"bert.encoder.layer.{i}.attention.self.{name}" for i in (0, 1) for name in ("query", "value")]
    expected = {f"{layer}.lora_{side}.weight" for layer in layers for side in "AB"}
    assert trained_names(adapted) == expected | {"classifier.weight", "classifier.bias"}
    counts = parameter_counts(adapted)
    assert counts["trained"] == 4 * 2 * 3 * 32 + 2 * 32 + 2
    assert counts["all"] == sum(value.numel() for value in before.values()) + 4 * 2 * 3 * 32
    assert adapted.peft_config["default"].lora_alpha == 3
    ids = torch.tensor([[2, 5, 6, 3]])
    whole, _ = load_model(task, str(places / "bert"))
    whole.load_state_dict(before)
    assert torch.equal(adapted.eval()(input_ids=ids).logits, whole.eval()(input_ids=ids).logits)  # B is zero


def test_a_new_pooler_trains_too(tmp_path):
    tokenizer = made.word_pieces(made.TEXTS, 200)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    hf.BertForMaskedLM(hf.BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _, new, _ = load_pretrained(get_task("rte"), str(tmp_path))
    adapted = with_lora(model, "AutoModelForSequenceClassification", new, rank=1)
    assert {"bert.pooler.dense.weight", "classifier.weight"} <= trained_names(adapted)


@pytest.fixture(scope="module")
def finished(places, tmp_path_factory):
    """A run with AD-DROP and LoRA."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = ran(invoke("recipe", "ad-drop", *finetune(places), "--lora-rank", 2, "--output-dir", folder))
    assert "LoRA trains 611 of " in done.output
    return folder


def test_the_run_says_what_trains_and_saves_the_adapter(finished, places):
    config = json.loads((finished / "config.json").read_text())
    assert config["parameters"]["trained"] == 4 * 2 * 2 * 32 + 3 * 32 + 3
    assert config["parameters"] == result_of(finished)["parameters"]
    share = config["parameters"]["trained"] / config["parameters"]["all"]
    sentence = f"({share:.2%}): adapters of rank 2 of query, value in 4 modules, and classifier."
    assert sentence in (finished / "report.md").read_text()
    saved = load_file(finished / "model" / "adapter_model.safetensors")
    assert len(saved) == 8 + 2
    assert all(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)
    assert not list(finished.glob("model/model*.safetensors"))
    adapter = json.loads((finished / "model" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(places / "bert")
    assert adapter["task_type"] == "SEQ_CLS"


def test_peft_loads_the_adapter_on_the_plain_model(finished, places):
    base = hf.AutoModelForSequenceClassification.from_pretrained(places / "bert", num_labels=3)
    model = peft.PeftModel.from_pretrained(base, finished / "model").eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(finished / "model")
    rows = read_lines(places / "nli" / "validation.jsonl")
    for row, record in zip(rows, read_lines(finished / "predictions.jsonl"), strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(row["premise"], row["hypothesis"], return_tensors="pt")).logits[0]
        assert logits.tolist() == pytest.approx(record["logits"], abs=1e-5)


def test_other_commands_read_the_adapter(cli, finished, places, undrawn):
    written, dev = evaluated_again(cli, finished, "--data-dir", places / "nli")
    assert written["metrics"]["accuracy"] == dev["accuracy"]
    assert "attention.png" in ran(cli("plot", finished)).output
    again = cli("recipe", "finetune", *finetune(places, model=finished / "model"), "--output-dir", "again")
    for used in (again, cli("doctor", finished / "model")):
        assert_sentence(used, 1, r"holds an adapter, not a whole model: merge it \(`merge_and_unload` of peft\)")


def test_an_adapter_without_its_model(cli, finished, places, tmp_path):
    shutil.copytree(finished, tmp_path / "moved")
    path = tmp_path / "moved" / "model" / "adapter_config.json"
    path.write_text(path.read_text().replace(str(places / "bert"), "/nowhere/bert"))
    failed = cli("evaluate", "moved", "--data-dir", places / "nli")
    assert_sentence(failed, 1, "Cannot load the model that the adapter in .* belongs to: .*/nowhere/bert' .no such folder")  # fmt: skip


CASES = {
    "decoder": ("finetune", ["--task", "agreement-completion", "--train-size", 32, "--validation-rows", 16], "gpt2"),
    "words": ("regularize", ["--task", "conll2003", "--provider", "DropHead(0.2)"], "ner"),
    "choices": ("r-drop", ["--task", "swag"], "swag"),
    "game": ("attendout", ["--task", "mnli", "--no-baseline", "--round-steps", 1], "nli"),
}


@pytest.mark.parametrize("case", ["game", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "game")])  # fmt: skip
def test_a_resumed_run_ends_as_an_unbroken_one(cli, tmp_path, places, case, monkeypatch):
    recipe, options, folder = CASES[case]
    is_built_in = folder == "gpt2"
    data = [] if is_built_in else ["--data-dir", places / folder]
    data += ["--model", places / ("gpt2" if is_built_in else "bert")]
    args = ["recipe", recipe, *options, *data, *SMALL, "--lora-rank", 2, "--lora-targets", "all-linear"]
    args += ["--lora-dropout", 0.1, "--select", "best", "--keep-checkpoints", "--output-dir"]
    ran(cli(*args, "whole"))
    assert_goes_on(cli, monkeypatch, [*args, "out"], 3, tmp_path / "whole", signal.SIGTERM)
    one, other = (load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("whole", "out"))
    assert same(one, other)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--lora-alpha", 2], 2, "--lora-alpha needs --lora-rank"),
        (["--lora-targets", "query"], 2, "--lora-targets needs --lora-rank"),
        (["--lora-rank", 2, "--lora-targets", "querry"], 1, r"such as .*query, value, or all-linear, got querry\. Did you mean query"),
        (["--lora-rank", 2, "--lora-targets", "query,nothing"], 1, "to be linear layers of the model, .* got nothing"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_sentence(cli, places, tmp_path, options, code, says):
    assert_sentence(cli("recipe", "finetune", *finetune(places), *options, "--output-dir", "out"), code, says)
    assert not (tmp_path / "out").exists()


def test_what_lora_cannot_do_is_one_sentence(cli, places, monkeypatch):
    lora = ["--lora-rank", 2, "--output-dir", "out"]
    result = cli("recipe", "mixout", *finetune(places), *lora)
    assert_sentence(result, 2, "which LoRA does not train: remove --lora-rank")
    result = cli("recipe", "finetune", *lora)
    assert_sentence(result, 1, "adapts a pretrained model, but the task's model has random weights")
    model, _, new, _ = load_pretrained(get_task("rte"), str(places / "bert"))
    monkeypatch.setattr(hf.BertConfig, "model_type", "unheard-of")
    with pytest.raises(
        InputError, match=r"Expected --lora-targets .*query.* got none, and peft has no default for BertFor"
    ):
        with_lora(model, "AutoModelForSequenceClassification", new, rank=2)
    monkeypatch.setitem(sys.modules, "peft", None)
    result = cli("recipe", "finetune", *finetune(places), *lora)
    assert_sentence(result, 1, r"LoRA needs peft, which cannot be imported \(.*\): install attnreg\[lora\]")
