"""Whatever a subclass of a Trainer overrides, regularizers and objectives act as before, or training is refused."""

import inspect
import itertools
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import attnreg
from attnreg.errors import AsleepWarning, InputError
from attnreg.integrations import AttnRegCallback, RegularizedTrainer
from attnreg.training import RDropLoss
from tests.helpers.cases import sample
from tests.helpers.method_cases import weights
from tests.helpers.trainer_cases import KINDS, ONLY_CALLED, OUTSIDE, REPLACED, made, stock_loss, stock_step, trained
from tests.helpers.trainers import Rows, arguments, bert

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")


def public_methods():
    return {name for name, _ in inspect.getmembers(hf.Trainer, inspect.isroutine) if not name.startswith("_")}


def test_every_public_method_of_the_trainer_is_in_the_table():
    """A method of a later release fails here until somebody has looked at it."""
    known = {*REPLACED, *ONLY_CALLED, *OUTSIDE}
    assert not public_methods() - known
    assert public_methods() >= {"training_step", "compute_loss", "create_optimizer", "train"}


def called(name):
    """An override that calls what it overrides, as most do."""

    def method(self, *args, **kwargs):
        return getattr(super(self.Override, self), name)(*args, **kwargs)

    return method


def override(name, method, first=True):
    """A RegularizedTrainer with a method of somebody's, in a subclass or in another Trainer beside it."""
    static = isinstance(inspect.getattr_static(hf.Trainer, name, None), staticmethod)
    if method is called:
        method = staticmethod(getattr(hf.Trainer, name)) if static else called(name)
    body = {name: method}
    bases = (RegularizedTrainer,) if first else (hf.Trainer,)
    kind = type("Override", bases, body)
    kind.Override = kind
    return kind if first else type("Both", (RegularizedTrainer, kind), {})


FAST = {"training_step", "compute_loss", "create_optimizer", "create_scheduler", "call_model_init"}
OBJECTIVES = {("objective", "training_step"), ("objective", "compute_loss")}  # the others never meet one


def cases():
    for name in sorted(public_methods() & {*REPLACED, *ONLY_CALLED}):
        for kind in ("everything", *KINDS):
            for replaced, first in itertools.product((False, True), (True, False)):
                if replaced and name not in REPLACED:
                    continue
                # A subclass that replaces it and another Trainer that calls it: the two that differ in both.
                fast = name in FAST and (kind == "everything" or (kind, name) in OBJECTIVES) and replaced == first
                yield pytest.param(name, kind, replaced, first, marks=[] if fast else pytest.mark.slow)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The result of a RegularizedTrainer that nobody has changed, by kind."""
    results = {}

    def of(kind, **given):
        key = kind, *given
        if key not in results:
            base = hf.Trainer if kind == "plain" else RegularizedTrainer
            results[key] = trained(tmp_path_factory.mktemp("runs"), base, made(kind), **given)
        return results[key]

    return of


@pytest.mark.parametrize(("name", "kind", "replaced", "first"), [*cases()])
def test_an_override_changes_nothing(tmp_path, untouched, name, kind, replaced, first):
    """Overridden with the same result, in a subclass and in another Trainer: the weights are bitwise the same."""
    given = {"model_init": lambda: bert(0.0), "model": None} if name == "call_model_init" else {}
    expected = untouched(kind, **given)
    method = REPLACED[name] if replaced else called
    assert torch.equal(trained(tmp_path, override(name, method, first), made(kind), **given), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_act(untouched, kind):
    plain, result = untouched("plain"), untouched(kind)
    assert not torch.equal(result[: len(plain)], plain)


class Weighted:
    """Another loss, of somebody with rare classes; as a mixin, it does not know of regularizers."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = F.cross_entropy(output.logits, labels, weight=torch.tensor([1.0, 3.0]))
        return (loss, output) if return_outputs else loss


class Before(Weighted, RegularizedTrainer): ...


class After(RegularizedTrainer, type("Other", (Weighted, hf.Trainer), {})): ...


@pytest.mark.parametrize("kind", ["everything", "objective"])
def test_another_loss_is_that_of_one_pass(tmp_path, untouched, kind):
    def weighted(outputs, labels, num_items_in_batch=None):
        loss = F.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 3.0]))
        return loss if num_items_in_batch is None else loss / 2  # of two micro-batches

    expected = trained(tmp_path, RegularizedTrainer, made(kind), compute_loss_func=weighted)
    for trainer in (Before, After):
        assert torch.equal(trained(tmp_path, trainer, made(kind)), expected)
    assert not torch.equal(expected, untouched(kind))


