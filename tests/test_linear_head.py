"""Linear probes and pooled states, against features and regressions written out here."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
import transformers as hf
from accelerate.utils import convert_outputs_to_fp32
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import StratifiedKFold

import attnreg
from attnreg.errors import InputError
from attnreg.experiments import fit_linear_head
from attnreg.experiments.tasks.models import linear_head
from attnreg.experiments.tasks.models.linear_head import head_and_features
from attnreg.experiments.tasks.models.pooling import pool
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.method_cases import batches, bert
from tests.helpers.recipe_cases import evaluated_again

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
GPT = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
MODELS = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES)),
    "roberta": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SIZES, pad_token_id=0)),
    "distilbert": lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(vocab_size=20, dim=16, n_layers=2, n_heads=2, hidden_dim=16)),
    "deberta": lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**SIZES)),
    "gpt2": lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT)),
}  # fmt: skip
PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]])  # on neither side, right, left
STRENGTHS = [1e-2, 1.0, 1e2]
IDS = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 8, 3, 4], [3, 4, 8, 3, 4]])
PLACES = {"cls": lambda n: n[0], "last": lambda n: n[-1], "mean": None}


@pytest.fixture(autouse=True)
def few_strengths(monkeypatch):
    """A third of the strengths that are tried, and a third of the time."""
    monkeypatch.setattr(linear_head, "STRENGTHS", STRENGTHS)


@pytest.mark.parametrize("pooling", PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_a_head_reads_the_pooled_state(name, pooling):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    batch = {"input_ids": IDS, "attention_mask": PADDED}
    states = model.base_model(**batch).last_hidden_state
    rows = []
    for row, mask in zip(states, PADDED, strict=True):
        real = [n for n in range(5) if mask[n]]
        rows.append(row[real].mean(0) if pooling == "mean" else row[PLACES[pooling](real)])
    pooled = torch.stack(rows)
    pool(model, pooling)
    if name == "gpt2":
        expected = model.score(pooled)
    elif name == "bert":
        expected = model.classifier(pooled)
    elif name == "roberta":
        expected = model.classifier(pooled[:, None])
    elif name == "deberta":
        expected = model.classifier(model.pooler(pooled[:, None]))
    else:
        expected = model.classifier(model.pre_classifier(pooled).relu())
    logits = model(**batch).logits
    torch.testing.assert_close(logits, expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**batch).logits, logits)
    with attnreg.attach(model.train(), attnreg.DropKey(0.0)):
        attached = model.eval()(**batch).logits
    assert torch.equal(attached, logits)


def test_an_encoder_with_a_decoder_is_refused():
    config = hf.BartConfig(vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
    with pytest.raises(InputError, match=r"^--pooling is for encoders and decoders, but Bart\w+ has both: remove it"):
        pool(hf.BartForSequenceClassification(config), "mean")


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_the_head_of_a_decoder_reads_one_token_of_a_row(pooled, left):
    model, ids = MODELS["gpt2"]().double().eval(), torch.tensor([[3, 4, 5, 6], [3, 4, 0, 0], [7, 0, 0, 0]])
    lasts = [3, 3, 3] if left else [3, 1, 0]
    ids = torch.stack([row.roll(3 - last) for row, last in zip(ids, [3, 1, 0], strict=True)]) if left else ids
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    states = model.base_model(**batch).last_hidden_state
    expected = states[[0, 1, 2], lasts]
    if pooled:
        pool(model, "mean")
        expected = torch.stack([row[tokens != 0].mean(0) for row, tokens in zip(states, ids, strict=True)])
    head, found, _ = head_and_features(model, [{**batch, "labels": torch.zeros(3).long()}])
    assert head is model.score
    torch.testing.assert_close(found, expected)


def features(model, rows):
    return torch.cat([model.eval().bert(**{n: x for n, x in b.items() if n != "labels"}).pooler_output for b in rows])


@pytest.mark.parametrize(("classes", "half"), [pytest.param(2, False, marks=pytest.mark.slow), (2, True), (3, False)])
def test_the_head_is_that_of_logistic_regression(classes, half):
    model, rows = bert(num_labels=classes), [*batches(8, 16)]
    if half:  # under mixed precision, a wrapper turns the model's logits back into float32, but not the head's
        model.float()
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    for batch in rows:
        batch["labels"] = batch["labels"] + (batch["input_ids"][:, 1] > 15) * (classes - 2)
    before = {name: each.clone() for name, each in model.state_dict().items() if "classifier" not in name}
    strength = fit_linear_head(model, rows)
    x, y = features(model, rows).detach().numpy(), torch.cat([b["labels"] for b in rows]).numpy()
    expected = LogisticRegression(C=strength, max_iter=10_000, tol=1e-8).fit(x, y).predict_proba(x)
    found = torch.cat([model(**batch).logits for batch in rows]).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=0.02 if half else 2e-3)
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())


def test_the_only_row_of_a_class_is_never_held_out():
    model, rows = bert(num_labels=3), [*batches(6, 16)]
    for batch in rows:
        batch["labels"] = (batch["input_ids"][:, 1] > 15).long()
    rows[2]["labels"][1] = 2
    strength = fit_linear_head(model, rows)
    x, y = features(model, rows).detach().numpy(), torch.cat([b["labels"] for b in rows]).numpy()
    of_two = np.flatnonzero(y != 2)
    losses = {}
    for c in STRENGTHS:
        losses[c] = []
        for fit, held in StratifiedKFold(5).split(of_two, y[of_two]):
            rows_to_fit = [*of_two[fit], *np.flatnonzero(y == 2)]
            fitted = LogisticRegression(C=c, max_iter=10_000, tol=1e-8).fit(x[rows_to_fit], y[rows_to_fit])
            of_label = fitted.predict_proba(x[of_two[held]])[range(len(held)), y[of_two[held]]]
            losses[c].append(-np.log(of_label).mean())
    assert strength == min(losses, key=lambda c: np.mean(losses[c]))
    expected = LogisticRegression(C=strength, max_iter=10_000, tol=1e-8).fit(x, y).predict_proba(x)
    found = torch.cat([model(**batch).logits for batch in rows]).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_numbers_are_fitted_by_ridge_regression():
    model, rows = bert(num_labels=1), [*batches(6, 16)]
    for batch in rows:
        batch["labels"] = batch["input_ids"][:, 0].double()
    strength = fit_linear_head(model, rows)
    x, y = features(model, rows).detach().numpy(), torch.cat([b["labels"] for b in rows]).numpy()
    found = torch.cat([model(**batch).logits for batch in rows]).squeeze(-1).detach().numpy()
    np.testing.assert_allclose(found, Ridge(alpha=strength).fit(x, y).predict(x), atol=1e-8)


def test_what_cannot_be_probed_is_refused():
    model, rows = bert(), [*batches(2)]
    one_class = [{**batch, "labels": torch.zeros_like(batch["labels"])} for batch in rows]
    several = [{**batch, "labels": torch.rand(4, 3).double().round()} for batch in rows]
    multi_label = {"num_labels": 3, "problem_type": "multi_label_classification"}
    for options, given, says in (
        ({}, one_class, r"needs 2 classes, and two rows of two of them, got \[8\] rows"),
        (multi_label, several, r"two rows or more with one label per row, got labels of shape \(8, 3\)"),
        ({}, [], "needs batches to fit"),
    ):
        with pytest.raises(InputError, match=says):
            fit_linear_head(bert(**options), given)
    model.classifier = torch.nn.Sequential(model.classifier, torch.nn.Tanh())
    with pytest.raises(InputError, match="has no linear head that reads one state per row"):
        fit_linear_head(model, rows)


def test_another_loss_is_refused(cli):
    result = cli("recipe", "linear-probe", "--label-smoothing", 0.1, "--train-size", 16, "--device", "cpu")
    assert_sentence(result, 2, "linear-probe fits the head by another loss, without --label-smoothing")


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_what_nothing_reads_is_not_trained(name):
    model = MODELS[name]().train()
    pool(model, "mean")
    model(input_ids=IDS, labels=torch.tensor([0, 1, 1])).loss.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.slow
def test_an_adapter_and_another_choice_are_kept(cli, tmp_path):
    options = ["--train-size", 16, "--epochs", 1, "--device", "cpu", "--output-dir"]
    ran(cli("recipe", "finetune", "--pooling", "last", *options, "first"))
    for name, pooling in (("mean", ["--pooling", "mean"]), ("own", ["--pooling", "own"]), ("kept", [])):
        adapter = ["--lora-rank", 2, "--lora-targets", "query"] if name == "mean" else []
        ran(cli("recipe", "finetune", "--model", "first/model", *adapter, *pooling, *options, name))
        evaluated_again(cli, tmp_path / name, "--device", "cpu")


def test_the_checkpoint_says_what_the_head_reads(cli, tmp_path):
    """That of sentence-transformers; a run keeps it, and another one of its network, too."""
    options = ["--train-size", 16, "--epochs", 1, "--device", "cpu", "--output-dir"]
    ran(cli("recipe", "lp-ft", "--pooling", "last", *options, "first"))
    said = ran(cli("recipe", "linear-probe", "--model", "first/model", *options, "second")).output
    assert "The head reads pooled states: last (--pooling)." in said
    config = tmp_path / "first/model/config.json"
    config.write_text(json.dumps({n: x for n, x in json.loads(config.read_text()).items() if n != "attnreg_pooling"}))
    (tmp_path / "first/model/1_Pooling").mkdir()
    (tmp_path / "first/model/1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    said = ran(cli("recipe", "finetune", "--model", "first/model", *options, "third")).output
    assert "The head reads pooled states: mean (--pooling)." in said
    result = cli("recipe", "finetune", "--task", "agreement-completion", "--pooling", "mean", *options, "fourth")
    assert_sentence(result, 1, "--pooling is for heads that read one state")
