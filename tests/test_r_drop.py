"""R-Drop against its formula, written out slowly in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attnreg
from attnreg.training import FineTuning, RDropLoss
from attnreg.training.objective import disagreement
from tests.helpers.formulas import slow_symmetric_kl
from tests.helpers.method_cases import assert_stepped, bert, sgd, weights
from tests.helpers.objectives import BATCH, IDS, Recorder, heads


def test_disagreement_of_classes():
    a, b = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    labels = torch.zeros(5, dtype=torch.long)
    assert disagreement(a, b, labels).item() == pytest.approx(slow_symmetric_kl(a, b), abs=1e-12)
    assert disagreement(b, a, labels).item() == pytest.approx(disagreement(a, b, labels).item(), abs=1e-15)
    assert disagreement(a, a, labels) == 0
    assert torch.autograd.gradcheck(lambda x, y: disagreement(x, y, labels), (a, b))


def test_disagreement_leaves_out_what_is_not_labelled():
    a, b = (torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([[0, -100, 1], [-100, -100, 3]])
    kept = labels != -100
    assert disagreement(a, b, labels).item() == pytest.approx(slow_symmetric_kl(a[kept], b[kept]), abs=1e-12)


def test_disagreement_of_scores():
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.0]])
    assert disagreement(a, b, torch.tensor([0.1, 0.2])) == 2.0


@pytest.mark.parametrize("labels", [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2)])
def test_labels_that_are_no_classes_are_refused(labels):
    with pytest.raises(ValueError, match="Expected labels to be classes"):
        disagreement(torch.zeros(2, 3), torch.zeros(2, 3), labels)


@heads
def test_a_step_follows_the_gradient_of_half_the_papers_loss(head, options, labels):
    model = bert(head, **options)
    reference = copy.deepcopy(model).train()
    batch = {"input_ids": IDS, "labels": labels}
    torch.manual_seed(1)
    first, second = reference(**batch), reference(**batch)
    assert not torch.equal(first.logits, second.logits)
    alpha = 0.7
    loss = first.loss + second.loss + alpha * disagreement(first.logits, second.logits, labels)
    method = FineTuning(model, sgd(model), objective=RDropLoss(alpha), max_grad_norm=None)
    torch.manual_seed(1)
    assert method.step(batch).loss.item() == pytest.approx(loss.item() / 2, abs=1e-12)
    assert_stepped(model, reference, loss / 2)


def test_the_providers_masks_differ_between_the_passes_and_its_penalty_is_their_mean():
    model, provider = bert(dropout=0.0), Recorder()
    method = FineTuning(model, sgd(model), provider, objective=RDropLoss(0.0))
    torch.manual_seed(1)
    loss = method.step(BATCH).loss
    assert provider.prepared == 2
    assert len(provider.masks) == 4
    for layer in range(2):
        assert not torch.equal(*(provider.masks[at].written_out().weights for at in (layer, layer + 2)))
    assert 3 < loss < 3 + 3  # (2 + 4) / 2, and a cross-entropy


class NoLogits(nn.Linear):
    def forward(self, x, labels):
        return SimpleNamespace(loss=super().forward(x).sum())


def test_a_model_without_logits_is_refused():
    model = NoLogits(2, 1)
    with pytest.raises(ValueError, match="R-Drop needs `logits` with gradients in the output of NoLogits"):
        FineTuning(model, sgd(model), objective=RDropLoss()).step({"x": torch.ones(1, 2), "labels": torch.zeros(1)})


def test_a_batch_without_labels_is_refused():
    model = bert()
    method = FineTuning(
        model, sgd(model), objective=RDropLoss(), loss_function=lambda output, batch: output.logits.sum()
    )
    with pytest.raises(ValueError, match="The batch has no labels, got input_ids"):
        method.step({"input_ids": IDS})


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(
    "make",
    [
        lambda model: attnreg.AttentionDropout(0.3) & attnreg.LayerDrop(0.3),
        lambda model: attnreg.HeadMask(1),
        lambda model: attnreg.StructuralMask(1),
        lambda model: attnreg.AttributionProvider(method="random"),
        lambda model: attnreg.AdversarialAttention.for_model(model, price=0.5),
        lambda model: attnreg.ContextualDropout.for_model(model),
    ],
)
def test_what_draws_at_each_call_goes_with_gradient_checkpointing(make):
    trained = []
    for checkpointed in (False, True):
        model = bert()
        provider = make(model).double()
        optimizer = torch.optim.SGD([*model.parameters(), *provider.parameters()], lr=0.1)
        method = FineTuning(model, optimizer, provider, max_grad_norm=None, objective=RDropLoss())
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(1)
        method.step(BATCH)
        trained.append(torch.cat([weights(model), *(p.detach().flatten() for p in provider.parameters())]))
    assert torch.equal(*trained)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda model: Recorder() & attnreg.AttentionDropout(0.1), "Recorder"),
        (lambda model: attnreg.UniDrop(), "TokenDropout"),
        (lambda model: attnreg.GNetProvider.for_model(model), "GNetProvider"),
        (lambda model: attnreg.StructuralMask(lambda inputs: torch.ones(4, 4).bool()), "StructuralMask"),
    ],
)
def test_what_is_drawn_once_per_pass_does_not(make, name):
    model = bert()
    method = FineTuning(model, sgd(model), make(model).double(), objective=RDropLoss())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match=f"R-Drop with {name} does not work under gradient checkpointing"):
        method.step(BATCH)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: attnreg.AttributionProvider(),
        lambda model: attnreg.HeadMask(1, by="importance"),
        lambda model: attnreg.LearnableBernoulli.for_model(model),
    ],
)
def test_providers_that_look_at_batches_first_are_refused(make):
    model = bert()
    provider = make(model)
    says = f"R-Drop does not work with {type(provider).__name__}, which needs a first pass over each batch"
    with pytest.raises(ValueError, match=says):
        FineTuning(model, sgd(model), attnreg.CrossTuning(provider) & attnreg.DropHead(0.1), objective=RDropLoss())
    assert not attnreg.is_attached(model)
    with attnreg.attach(model, provider) as handle, pytest.raises(ValueError, match=says):
        FineTuning(model, sgd(model), handle, objective=RDropLoss())
