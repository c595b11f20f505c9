"""Runs in two processes reproduce those in one with the same global batch; methods do in test_method_contract.py."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from attnreg.experiments.tasks import get_task, load_model
from tests.helpers.commands import assert_close, assert_sentence, read_lines

CPU = ["--device", "cpu"]
RECIPES = {"ad-drop": ["--q", 1], "attendout": ["--round-steps", 2, "--no-baseline"]}


def launched(*words):
    """The command that runs python with some words in two processes."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--rdzv-backend", "c10d"]
    return [sys.executable, *map(str, [*launcher, "--rdzv-endpoint", "localhost:0", *words])]


def start(folder, *words):
    """Run it to its end."""
    done = subprocess.run(launched(*words), cwd=folder, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def recipe(name, *args):
    name, own = ("finetune" if name == "accumulated" else name), RECIPES.get(name, [])
    return ["-m", "attnreg", "recipe", name, *own, *args, *CPU]


def stop(folder, *words):
    """Stop what runs in two processes after its first step; gives what it printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(launched(*words, "--output-dir", "part"), cwd=folder, text=True, **pipes) as running:
        while running.poll() is None and not (folder / "part" / "telemetry.jsonl").is_file():
            time.sleep(0.02)
        running.terminate()  # torchrun hands it on
        return running.communicate(timeout=100)[0]


def assert_same_records(one, two):
    for file in ("telemetry.jsonl", "metrics.jsonl", "predictions.jsonl"):
        assert_close(read_lines(one / file), read_lines(two / file))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The embedded task's model without dropout, and nothing is left to chance."""
    folder = tmp_path_factory.mktemp("model")
    network, tokenizer = load_model(get_task("agreement"))
    config = network.config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    hf.set_seed(0)
    hf.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulated", "ad-drop"])
def test_a_recipe_in_two_processes_is_the_recipe_in_one(warm, tmp_path, model, name):
    args = ["--model", model, "--epochs", 2, "--train-size", 256, "--learning-rate", 1e-3]
    for processes in (1, 2):
        words = recipe(name, *args, "--output-dir", f"out{processes}")
        if name == "accumulated" and processes == 2:
            words += ["--gradient-accumulation", 2]  # each process takes its half of a batch in two parts
        code, output = warm.run(*words, cwd=tmp_path, timeout=200, processes=processes)
        assert code == 0, output
    one, two = (tmp_path / f"out{processes}" for processes in (1, 2))
    for file in ("telemetry.jsonl", "metrics.jsonl", "predictions.jsonl"):
        mine, theirs = read_lines(one / file), read_lines(two / file)
        # Each process takes the share of its own units, so the mean of both is not quite the share of all.
        rates = [[record.pop("drop_rate", {}) for record in records] for records in (mine, theirs)]
        assert_close(mine, theirs)
        assert_close(*rates, within=0.02)
    assert json.loads((two / "result.json").read_text())["environment"]["processes"] == 2


@pytest.mark.slow
def test_attendout_with_chance_is_stopped_and_goes_on_in_two_processes(warm, tmp_path):
    # The last batch of an epoch cannot be halved.
    words = recipe("attendout", "--epochs", 4, "--train-size", 200, "--game", 1)
    code, output = start(tmp_path, *words, "--output-dir", "whole")
    assert code == 0, output
    assert output.count("Results saved to whole") == 1  # one process speaks
    output = stop(tmp_path, *words)
    assert output.count("Error: Stopped by SIGTERM after step") == 1, output
    assert "To continue: with the same launcher, attnreg recipe attendout" in output
    again = [*words, "--output-dir", "part", "--resume"]
    code, output = warm.run(*again, cwd=tmp_path, timeout=200)
    assert code == 1
    assert "Error: The checkpoint in part/checkpoints was written by 2 processes and cannot be resumed by 1" in output
    code, output = start(tmp_path, *again)
    assert code == 0, output
    assert_same_records(tmp_path / "part", tmp_path / "whole")


SHARDED = Path(__file__).with_name("fsdp_on_cpus.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("finetune", ["--gradient-accumulation", 2]),
        ("ad-drop", []),
        ("regularize", ["--provider", "AttentionDropout(0.2) & LayerDrop(0.3)"]),
        ("attention-dropout", []),
        ("attention-layerdrop", []),
        ("scheduled-bernoulli", []),
    ],
)
def test_fsdp2_is_data_parallelism(warm, tmp_path, name, own):
    args = ["recipe", name, *own, "--epochs", 2, "--train-size", 256, "--learning-rate", 1e-3, "--select", "best", *CPU]
    for words, folder in ((["-m", "attnreg"], "copied"), ([SHARDED], "sharded")):
        code, output = warm.run(*words, *args, "--output-dir", folder, cwd=tmp_path, timeout=200, processes=2)
        assert code == 0, output
    one, two = (tmp_path / folder for folder in ("copied", "sharded"))
    assert_same_records(one, two)
    weights, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert weights.keys() == theirs.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, theirs[key], rtol=0, atol=1e-5)
    trained, _ = load_model(get_task("agreement"), str(two / "model"))
    assert type(trained) is hf.BertForSequenceClassification


@pytest.mark.slow
def test_fsdp2_is_stopped_and_goes_on(tmp_path):
    words = [SHARDED, "recipe", "ad-drop", "--epochs", 4, "--train-size", 200, *CPU]
    code, output = start(tmp_path, *words, "--output-dir", "whole")
    assert code == 0, output
    stop(tmp_path, *words)
    assert not (tmp_path / "part" / "result.json").exists()
    code, output = start(tmp_path, *words, "--output-dir", "part", "--resume")
    assert code == 0, output
    assert_same_records(tmp_path / "part", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["attendout", "--ema", 0.9, "--mixed-precision", "bf16"], "not for --mixed-precision, --ema, recipe attendout."),
        (["finetune", "--task", "agreement-completion", "--wise-ft", 0.5], "not for --wise-ft, a task whose answers are"),
        (["regularize", "--provider", "ConcreteDropout()"], "ConcreteDropout learns parameters, which accelerate does not"),
    ],
)  # fmt: skip
def test_what_fsdp2_would_get_wrong_is_refused(tmp_path, words, what):
    code, output = start(tmp_path, SHARDED, "recipe", *words, *CPU, "--epochs", 1, "--output-dir", "out")
    assert code == 1
    assert what in output, output[-3000:]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "named"), [("FSDP", "FSDP1, or FSDP2 on CPUs,"), ("DEEPSPEED", "DEEPSPEED")])
def test_a_sharded_model_is_refused(cli, tmp_path, monkeypatch, name, named):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    says = f"Recipes do not support {named}, because they copy and inspect whole models. Use data parallelism"
    assert_sentence(cli("recipe", "finetune"), 1, says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared(tmp_path):
    code, output = start(tmp_path, *recipe("attendout", "--epochs", 1, "--batch-size", 33, "--output-dir", "odd"))
    assert code == 1
    assert "--batch-size, which counts the rows of all 2 processes, to be a multiple of 2, got 33" in output
    assert not (tmp_path / "odd").exists()
