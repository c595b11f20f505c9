"""An objective is the same in a training method and in the Trainer of transformers."""

import itertools

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

import attnreg
from attnreg.integrations import AttnRegCallback, RegularizedTrainer
from attnreg.training import SAM, FineTuning, FreeLBLoss, Objective, R3FLoss, RDropLoss
from tests.helpers import method_cases
from tests.helpers.cases import sample
from tests.helpers.method_cases import BATCH, sgd, weights, without_chance
from tests.helpers.regularizers import Costly
from tests.helpers.trainers import Rows, arguments, bert, column

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")


def twice(forward, batch):
    """An objective of a user, with a term that is the output's."""
    (first, one), (second, two) = forward(batch), forward(batch)
    return (first + second) / 2 + (one.logits - two.logits).square().mean()


class Larger(Objective):
    title = "Larger"

    def __call__(self, forward, batch):
        return 3 * forward(batch)[0]


OBJECTIVES = {
    "r-drop": RDropLoss(2.0),
    "r3f": R3FLoss(weight=2.0, eps=0.5),
    "freelb": FreeLBLoss(steps=3, step_size=1.0, radius=1.5, start=0.0),
    "function": twice,
    "one pass": Larger(),
}


def rows():
    return [Rows()[i] for i in range(8)]


def as_batch(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# whether the model's loss is divided by the number of labels
@pytest.mark.parametrize(("counts", "accumulated"), sample(itertools.product((False, True), (4, 1)), lambda counts, accumulated: counts == (accumulated == 1)))  # fmt: skip
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_is_the_same(tmp_path, monkeypatch, name, counts, accumulated):
    without_chance(monkeypatch)
    methods = bert(dropout=0.0)
    method = FineTuning(methods, sgd(methods), Costly(), objective=OBJECTIVES[name], max_grad_norm=None)
    loss = float(method.step(as_batch(rows())).loss)
    trainers = bert(dropout=0.0)

    def summed(outputs, labels, num_items_in_batch):
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / 8

    options = {"per_device_train_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated}
    options |= {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1}
    trainer = RegularizedTrainer(
        trainers,
        arguments(tmp_path, **options),
        train_dataset=rows(),
        provider=Costly(),
        objective=OBJECTIVES[name],
        compute_loss_func=summed if counts else None,
    )
    trainer.train()
    assert column(trainer, "loss")[0] == pytest.approx(loss, rel=1e-4)
    assert torch.allclose(weights(trainers), weights(methods), atol=1e-6)
    assert not torch.allclose(weights(trainers), weights(bert(dropout=0.0)), atol=1e-4)
    trainers.eval()
    batch = as_batch(rows())
    plain, outputs = trainer.compute_loss(trainers, {**batch}, return_outputs=True)
    assert torch.equal(plain, outputs.loss if not counts else summed(outputs, batch["labels"], None))


@pytest.mark.parametrize("name", ["r-drop", "r3f", "freelb", "function"])
def test_providers_whose_masks_hold_for_one_pass_are_refused(tmp_path, name):
    title = {"r-drop": "R-Drop", "r3f": "R3F", "freelb": "FreeLB", "function": "twice"}[name]
    says = f"{title} does not work with AttributionProvider, which needs a first pass over each batch"
    model, provider = bert(), attnreg.AttributionProvider()
    with pytest.raises(ValueError, match=says):  # a function tells the number of its passes only in a step
        FineTuning(model, sgd(model), provider, objective=OBJECTIVES[name]).step(as_batch(rows()))
    assert attnreg.is_attached(model) == (name == "function")
    given = {"provider": attnreg.AttributionProvider(), "objective": OBJECTIVES[name]}
    with pytest.raises(ValueError, match=says):
        RegularizedTrainer(bert(), arguments(tmp_path), train_dataset=Rows(), **given).train()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("by_callback", [False, True])
def test_masks_that_a_checkpoint_would_not_repeat_are_refused(tmp_path, by_callback):
    model = bert()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    given = {"callbacks": [AttnRegCallback(attnreg.UniDrop())]} if by_callback else {"provider": attnreg.UniDrop()}
    trainer = RegularizedTrainer(model, arguments(tmp_path), train_dataset=Rows(), objective=RDropLoss(), **given)
    with pytest.raises(ValueError, match="R-Drop with TokenDropout does not work under gradient checkpointing"):
        trainer.train()


def test_another_method_trains_by_an_objective():
    model, calls = bert(dropout=0.0), itertools.count()

    def counted(forward, batch):
        next(calls)
        return 2 * forward(batch)[0]

    result = SAM(model, sgd(model), objective=counted).step(as_batch(rows()))
    assert next(calls) == 2
    assert float(result.loss) == pytest.approx(2 * bert(dropout=0.0)(**as_batch(rows())).loss.item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:RegularizedTrainer has no regularizer")
def test_without_provider_and_objective_it_is_the_stock_trainer(tmp_path):
    trained = []
    for kind in (hf.Trainer, RegularizedTrainer):
        trainer = kind(args=arguments(tmp_path, max_steps=2), train_dataset=Rows(), model_init=lambda: bert())
        trainer.train()
        trained.append(weights(trainer.model))
    assert torch.equal(*trained)


@pytest.mark.parametrize("objective", [RDropLoss(2.0), R3FLoss(), FreeLBLoss()], ids=lambda each: each.title)
def test_an_objective_waits_for_no_gpu(objective, monkeypatch):
    """Two tensors are compared, and positions chosen by a mask, by values that the host reads."""
    model, found = method_cases.bert(num_labels=3), []
    method = FineTuning(model, sgd(model), objective=objective)
    monkeypatch.setattr(torch, "equal", lambda *tensors: found.append(tensors))
    with Reads(found):
        method.step(BATCH)
    assert not found


class Reads(TorchDispatchMode):
    """Notes the operations of this package whose results have a shape that the host reads."""

    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self._found.append(func)
        return func(*args, **(kwargs or {}))
