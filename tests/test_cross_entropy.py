"""Smoothed labels and weights of classes: the formulas, and that runs train with them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from attnreg.errors import InputError
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.runs.run import Run
from attnreg.training import CrossEntropy, FineTuning, balanced_weights
from tests.helpers import task_data as made
from tests.helpers.cases import refused
from tests.helpers.commands import assert_sentence, ran, read_lines
from tests.helpers.method_cases import BATCH, IDS, PADDED, assert_parts_are_the_whole, bert, sgd

PROMPTS = torch.tensor([3, 2, 0, 4, 1, 2, 5, 6])  # tokens of each row's prompt; the last two rows are all prompt
LABELS = IDS.masked_fill((torch.arange(6) < PROMPTS[:, None]) | ~PADDED, -100)
SHORT = ["--epochs", 1, "--train-size", 16, "--device", "cpu"]
CAUSAL = {"input_ids": IDS, "attention_mask": PADDED.long(), "labels": LABELS}


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=8, max_position_embeddings=8)).double()


def term(logits, label, smoothing):
    log_p = [each - math.log(sum(map(math.exp, logits))) for each in logits]
    return -(1 - smoothing) * log_p[label] - smoothing * sum(log_p) / len(log_p)


@pytest.mark.parametrize(("smoothing", "prompt"), [(0.0, 0.3), (0.2, 0.0), (0.1, 1.5)])
def test_a_causal_model_predicts_the_next_token_of_prompts_and_completions(smoothing, prompt):
    model = llama()
    outputs = model(**CAUSAL)
    total, labels = 0.0, 0
    for row, logits in enumerate(outputs.logits[:6].tolist()):
        for token in range(1, int(PADDED[row].sum())):
            is_prompt = token < PROMPTS[row]
            labels += not is_prompt
            loss = term(logits[token - 1], int(IDS[row, token]), smoothing)
            total += loss * (prompt if is_prompt else 1.0)
    got = CrossEntropy(model, smoothing, prompt)(outputs, CAUSAL)
    assert got.item() == pytest.approx(total / labels, abs=1e-12)


@pytest.mark.parametrize("head", [hf.BertForSequenceClassification, hf.BertForTokenClassification])
def test_other_models_have_a_label_where_they_predict_it(head):
    model = bert(head, 0.0, num_labels=3)
    labels = IDS[:, 0] % 3 if head is hf.BertForSequenceClassification else (IDS % 3).masked_fill(~PADDED, -100)
    batch = {**BATCH, "labels": labels}
    outputs = model(**batch)
    assert CrossEntropy(model)(outputs, batch).item() == pytest.approx(outputs.loss.item(), abs=1e-12)
    terms = [
        term(logits, label, 0.2)
        for logits, label in zip(outputs.logits.flatten(0, -2).tolist(), labels.flatten().tolist(), strict=True)
        if label != -100
    ]
    assert CrossEntropy(model, 0.2)(outputs, batch).item() == pytest.approx(sum(terms) / len(terms), abs=1e-12)


def test_without_arguments_it_is_the_models_own_loss():
    model = llama()
    outputs = model(**CAUSAL)
    assert CrossEntropy(model)(outputs, CAUSAL).item() == pytest.approx(outputs.loss.item(), rel=1e-6)  # float32
    no_mask = {"input_ids": IDS, "labels": LABELS}
    everything = {**CAUSAL, "attention_mask": torch.ones_like(IDS)}
    losses = [CrossEntropy(model, prompt=0.5)(outputs, batch).item() for batch in (no_mask, everything)]
    assert losses[0] == losses[1]


def test_micro_batches_add_up_to_their_batch():
    def build(model, **options):
        return FineTuning(model, sgd(model), loss_function=CrossEntropy(model, 0.1, 0.5), **options)

    assert_parts_are_the_whole(llama, build, CAUSAL, 3)


def of(logits, labels):
    """The loss of some logits and labels."""
    return CrossEntropy(bert(), 0.1)(SimpleNamespace(logits=logits), {"labels": labels})


test_what_has_no_classes_or_no_prompt_is_refused = refused(
    (lambda: CrossEntropy(bert(), prompt=0.1), "Only causal language models have a `prompt` to weigh, and Bert"),
    (lambda: CrossEntropy(llama(), smoothing=1.0), "Expected `smoothing`"),
    (lambda: CrossEntropy(llama(), prompt=-1.0), "Expected `prompt`"),
    (lambda: of(torch.zeros(2, 1), torch.zeros(2)), "CrossEntropy needs labels that are classes"),
    (lambda: of(torch.zeros(2, 3), torch.zeros(2, 3)), "CrossEntropy needs labels that are classes"),
    (lambda: CrossEntropy(bert(), 0.1)(SimpleNamespace(), BATCH), "CrossEntropy needs `logits` in the output, but SimpleNamespace"),
    (lambda: CrossEntropy(llama(), prompt=0.5)(SimpleNamespace(logits=torch.zeros(8, 6, 20)), {"labels": LABELS}), "needs `input_ids`"),
)  # fmt: skip


def test_runs_train_with_it(cli, tmp_path, undrawn):
    made.tiny_bert(tmp_path / "bert")
    made.write(tmp_path / "nli", train=16, validation=8)
    (tmp_path / "scores").mkdir()
    nli = ["--task", "mnli", "--data-dir", tmp_path / "nli", "--model", tmp_path / "bert", "--epochs", 1]
    losses = []
    for number, options in enumerate(([], ["--label-smoothing", 0.5])):
        ran(cli("recipe", "finetune", *nli, "--learning-rate", 0.05, *options, "--output-dir", tmp_path / str(number)))
        losses.append(read_lines(tmp_path / str(number) / "metrics.jsonl")[-1]["loss"])
    assert losses[0] != losses[1]
    ran(cli("recipe", "finetune", "--task", "agreement-completion", *SHORT, "--prompt-weight", 0.5))
    refused = cli("recipe", "finetune", *nli, "--prompt-weight", 0.5)
    assert_sentence(refused, 2, "--prompt-weight is for causal-lm, but mnli is a")
    refused = cli("recipe", "finetune", *nli, "--class-weights", "balanced", "--label-smoothing", 0.1)
    assert_sentence(refused, 2, "--class-weights and --label-smoothing both change the training loss: remove one")
    for split in ("train", "validation"):
        made.write_rows(tmp_path / "scores" / f"{split}.jsonl", [{"text": "one", "label": n / 8} for n in range(8)])
    scores = ["--task", "custom", "--kind", "regression", "--text-columns", "text", "--data-dir", tmp_path / "scores"]
    refused = cli("recipe", "finetune", *scores, "--model", tmp_path / "bert", "--label-smoothing", 0.1)
    assert_sentence(
        refused, 2, "--label-smoothing is for classes and tokens, but custom is a regression task: remove it"
    )


OPTIONS = ["--epochs", 1, "--batch-size", 8, "--device", "cpu", "--output-dir", "out"]
CUSTOM = ["--task", "custom", "--data-dir", "data", "--model", "bert", "--text-columns", "text", "--max-length", 16]


@pytest.fixture
def home(tmp_path):
    """A folder with a model and rows of three classes, of which the second is rare."""
    made.tiny_bert(tmp_path / "bert")
    (tmp_path / "data").mkdir()
    labels = [0] * 20 + [1] * 2 + [2] * 10
    rows = [{"text": f"the {made.WORDS[label]}", "label": label} for label in labels]
    made.write_rows(tmp_path / "data" / "train.jsonl", rows)
    made.write_rows(tmp_path / "data" / "validation.jsonl", rows[18:24])
    return tmp_path


def test_weights_are_scikit_learns():
    labels = [0, 2, 2, 1, 0, 0, 0, 2]
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert balanced_weights(labels, 3) == pytest.approx(expected)
    assert sum(balanced_weights(labels, 3)[label] for label in labels) == pytest.approx(len(labels))


def test_weights_of_a_tensor_and_of_other_labels():
    assert balanced_weights(torch.tensor([0, 0, 0, 1]), 2) == balanced_weights([0, 0, 0, 1], 2)
    assert balanced_weights([0, 0, -100, 1, -100], 2) == balanced_weights([0, 0, 1], 2)
    with pytest.raises(InputError, match="Expected class numbers from 0 to 1, got 2"):
        balanced_weights([0, 1, 2], 2)


def test_the_loss_is_the_mean_of_weighted_rows():
    logits = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.tensor([0, 1, 1, 2, 0]), [0.5, 3.0, 1.0]
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        total -= weights[label] * math.log(math.exp(row[label]) / sum(map(math.exp, row)))
    loss_function = CrossEntropy(nn.Identity(), weights=weights)
    got = loss_function(SimpleNamespace(logits=logits), {"labels": labels})
    assert got.item() == pytest.approx(total / 5, abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: loss_function(SimpleNamespace(logits=x), {"labels": labels}), (logits,))
    half = SimpleNamespace(logits=logits.bfloat16())
    assert loss_function(half, {"labels": labels}).dtype == torch.float32


@pytest.mark.parametrize(
    "recipe", [["finetune"], ["r-drop"], ["mixout"], ["attendout", "--no-baseline", "--reward-data", "train"]]
)
def test_a_run_trains_with_weights_of_the_rows_it_trains_on(cli, home, monkeypatch, recipe):
    seen = []
    call = CrossEntropy.__call__
    monkeypatch.setattr(CrossEntropy, "__call__", lambda own, *args: seen.append(own) or call(own, *args))
    ran(cli("recipe", *recipe, *CUSTOM, *OPTIONS, "--class-weights", "balanced"))
    assert len(set(seen)) == 1
    assert seen[0].weights == pytest.approx([32 / 60, 32 / 6, 32 / 30])


def test_the_training_loss_is_weighted_and_that_of_evaluations_is_not(cli, home):
    args = ["recipe", "finetune", *CUSTOM, *OPTIONS[:-2], "--learning-rate", 1e-12]
    ran(cli(*args, "--output-dir", "plain"))
    ran(cli(*args, "--output-dir", "weighted", "--class-weights", "balanced"))
    plain, weighted = (read_lines(home / name / "metrics.jsonl")[-1] for name in ("plain", "weighted"))
    assert plain["loss"] == pytest.approx(weighted["loss"], abs=1e-6)
    plain, weighted = (read_lines(home / name / "telemetry.jsonl")[-1] for name in ("plain", "weighted"))
    assert abs(plain["loss"] - weighted["loss"]) > 1e-3


def test_rows_held_out_do_not_count(home, monkeypatch):
    monkeypatch.chdir(home)
    words = [*CUSTOM, *OPTIONS, "--class-weights", "balanced", "--patience", 1, "--stopping-rows", 8]
    run = Run(load_command("finetune").settings([str(word) for word in words]))
    labels = run.train_rows["labels"][:]
    assert len(labels) == 24
    assert run.loss_function.weights == balanced_weights(labels, 3)


@pytest.mark.parametrize("task", ["agreement-words", "stsb", "swag"])
def test_tasks_without_classes_of_rows_are_refused(cli, tmp_path, task):
    recipe = "pretrain" if task == "agreement-words" else "finetune"
    makers = {"stsb": made.similarity, "swag": made.endings}
    given = []
    if task in makers:
        made.tiny_bert(tmp_path / "bert")
        made.write(tmp_path / "data", maker=makers[task])
        given = ["--data-dir", "data", "--model", "bert", "--max-length", 16]
    result = cli("recipe", recipe, "--task", task, *given, "--class-weights", "balanced")
    assert_sentence(result, 2, f"--class-weights is for classification, but {task} is a .* task: remove it")


RECIPE = '''
import attnreg
from attnreg.experiments import recipe

@recipe("odd")
def odd(run):
    """Train by a method or a loss that knows no weights."""
    {body}
'''
BODIES = {
    "run.train(loss_function=lambda outputs, batch: outputs.loss)": "Recipe odd has its own loss",
    "run.fit(attnreg.training.FineTuning(run.model, run.optimizer(run.model), accelerator=run.accelerator))": (
        "Expected FineTuning to be made with loss_function=run.loss_function"
    ),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_recipe_that_would_ignore_them_is_refused(cli, tmp_path, body):
    (tmp_path / "odd.py").write_text(RECIPE.format(body=body))
    result = cli("recipe", "odd.py", "--train-size", 32, *OPTIONS, "--class-weights", "balanced")
    assert_sentence(result, result.exit_code, BODIES[body])
    assert result.exit_code in (1, 2)
    assert not (tmp_path / "out").exists()
