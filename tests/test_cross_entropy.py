"""Smoothed labels: the formula, position by position, and that a run trains with them."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from attnreg.training import CrossEntropy, FineTuning, RDrop
from tests import task_data as made
from tests.commands import assert_sentence, ran, read_lines
from tests.method_cases import BATCH, IDS, PADDED, bert, sgd, weights

PROMPTS = torch.tensor([3, 2, 1, 4, 1, 2, 0, 2])  # tokens of each row's prompt
LABELS = IDS.masked_fill((torch.arange(6) < PROMPTS[:, None]) | ~PADDED, -100)
CAUSAL = {"input_ids": IDS, "attention_mask": PADDED.long(), "labels": LABELS}


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=8, max_position_embeddings=8)).double()


def term(logits, label, smoothing):
    log_p = [each - math.log(sum(map(math.exp, logits))) for each in logits]
    return -(1 - smoothing) * log_p[label] - smoothing * sum(log_p) / len(log_p)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_causal_model_predicts_the_next_token_of_completions(smoothing):
    model = llama()
    outputs, terms = model(**CAUSAL), []
    for row, logits in enumerate(outputs.logits.tolist()):
        tokens = range(max(1, int(PROMPTS[row])), int(PADDED[row].sum()))
        terms += [term(logits[token - 1], int(IDS[row, token]), smoothing) for token in tokens]
    got = CrossEntropy(model, smoothing)(outputs, CAUSAL)
    assert got.item() == pytest.approx(sum(terms) / len(terms), abs=1e-12)


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


def test_micro_batches_add_up_to_their_batch():
    ends = []
    for parts in (1, 3):
        model = llama()
        FineTuning(model, sgd(model), loss_function=CrossEntropy(model, 0.1), micro_batches=parts).step(CAUSAL)
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_it_trains_in_an_objective():
    model = bert(num_labels=2)
    assert RDrop(model, sgd(model), loss_function=CrossEntropy(model, 0.1)).step(BATCH).loss.isfinite()


def test_what_has_no_classes_is_refused():
    with pytest.raises(ValueError, match="Expected `smoothing`"):
        CrossEntropy(llama(), 1.0)
    loss_function = CrossEntropy(bert(), 0.1)
    for logits, labels in ((torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(2, 3), torch.zeros(2, 3))):
        with pytest.raises(ValueError, match="CrossEntropy needs labels that are classes"):
            loss_function(SimpleNamespace(logits=logits), {"labels": labels})
    with pytest.raises(ValueError, match="CrossEntropy needs `logits` in the output, SimpleNamespace"):
        loss_function(SimpleNamespace(), BATCH)


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
    refused = cli("recipe", "finetune", *nli, "--class-weights", "balanced", "--label-smoothing", 0.1)
    assert_sentence(refused, 2, "Each of --class-weights, --label-smoothing changes the training loss")
    for split in ("train", "validation"):
        made.write_rows(tmp_path / "scores" / f"{split}.jsonl", [{"text": "one", "label": n / 8} for n in range(8)])
    scores = ["--task", "custom", "--kind", "regression", "--text-columns", "text", "--data-dir", tmp_path / "scores"]
    refused = cli("recipe", "finetune", *scores, "--model", tmp_path / "bert", "--label-smoothing", 0.1)
    assert_sentence(
        refused, 2, "--label-smoothing is for classes and tokens, but custom is a regression task: remove it"
    )
