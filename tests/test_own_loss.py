"""A loss of one's own: each method trains with it, against slow steps in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import attnreg
from attnreg.training import FineTuning
from tests.commands import ran, read_lines
from tests.method_cases import bert, sgd
from tests.test_r_drop import BATCH, IDS

WITHOUT_LABELS = {"input_ids": IDS}


def squared(outputs, batch):
    """Not what the model computes: the squared distance of the probabilities from the labels."""
    return (outputs.logits.softmax(-1) - F.one_hot(batch["labels"], 2)).square().sum(-1).mean()


def unlabelled(outputs, batch):
    return outputs.logits.square().mean()


class Priced(attnreg.MaskProvider):
    """Masks nothing, and costs a quarter."""

    def forward(self, site):
        return None

    def penalty(self):
        return torch.tensor(0.25)


def assert_stepped(model, before, loss):
    """The model is the one before after a step of plain gradient descent on a loss of it."""
    gradients = torch.autograd.grad(loss, list(before.parameters()), allow_unused=True)
    for new, old, gradient in zip(model.parameters(), before.parameters(), gradients, strict=True):
        torch.testing.assert_close(new.data, old.data if gradient is None else old.data - 0.1 * gradient)


def test_fine_tuning():
    for batch, loss_function in ((BATCH, squared), (WITHOUT_LABELS, unlabelled)):
        model = bert(dropout=0.0)
        before = copy.deepcopy(model).train()
        method = FineTuning(model, sgd(model), max_grad_norm=None, loss_function=loss_function)
        assert method.loss_function is loss_function
        expected = loss_function(before(input_ids=IDS), batch)
        assert method.step(batch).loss.item() == pytest.approx(expected.item(), abs=1e-12)
        assert_stepped(model, before, expected)


def test_the_penalty_of_a_provider_is_added():
    model = bert(dropout=0.0)
    expected = squared(copy.deepcopy(model).train()(input_ids=IDS), BATCH).item() + 0.25
    method = FineTuning(model, sgd(model), Priced(), loss_function=squared)
    assert method.step(BATCH).loss.item() == pytest.approx(expected, abs=1e-12)


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
