"""The model card of a run: its metadata as the hub reads it, and a command that repeats the run."""

import json
import shlex

import pytest
from huggingface_hub import ModelCard

import attnreg
from attnreg.experiments.runs.command import load_command
from tests.commands import ran, read_lines

TINY = ["--train-size", 32, "--batch-size", 8, "--epochs", 1, "--device", "cpu"]


def card_of(run):
    return ModelCard.load(run / "model" / "README.md", ignore_metadata_errors=False)


def command_in(card):
    return next(line for line in card.text.splitlines() if line.startswith("attnreg recipe "))


def test_a_card_has_what_the_run_has(cli, tmp_path):
    provider = "AttentionDropout(0.25, placement='scores') & DropHead(0.1)"
    args = ["recipe", "regularize", "--provider", provider, *TINY]
    args += ["--seed", 3, "--select", "best", "--stopping-rows", 8]
    ran(cli(*args, "--output-dir", "out"))
    card, result = card_of(tmp_path / "out"), json.loads((tmp_path / "out" / "result.json").read_text())
    assert (card.data.library_name, card.data.tags) == ("transformers", ["attnreg", "regularize"])
    assert (card.data.license, card.data.base_model) == (None, None)
    for text in (
        "- Base model: a tiny BERT with random weights",
        "- Task: agreement (classification)",
        "- Data: built in, 24 training rows",
        "- Regularizer: `AttentionDropout(p=0.25, placement='scores', rescale=True) & DropHead(p=0.1",
        "- Network: of epoch 1 of 1 (`--select best`)",
        f"- Version: attnreg {attnreg.__version__}, torch ",
        "Scores on dev rows",
        *(f"| {name} | {value:.4f} |" for name, value in result["dev"].items() if value is not None),
        "add its licence",
    ):
        assert text in card.text
    again = shlex.split(command_in(card))
    ran(cli(*again[1:], "--device", "cpu", "--output-dir", "again"))
    assert read_lines(tmp_path / "again" / "metrics.jsonl") == read_lines(tmp_path / "out" / "metrics.jsonl")


COMMANDS = [
    ["attendout", "--no-baseline", "--credit", "Reinforce(reward='gap')", "--epochs", "4"],
    ["ad-drop", "--regime", "paper", "--layers", "0,-1", "--q", "0.2"],
    ["finetune", "--class-weights", "balanced", "--lr-warmup", "0", "--model-dropout", "0"],
    ["probe", "--q", "0,0.5"],
    ["pretrain"],
    ["regularize", "--provider", "DropHead(0.1) & AttentionDropout(0.1, 'scores')", "--provider-lr", "0.5"],
    ["finetune", "--task", "custom", "--data-dir", "my data", "--text-columns", "a", "--text-columns", "b", "--label-column", "x"],
]  # fmt: skip


@pytest.mark.parametrize("args", COMMANDS, ids=lambda args: args[0])
def test_the_command_has_the_options_of_the_run(args):
    settings = load_command(args[0]).settings(args[1:])
    words = shlex.split(settings.command())
    assert words[:3] == ["attnreg", "recipe", args[0]]
    assert load_command(words[2]).settings(words[3:]).to_dict() == settings.to_dict()


def test_the_card_of_a_recipe_file_names_the_file(cli, tmp_path):
    ran(cli("copy", "finetune", "mine.py"))
    ran(cli("recipe", "mine.py", *TINY, "--output-dir", "out", "--validation-rows", 16))
    card = card_of(tmp_path / "out")
    assert "mine.py" in shlex.split(command_in(card))[2]
    assert "Scores on held-out rows:" in card.text
    assert "- Regularizer: none" in card.text
