"""Every argument of every provider, training method and objective: a value that is none is refused, and named."""

import copy
import inspect
import math

import pytest
import torch

import attnreg
from attnreg import training
from attnreg.errors import InputError
from tests.helpers.method_cases import bert, sgd
from tests.helpers.provider_cases import BUILT_IN

#: Arguments without a default.
NEEDED = {
    "graph": 1, "head_size": 3, "hidden_size": 4, "layers": [0], "num_heads": 4, "num_layers": 2, "p": 0.1,
    "provider": attnreg.DropHead(), "schedule": [(0, 0.1)], "total_steps": 10, "vocab_size": 10,
}  # fmt: skip
OF_TRAINING = {
    "SAM": ("rho",),
    "RDropLoss": ("alpha",),
    "R3FLoss": ("weight", "eps", "noise"),
    "Mixout": ("p",),
    "ChildTuning": ("p", "mode"),
    "FineTuning": ("micro_batches",),
    "FreeLBLoss": ("steps", "step_size", "radius", "start"),
}
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ARGUMENTS = [
    (name, key)
    for name, cls in sorted(BUILT_IN.items())
    for key, parameter in inspect.signature(cls).parameters.items()
    if parameter.kind in NAMED
]
ARGUMENTS += [(name, key) for name, keys in OF_TRAINING.items() for key in keys]


def test_every_training_method_and_objective_names_its_own_arguments():
    public = {name: getattr(training, name) for name in dir(training)}
    kinds = (training.FineTuning, training.Objective)
    found = {name for name, each in public.items() if inspect.isclass(each) and issubclass(each, kinds)}
    how = "give each its arguments in OF_TRAINING of this file, and what it needs in tests/helpers/method_cases.py"
    assert found - {"Objective"} == set(OF_TRAINING), how


def needed(name):
    """The class, and its arguments without a default, or with 0, as sizes of the model have."""
    made = BUILT_IN.get(name) or getattr(training, name)
    parameters = inspect.signature(made).parameters
    given = {other: NEEDED[other] for other, p in parameters.items() if p.default in (p.empty, 0) and other in NEEDED}
    if "optimizer" in parameters:
        given |= {"model": bert(), "optimizer": sgd(bert())}
    return made, given


def refuse(name, key, wrong):
    made, given = needed(name)
    with pytest.raises(InputError, match=f"`{key}`|Expected (knots|a regularizer)|`p of a knot`"):
        made(**{**given, key: wrong})


@pytest.mark.parametrize(("name", "key"), ARGUMENTS)
def test_a_value_that_is_none_is_refused(name, key):
    made, given = needed(name)
    is_number = isinstance(given.get(key, inspect.signature(made).parameters[key].default), (int, float))
    for wrong in ("nonsense", -1, *([math.nan, math.inf, [0.1]] if is_number else [])):
        refuse(name, key, wrong)


EDGES = [
    *(
        (name, "p", value)
        for name in ("ConcreteDropout", "LearnableBernoulli", "ContextualDropout")
        for value in (0, 1.0)
    ),
    *((name, "temperature", value) for name in ("ConcreteDropout", "ContextualDropout") for value in (0, 1e-320)),
    ("AdversarialAttention", "initial_keep", 1),
    ("AdversarialAttention", "generator_size", 10**13),
    ("BernoulliScheduleProvider", "schedule", []),
    ("BernoulliScheduleProvider", "schedule", [(0, 0.1, 3)]),
    ("BernoulliScheduleProvider", "schedule", [(1, 0.1), (0, 0.2)]),
    ("ChildTuning", "p", 0.0),
    ("ChildTuning", "p", 1.0),
    ("ConcreteDropout", "num_layers", {}),
    ("ContextualDropout", "prior", 1.0),
    ("CrossTuning", "offset", 2),
    ("DropAttention", "window", 10**11),
    ("GNetProvider", "initial_keep", 1.0),
    ("HiddenCut", "candidates", 0),
    ("HiddenDropout", "where", ["input", "input"]),
    ("Mixout", "p", 1.0),
    ("OnLayers", "layers", []),
    ("OnLayers", "layers", [True]),
    ("StructuralMask", "graph", 10**30),
    ("StructuralMask", "heads", []),
    ("StructuralMask", "heads", math.nan),
    ("OnLayers", "layers", math.nan),
    ("ConcreteDropout", "num_heads", 4),
    ("LearnableBernoulli", "num_heads", 4),
    ("GNetProvider", "pad_token_id", 1.5),
]


