"""``--score-on``: a language model on other text, before and after training."""

import json
import math

import pytest
import torch
import transformers as hf

from tests import task_data as made
from tests.commands import assert_sentence, ran, read_lines

TEXTS = ["the boy sleeps", "these robots see themselves", "the girls near the boy admire the robot"]
SMALL = ["--task", "agreement-completion", "--train-size", 16, "--validation-rows", 8, "--epochs", 1]


def slow_loss(folder):
    """Each text alone, token by token."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder).double().eval()
    tokenizer, losses = hf.AutoTokenizer.from_pretrained(folder), []
    for text in TEXTS:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-float(log_p[at, token]) for at, token in enumerate(ids[1:])]
    return sum(losses) / len(losses)


@pytest.fixture
def text(tmp_path, cli):
    """The other text, and a model to begin from in ``first/model``."""
    made.write_rows(tmp_path / "other.jsonl", [{"text": text} for text in TEXTS])
    ran(cli("recipe", "finetune", *SMALL, "--output-dir", "first"))
    return ["--model", "first/model", "--learning-rate", 0.01, "--score-on", "other.jsonl"]


def test_forgetting_is_the_rise_of_the_loss_per_token(text, cli, tmp_path, undrawn):
    done = ran(cli("recipe", "finetune", *SMALL, *text, "--output-dir", "out"))
    scores = json.loads((tmp_path / "out/result.json").read_text())["other_text"]
    for when, folder in (("before", "first/model"), ("after", "out/model")):
        assert scores[when]["loss"] == pytest.approx(slow_loss(tmp_path / folder), rel=1e-5)
        assert scores[when]["perplexity"] == pytest.approx(math.exp(scores[when]["loss"]))
    assert scores["forgetting"] == scores["after"]["loss"] - scores["before"]["loss"] != 0
    said = f"loss per token {scores['before']['loss']:.4f} before training, {scores['after']['loss']:.4f} after ("
    assert f"Forgetting on other.jsonl: {said}{scores['forgetting']:+.4f})" in " ".join(done.output.split())
    ran(cli("recipe", "finetune", *SMALL, *text[:-2], "--output-dir", "plain"))  # scoring changes nothing else
    one, other = (read_lines(tmp_path / folder / "metrics.jsonl") for folder in ("out", "plain"))
    assert one == other
    changed = tmp_path / "other.jsonl"
    changed.write_text(changed.read_text() * 2)
    again = cli("recipe", "finetune", *SMALL, *text, "--output-dir", "out", "--resume")
    assert_sentence(again, 1, "the text of --score-on")


@pytest.mark.slow
def test_a_comparison_shows_the_forgetting_of_each_method(text, cli, tmp_path):
    words = ["--folds", 2, "--epochs", 1, *text, "--seeds", 1, "--no-equal-time", "--output-dir", "both"]
    ran(cli("compare", "finetune", "few=finetune --epochs 2", *SMALL[:4], *words))
    report = (tmp_path / "both/report.md").read_text()
    header = next(line for line in report.splitlines() if "calibration error" in line)
    assert header.rstrip(" |").endswith("forgetting")
    for seed in (tmp_path / "both").rglob("result.json"):
        assert f"{json.loads(seed.read_text())['other_text']['forgetting']:+.4f}" in report


def test_what_has_no_score_before_training_is_refused(cli, tmp_path):
    made.write(tmp_path / "nli", train=8, validation=4)
    task = ["--task", "mnli", "--data-dir", "nli", "--model", "bert"]
    says = "--score-on needs a score before training, which only a pretrained --model for causal-lm has here"
    assert_sentence(cli("recipe", "finetune", *task, "--score-on", "x.jsonl"), 2, says)
    (tmp_path / "other.jsonl").write_text('{"words": "a"}\n')
    ran(cli("recipe", "finetune", *SMALL, "--output-dir", "first"))
    result = cli("recipe", "finetune", *SMALL, "--model", "first/model", "--score-on", "other.jsonl")
    assert_sentence(result, 1, "Cannot read --score-on other.jsonl: .*text")
