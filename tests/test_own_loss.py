"""A loss of one's own: each method trains with it, against slow steps in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import attnreg
from attnreg.training import FineTuning
from tests.helpers.commands import ran, read_lines
from tests.helpers.method_cases import assert_stepped, bert, sgd
from tests.helpers.objectives import BATCH, IDS
from tests.helpers.regularizers import Costly

WITHOUT_LABELS = {"input_ids": IDS}


def squared(outputs, batch):
    """Not what the model computes: the squared distance of the probabilities from the labels."""
    return (outputs.logits.softmax(-1) - F.one_hot(batch["labels"], 2)).square().sum(-1).mean()


def unlabelled(outputs, batch):
    return outputs.logits.square().mean()


@pytest.mark.parametrize(
    ("batch", "loss_function", "provider"),
    [(BATCH, squared, None), (WITHOUT_LABELS, unlabelled, None), (BATCH, squared, Costly())],
)
def test_a_step_follows_the_gradient_of_the_loss_with_the_penalty(batch, loss_function, provider):
    model = bert(dropout=0.0)
    before = copy.deepcopy(model).train()
    method = FineTuning(model, sgd(model), provider, max_grad_norm=None, loss_function=loss_function)
    assert method.loss_function is loss_function
    expected = loss_function(before(input_ids=IDS), batch) + (0.0 if provider is None else 0.25)
    assert method.step(batch).loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert_stepped(model, before, expected)


@pytest.mark.parametrize("returned", [None, 1.0, torch.zeros(3)])
def test_a_result_that_is_no_loss_is_refused(returned):
    model = bert()
    method = FineTuning(model, sgd(model), loss_function=lambda outputs, batch: returned)
    with pytest.raises(ValueError, match="Expected `loss_function` to return a 0-d tensor, got"):
        method.step(BATCH)


def test_a_batch_without_labels_needs_a_loss_function():
    model = bert()
    with pytest.raises(ValueError, match="has no `loss`: pass `labels` in the batch, or `loss_function`"):
        FineTuning(model, sgd(model)).step(WITHOUT_LABELS)


def test_a_provider_that_learns_by_another_loss_is_refused():
    model = bert(hf.BertForSequenceClassification)
    for provider in (attnreg.LearnableBernoulli(2), attnreg.LearnableBernoulli(2) & attnreg.DropHead(0.1)):
        optimizer = sgd(model)
        optimizer.add_param_group({"params": provider.parameters()})
        with pytest.raises(ValueError, match="LearnableBernoulli learns by the model's own loss, but training has"):
            FineTuning(model, optimizer, provider, loss_function=squared)
        assert not attnreg.is_attached(model)
    provider = attnreg.LearnableBernoulli(2, loss=squared)
    optimizer.add_param_group({"params": provider.parameters()})
    FineTuning(model, optimizer, provider, loss_function=squared)
    assert attnreg.is_attached(model)


RECIPE = '''
import attnreg
from attnreg.experiments import recipe

def none(outputs, batch):
    return 0.0 * outputs.logits.sum()

@recipe("none")
def nothing(run):
    """Learn nothing."""
    run.report(run.train(attnreg.training.FineTuning, loss_function=none))
'''


def test_a_recipe_with_its_own_loss(cli, tmp_path):
    (tmp_path / "none.py").write_text(RECIPE)
    args = ["--train-size", 32, "--batch-size", 8, "--epochs", 1, "--device", "cpu", "--weight-decay", 0]
    ran(cli("recipe", "none.py", *args, "--output-dir", "out"))
    assert read_lines(tmp_path / "out" / "telemetry.jsonl")[-1]["loss"] == 0.0