@pytest.mark.parametrize(("name", "key", "wrong"), EDGES)
def test_a_value_at_the_edge_is_refused(name, key, wrong):
    refuse(name, key, wrong)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, key in ARGUMENTS if name in BUILT_IN
                                           and key in getattr(BUILT_IN[name], "schedulable", ())])  # fmt: skip
def test_a_value_that_is_set_later_is_refused_as_in_the_constructor(name, key):
    made, given = needed(name)
    provider = made(**given)
    before = getattr(provider, key)
    for wrong in ("nonsense", -1, math.nan, [0.1]):
        with pytest.raises(InputError, match=f"`{key}`"):
            setattr(provider, key, wrong)
        assert getattr(provider, key) == before
    state = torch.get_rng_state()
    setattr(provider, key, 0.25)
    assert provider.config[key] == 0.25
    assert torch.equal(torch.get_rng_state(), state)


ONLY_MADE = [("HiddenKey", "p"), ("UniDrop", "attention"), ("HiddenDropout", "where"), ("ConcreteDropout", "p"),
             ("BernoulliScheduleProvider", "schedule"), ("CrossTuning", "every")]  # fmt: skip


@pytest.mark.parametrize(("name", "key"), ONLY_MADE)
def test_an_argument_that_is_read_once_cannot_be_set_later(name, key):
    made, given = needed(name)
    provider = made(**given)
    with pytest.raises(InputError, match=rf"^`{key}` of {name} cannot be changed: make a new one\.$"):
        setattr(provider, key, 0.5)


def test_a_regularizer_follows_one_schedule():
    shared = attnreg.DropHead()
    first = attnreg.Scheduled(shared, 10, p=[(0, 0.2)])
    with pytest.raises(InputError, match=r"^`p` of this DropHead follows a schedule: make a new one\.$"):
        attnreg.Scheduled(shared, 10, p=[(0, 0.8)])
    first.config["p"][0][1] = 0.9
    assert first.config["p"] == [[0, 0.2]]


@pytest.mark.parametrize("over", ["training", "depth"])
@pytest.mark.parametrize("own", [False, True])
def test_what_a_schedule_changes_cannot_be_set(over, own):
    class Own(attnreg.DropHead):
        pass

    scheduled = attnreg.Scheduled(Own() if own else attnreg.DropHead(), 10, over, p=[(0, 0.2), (1, 0.4)])
    with pytest.raises(InputError, match=r"^`p` of this (Own|DropHead) follows a schedule: make a new one\.$"):
        copy.deepcopy(scheduled).provider.p = 0.5
    scheduled.step()
    assert float(scheduled.provider.p) == pytest.approx(0.22 if over == "training" else 0.2)


def test_what_is_inside_cannot_be_replaced():
    outer = attnreg.OnLayers(attnreg.DropKey(0.1), [0])
    with pytest.raises(InputError, match=r"^`provider` of OnLayers cannot be changed: make a new one\.$"):
        outer.provider = attnreg.DropKey(0.5)
    model = bert()
    with attnreg.attach(model, outer) as handle, pytest.raises(AttributeError):
        handle.provider = attnreg.DropKey(0.5)


def test_a_schedule_draws_nothing_when_its_values_are_checked():
    provider, state = attnreg.ContextualDropout(2, 3), torch.get_rng_state()
    attnreg.Scheduled(provider, 10, temperature=[(0, 1.0), (1, 0.1)])
    assert torch.equal(torch.get_rng_state(), state)


def test_classes_of_ones_own_set_what_they_like():
    class Half(attnreg.DropKey):
        def __init__(self, p=0.1):
            super().__init__(p)
            self.p = p / 2

    half = Half(0.4)
    assert half.p == 0.2
    half.share_heads = True
    assert half.config == {"p": 0.2}