def test_a_loss_that_returns_no_outputs_serves_all_but_objectives(tmp_path):
    class Bare(RegularizedTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            output = model(**inputs)
            return (output.loss, output) if return_outputs and not model.training else output.loss

    trained(tmp_path, Bare, made("everything"))
    with pytest.raises(InputError, match="Let `compute_loss` of Bare return outputs if `return_outputs`"):
        trained(tmp_path, Bare, made("objective"))

    class Old(RegularizedTrainer):
        def compute_loss(self, model, inputs, num_items_in_batch=None):
            return model(**inputs).loss

    with pytest.raises(InputError, match="Let `compute_loss` of Old return outputs"):
        trained(tmp_path, Old, made("objective"))


def learnable():
    return attnreg.LearnableBernoulli(2)


def test_a_regularizer_that_learns_by_the_models_own_loss_is_refused_with_another(tmp_path):
    class Logged(RegularizedTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    trained(tmp_path, Logged, {"provider": learnable()})
    says = "LearnableBernoulli learns by the model's own loss, but training has `Before.compute_loss`: give"
    with pytest.raises(InputError, match=says):
        trained(tmp_path, Before, {"provider": learnable() & attnreg.DropKey(0.1)})


def without_ours(self, model, inputs, num_items_in_batch=None):
    model.train()
    loss = model(**self._prepare_inputs(inputs)).loss / self.current_gradient_accumulation_steps
    self.accelerator.backward(loss)
    return loss.detach()


NEEDS = {"penalty": "AttentionEntropy", "learned": "ConcreteDropout", "two passes": "AttributionProvider"}
NEEDS |= {"objective": "R-Drop"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_without_compute_loss(tmp_path, untouched, kind):
    """Masks act in the model itself; all else is refused before the optimizer's first step."""
    own = type("Own", (RegularizedTrainer,), {"training_step": without_ours})
    if kind in NEEDS:
        model = bert(0.0)
        says = rf"Own computes its loss without {NEEDS[kind]}: call `self.compute_loss\(...\)` in `training_step`"
        says = "AttributionProvider needs `provider.attribute" if kind == "two passes" else says
        with pytest.raises((InputError, RuntimeError), match=says):
            trained(tmp_path, own, made(kind), model=model)
        assert torch.equal(weights(model), weights(bert(0.0)))
    else:
        assert torch.equal(trained(tmp_path, own, made(kind)), untouched(kind))


def replace_loss(trainer):
    trainer.compute_loss = types.MethodType(stock_loss, trainer)


def wrap_loss(trainer):
    present = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: present(*args, **kwargs)


def replace_step(trainer):
    trainer.training_step = types.MethodType(stock_step, trainer)


@pytest.mark.parametrize("before", [replace_loss, wrap_loss, replace_step])
def test_what_is_set_on_the_trainer_is_surrounded_too(tmp_path, untouched, before):
    result = trained(tmp_path, RegularizedTrainer, made("everything"), before)
    assert torch.equal(result, untouched("everything"))


class Counting(hf.Trainer):
    """GRPOTrainer of TRL counts like this."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._step = 0

    def training_step(self, *args, **kwargs):
        self._step += 1
        return super().training_step(*args, **kwargs)


def test_another_trainer_keeps_its_attributes(tmp_path, untouched):
    both = type("Both", (RegularizedTrainer, Counting), {})
    assert torch.equal(trained(tmp_path, both, made("everything")), untouched("everything"))


class TwoPasses(RegularizedTrainer):
    """Trainers of sentence-transformers run every text column in a pass."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        with torch.no_grad():
            outputs = model(**inputs)  # as of a reference
        loss = model(**inputs).loss + model(**inputs).loss
        return (loss, outputs) if return_outputs else loss


def test_a_penalty_of_one_pass_is_refused_if_the_loss_has_two(tmp_path):
    says = "The penalty of AttentionEntropy is that of one pass, but the loss of TwoPasses is of 2 passes"
    with pytest.raises(InputError, match=says):
        trained(tmp_path, TwoPasses, made("penalty"))
    trained(tmp_path, TwoPasses, made("learned"))  # whose penalty does not depend on a pass


def told(function):
    """The sentences of ours that a function warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in caught if each.category is AsleepWarning]


class Layerwise(RegularizedTrainer):
    """Makes an optimizer of its own, with a rate of its own for the head; and perhaps the scheduler with it."""

    with_scheduler = False

    def create_optimizer(self, model=None):
        groups = [{"params": self.model.bert.parameters(), "lr": 1e-4}, {"params": self.model.classifier.parameters()}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if self.with_scheduler:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        return self.optimizer


def test_an_optimizer_of_its_own_gets_what_is_learned(tmp_path):
    provider = attnreg.ConcreteDropout(2, 0.2)
    before = provider.logits.detach().clone()
    trainer = Layerwise(bert(), arguments(tmp_path, max_steps=2), train_dataset=Rows(), provider=provider)
    assert told(trainer.train) == []
    assert not torch.equal(provider.logits, before)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [1e-4, 1e-2, 1e-2]
    assert trainer.optimizer.param_groups[2]["weight_decay"] == 0.0
    kind = type("Scheduled", (Layerwise,), {"with_scheduler": True})
    trainer = kind(bert(), arguments(tmp_path, max_steps=2), train_dataset=Rows(), provider=attnreg.ConcreteDropout(2))
    with pytest.raises(InputError, match="The optimizer does not hold 1 parameters that ConcreteDropout learns"):
        trainer.train()


def test_what_a_plain_trainer_does_not_hold_is_told_when_training_begins(tmp_path):
    model = bert()
    handle = attnreg.attach(model, attnreg.ConcreteDropout(2))
    trainer = hf.Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=Rows(), callbacks=[AttnRegCallback(handle)])  # fmt: skip
    [said] = told(trainer.train)
    assert said.startswith("The optimizer does not hold 1 parameters that ConcreteDropout learns.")


class Stepping(hf.TrainerCallback):
    """Steps a schedule that the AttnRegCallback steps, too."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, *args, **kwargs):
        self.step()


@pytest.mark.parametrize("first", [True, False])
def test_a_schedule_that_somebody_else_steps_too_is_refused(tmp_path, first):
    model = bert()
    handle = attnreg.attach(model, made("schedule")["provider"])
    callbacks = [AttnRegCallback(handle), Stepping(handle.provider.step)]
    callbacks = callbacks[::-1] if first else callbacks
    trainer = hf.Trainer(model, arguments(tmp_path, max_steps=4), train_dataset=Rows(), callbacks=callbacks)
    with pytest.raises(InputError, match=r"A schedule advances twice in every optimizer step: .*remove your call"):
        trainer.train()
    assert trainer.state.global_step == (1 if first else 2)


class Clearing(hf.TrainerCallback):
    """Clears gradients wherever a callback can after the optimizer's step, as stock callbacks do."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        model.zero_grad()
        optimizer.zero_grad()

    on_step_begin = on_epoch_begin = on_log = on_step_end


@pytest.mark.parametrize("kind", ["everything", "objective"])
def test_a_callback_that_clears_gradients_changes_nothing(tmp_path, untouched, kind):
    assert torch.equal(trained(tmp_path, RegularizedTrainer, made(kind), callbacks=[Clearing()]), untouched(kind))


def test_a_removed_callback_is_refused(tmp_path):
    trainer = RegularizedTrainer(bert(), arguments(tmp_path), train_dataset=Rows(), **made("penalty"))
    trainer.remove_callback(AttnRegCallback)
    with pytest.raises(InputError, match=r"RegularizedTrainer has lost its AttnRegCallback.*trainer.handle.detach\(\)"):
        trainer.train()


def test_what_was_detached_stays_so_and_it_is_said(tmp_path):
    trainer = RegularizedTrainer(bert(), arguments(tmp_path, max_steps=2), train_dataset=Rows(), **made("mask"))
    trainer.handle.detach()
    [said] = told(trainer.train)
    assert said.startswith("The handle of AttnRegCallback is detached.")
    assert not attnreg.is_attached(trainer.model)
    again = AttnRegCallback(attnreg.DropKey(0.1))
    for _ in range(2):  # a callback may serve a second Trainer after that
        hf.Trainer(bert(), arguments(tmp_path, max_steps=1), train_dataset=Rows(), callbacks=[again]).train()
        assert again.handle.drop_rates()
        again.handle.detach()


def test_a_callback_that_is_added_late_is_attached_by_nobody(tmp_path):
    trainer = hf.Trainer(bert(), arguments(tmp_path, max_steps=1), train_dataset=Rows())
    trainer.add_callback(AttnRegCallback(attnreg.AttentionEntropy(0.1)))
    with pytest.raises(InputError, match=r"AttentionEntropy is not attached yet\. Pass the callback to a Trainer as"):
        trainer.train()


def test_without_regularizer_and_objective_it_says_so(tmp_path):
    [said] = told(lambda: RegularizedTrainer(bert(), arguments(tmp_path)))
    assert said == "RegularizedTrainer has no regularizer and trains plain: pass `provider=...` or `objective=...`."
    assert told(lambda: RegularizedTrainer(bert(), arguments(tmp_path), objective=RDropLoss(1.0))) == []


@pytest.mark.parametrize("kind", sample(KINDS, lambda kind: kind in ("learned", "two passes", "objective")))
def test_a_callback_with_a_handle_acts_as_the_provider_does(tmp_path, untouched, kind):
    model = bert(0.0)
    options = made(kind)
    callback = AttnRegCallback(attnreg.attach(model, options.pop("provider")))
    trainer = trained(tmp_path, RegularizedTrainer, {**options, "callbacks": [callback]}, model=model)
    assert torch.equal(trainer, untouched(kind)[: len(trainer)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["everything", "objective"])
def test_compiled(tmp_path, untouched, kind):
    """By a backend that changes no number."""
    args = {"torch_compile": True, "torch_compile_backend": "eager"}
    assert torch.allclose(trained(tmp_path, RegularizedTrainer, made(kind), args=args), untouched(kind), atol=1e-5)
