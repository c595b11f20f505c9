"""Every training method, and one of a user: what all of them promise."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.runs.stopping import read_state, write_state
from attnreg.training import AttackerDefender, Averaged, FineTuning
from tests.helpers.cases import NEEDS_TORCH_2_13, sample
from tests.helpers.commands import assert_close
from tests.helpers.method_cases import (
    ARGUMENTS,
    BATCH,
    CASES,
    Counting,
    MethodCase,
    adamw,
    assert_parts_are_the_whole,
    batches,
    bert,
    built_in,
    moved,
    same,
    sgd,
    weights,
    without_chance,
)

cases = pytest.mark.parametrize("case", CASES, ids=str)
splitting = pytest.mark.parametrize("case", [case for case in CASES if case.takes_micro_batches], ids=str)


PARTS = ("attnreg.training", "attnreg.attendout")
PLAIN = (bool, int, float, str, Tensor, type(None))


def attributes(thing, path=""):
    """The plain attributes of a method and of the parts that it is made of, by name; those of modules are elsewhere."""
    found = {}
    for name, value in vars(thing).items():
        if isinstance(value, torch.Generator):
            found[path + name] = value.get_state()
        elif is_plain(value):
            found[path + name] = copy.deepcopy(value)
        elif type(value).__module__.startswith(PARTS) and not isinstance(value, (nn.Module, type)):
            found |= attributes(value, f"{path}{name}.")
    return found


def is_plain(value):
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return all(map(is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, PLAIN)


def steps(method, data):
    """All that the loop sees of these steps."""
    seen = []
    for batch in data:
        result = method.step(batch)
        seen.append([result.loss, dict(result.logs), dict(result.events), method.drop_rates()])
    return seen, [weights(network) for network in method.networks.values()]


def check_resuming(case, folder):
    """A resumed run is the uninterrupted one, bit for bit, and no attribute that steps change is forgotten.

    It is stopped within a round of two steps.
    """
    provider = attnreg.AttentionDropout(0.2)
    method = case.make(bert(), copy.deepcopy(provider), optimizer=adamw)
    method.on_epoch(0)
    before = attributes(method)
    torch.manual_seed(1)
    steps(method, batches(3))
    write_state(folder, 3, method.state_dict())
    random, after = torch.get_rng_state(), attributes(method)
    expected = steps(method, batches(3, seed=2))
    again = case.make(moved(bert()), provider, optimizer=adamw)
    again.on_epoch(0)
    again.load_state_dict(read_state(folder))
    restored = attributes(again)
    changed = {name for name, value in after.items() if name not in before or not same(value, before[name])}
    lost = sorted(name for name in changed if not same(after[name], restored.get(name)))
    assert not lost, f"{case}: `state_dict` lacks {', '.join(lost)}"
    torch.set_rng_state(random)
    assert same(list(steps(again, batches(3, seed=2))), list(expected))


@cases
def test_a_resumed_run_is_the_uninterrupted_one(case, tmp_path):
    check_resuming(case, tmp_path)


@cases
def test_a_state_can_be_loaded_twice(case):
    method = case.make(bert(), attnreg.AttentionDropout(0.2), optimizer=adamw)
    steps(method, batches(3))
    state = copy.deepcopy(method.state_dict())
    kept = copy.deepcopy(state)
    method.load_state_dict(state)
    steps(method, batches(3))
    assert same(state, kept)


# The one changes losses; the other is what only later steps might read.
@pytest.mark.parametrize(("name", "lost"), [("updates", 0), ("mean", torch.zeros(2))])
def test_what_is_missing_from_the_state_is_caught(tmp_path, name, lost):
    class Forgetful(Counting):
        def state_dict(self):
            return {**super().state_dict(), name: lost}

    with pytest.raises(AssertionError, match=f"`state_dict` lacks {name}"):
        check_resuming(MethodCase(Forgetful), tmp_path)


@pytest.mark.parametrize("count", sample([2, 7], lambda count: count == 7))
@splitting
def test_an_update_in_micro_batches_is_that_of_the_whole_batch(case, count, monkeypatch):
    without_chance(monkeypatch)
    assert_parts_are_the_whole(lambda: bert(dropout=0.0), case.make, BATCH, count)


@cases
def test_drop_rates_are_those_of_the_latest_step(case):
    method = case.make(bert(), attnreg.AttentionDropout(0.4))
    assert isinstance(method.provider, attnreg.Regularizer)
    torch.manual_seed(1)
    method.step(BATCH)
    rates = method.drop_rates()
    assert list(rates) == ["encoder.0", "encoder.1"]
    assert all(rate.dim() == 0 and 0.2 < rate < 0.8 for rate in rates.values())


@cases
def test_it_learns(case):
    torch.manual_seed(0)
    method = case.make(bert(), attnreg.AttentionDropout(0.1), optimizer=adamw)
    losses = [method.step(batch).loss.item() for batch in list(batches(1, 8)) * 12]
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])


@cases
def test_it_trains_by_the_loss_function(case):
    """The other labels' loss is the loss of the other labels."""

    def of_others(outputs, batch):
        return F.cross_entropy(outputs.logits, 1 - batch["labels"])

    def with_others(batch):
        return {**batch, "labels": 1 - batch["labels"]}

    ends = []
    for change, loss_function in ((with_others, None), (lambda batch: batch, of_others)):
        method = case.make(bert(), loss_function=loss_function, change=change)
        assert method.loss_function is loss_function
        torch.manual_seed(1)
        loss = method.step(change(BATCH)).loss
        ends.append(torch.cat([loss[None], *(weights(network) for network in method.networks.values())]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
    assert len(ends[0]) > 1


@cases
def test_its_networks(case):
    model = bert()
    method = case.make(model)
    assert method.networks[method.returned_name] is method.model
    if case.method is not Averaged:  # an average is not trained
        assert all(any(network is learner for learner in method.learners) for network in method.networks.values())
        assert any(network is model for network in method.networks.values())


@NEEDS_TORCH_2_13  # before, two forward passes in one step are an error of DistributedDataParallel
def test_two_processes_are_one(warm, tmp_path):
    script = attnreg.__file__.replace("attnreg/__init__.py", "tests/methods_in_processes.py")
    for processes in (1, 2):
        code, output = warm.run(script, tmp_path, cwd=tmp_path, timeout=400, processes=processes)
        assert code == 0, output
    alone, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    assert {str(case) for case in CASES if case.sure is not None} <= {*alone} == {*first} == {*second}
    for name, record in alone.items():
        assert record["moved"] > 1e-3, name
        for other in (first, second):
            for what in ("steps", "weights"):
                assert_close((name, other[name][what]), (name, record[what]), within=1e-7)
    rewards = [logs["reward"] for loss, logs, events in alone[AttackerDefender.__name__]["steps"] if "reward" in logs]
    assert len(rewards) == 2
    assert all(reward != 0 for reward in rewards)


def test_a_gradient_that_the_optimizer_does_not_hold_shortens_no_step():
    """The body is neither frozen nor trained: its gradients are no part of the norm, and do not add up."""
    ends = []
    for frozen in (False, True):
        model = bert(dropout=0.0)
        model.bert.requires_grad_(not frozen)
        method = FineTuning(model, torch.optim.SGD(model.classifier.parameters(), lr=1.0), max_grad_norm=0.01)
        for batch in batches(3):
            method.step(batch)
        assert all(parameter.grad is None for parameter in model.parameters())
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_a_handle_of_another_model_is_refused():
    model, other = bert(), bert()
    handle = attnreg.attach(other, attnreg.DropHead(0.1))
    with pytest.raises(InputError, match="This handle is of another model than this BertForSequenceClassification"):
        FineTuning(model, sgd(model), handle)


@pytest.mark.parametrize(
    "provider", [attnreg.AttributionProvider(), attnreg.ConcreteDropout(2, p=0.2)], ids=lambda each: type(each).__name__
)
def test_a_detached_handle_does_nothing(provider):
    """No first pass, and no penalty."""
    ends = []
    for detached in (True, False):
        model = bert(dropout=0.0)
        optimizer = torch.optim.SGD([*model.parameters(), *provider.parameters()], lr=0.1)
        method = FineTuning(model, optimizer, provider if detached else None)
        if detached:
            method.handle.detach()
            assert not method.handle.active
        before = [parameter.detach().clone() for parameter in provider.parameters()]
        loss = method.step(BATCH).loss
        assert same(before, [parameter.detach() for parameter in provider.parameters()])
        ends.append(torch.cat([loss[None], weights(model)]))
    assert torch.equal(*ends)


def test_no_argument_is_left_of_a_method_that_is_gone():
    assert {*ARGUMENTS} <= {*built_in()}


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_the_hook_before_an_update_meets_unscaled_gradients(max_grad_norm):
    calls = []

    class Scaling(Accelerator):
        """As under float16, where gradients are scaled until they are clipped or the optimizer steps."""

        def unscale_gradients(self, optimizer=None):
            calls.append("unscaled")  # a second time would be an error of torch
            super().unscale_gradients(optimizer)

    class Adding(FineTuning):
        def before_update(self):
            calls.append("hook")

    model = bert()
    Adding(model, adamw(model), accelerator=Scaling(cpu=True), max_grad_norm=max_grad_norm).step(BATCH)
    assert calls == ["unscaled", "hook"]
