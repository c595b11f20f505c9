"""Smoothed labels and weighted prompts: the formula, position by position, and that a run trains with them."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

from attnreg.training import CrossEntropy, FineTuning, RDrop
from tests import task_data as made
from tests.commands import assert_sentence, ran, read_lines
from tests.method_cases import BATCH, IDS, PADDED, bert, sgd, weights

PROMPTS = torch.tensor([3, 2, 1, 4, 1, 2, 0, 2])  # tokens of each row's prompt
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
    for row, logits in enumerate(outputs.logits.tolist()):
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
    ends = []
    for parts in (1, 3):
        model = llama()
        FineTuning(model, sgd(model), loss_function=CrossEntropy(model, 0.1, 0.5), micro_batches=parts).step(CAUSAL)
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_it_trains_in_an_objective():
    model = bert(num_labels=2)
    assert RDrop(model, sgd(model), loss_function=CrossEntropy(model, 0.1)).step(BATCH).loss.isfinite()


def test_what_has_no_classes_or_no_prompt_is_refused():
    with pytest.raises(ValueError, match="Only causal language models have a `prompt` to weigh; Bert"):
        CrossEntropy(bert(), prompt=0.1)
    for wrong in ({"smoothing": 1.0}, {"prompt": -1.0}):
        with pytest.raises(ValueError, match=f"Expected `{next(iter(wrong))}`"):
            CrossEntropy(llama(), **wrong)
    loss_function = CrossEntropy(bert(), 0.1)
    for logits, labels in ((torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(2, 3), torch.zeros(2, 3))):
        with pytest.raises(ValueError, match="CrossEntropy needs labels that are classes"):
            loss_function(SimpleNamespace(logits=logits), {"labels": labels})
    with pytest.raises(ValueError, match="CrossEntropy needs `logits` in the output, SimpleNamespace"):
        loss_function(SimpleNamespace(), BATCH)
    model = llama()
    embedded = {"inputs_embeds": nn.Embedding(20, 8).double()(IDS), "labels": LABELS}
    outputs = model(**embedded)
    with pytest.raises(ValueError, match="needs `input_ids`"):
        CrossEntropy(model, prompt=0.5)(outputs, embedded)


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
    assert_sentence(refused, 2, "Each of --class-weights, --label-smoothing changes the training loss")
    for split in ("train", "validation"):
        made.write_rows(tmp_path / "scores" / f"{split}.jsonl", [{"text": "one", "label": n / 8} for n in range(8)])
    scores = ["--task", "custom", "--kind", "regression", "--text-columns", "text", "--data-dir", tmp_path / "scores"]
    refused = cli("recipe", "finetune", *scores, "--model", tmp_path / "bert", "--label-smoothing", 0.1)
    assert_sentence(
        refused, 2, "--label-smoothing is for classes and tokens, but custom is a regression task: remove it"
    )
