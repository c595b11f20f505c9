"""The base classes: what a class may be called, what may be asked where, and what may be answered."""

import pytest
import torch
from torch import nn

import attnreg
from attnreg import (
    AttentionDropout,
    CrossTuning,
    DropHead,
    HiddenDropout,
    HiddenProvider,
    Mask,
    MaskProvider,
    OnLayers,
    Scheduled,
)
from attnreg.errors import InputError
from attnreg.regularizer.base import Regularizer
from attnreg.training import SAM, ChildTuning, FineTuning, Mixout
from tests.helpers.cases import refused

SITE = attnreg.AttentionSite(shape=(2, 2, 3, 3))
STATES_AT, STATES = attnreg.HiddenSite(shape=(2, 3, 4)), torch.ones(2, 3, 4)


class Keep(MaskProvider):
    def forward(self, site):
        return None


@pytest.mark.parametrize("base", [MaskProvider, HiddenProvider])
@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("looks_at_batch", True, "looks_at_batches"),
        ("skip_block", lambda self, site, draws: None, "skips_block"),
        ("draw_in_prepare", property(lambda self: True), "draws_in_prepare"),
        ("decide_for_batch", True, "decides_for_batch"),
        ("foward", lambda self, site: None, "forward"),
        ("on_epochs", lambda self, epoch: None, "on_epoch"),
        ("schedulables", ("p",), "schedulable"),
        ("penality", lambda self: None, "penalty"),
        ("attributes", lambda self, model, batch: None, "attribute"),
        ("learnt_parameters", lambda self: [], "learned_parameters"),
    ],
)
def test_a_misspelt_name_is_refused_when_the_class_is_made(base, name, value, meant):
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be read\. Did you mean {meant}\?"):
        type("Mine", (base,), {name: value})
    type("Mine", (base,), {f"_{name}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attributes", property(lambda self: {})),  # a word of its own, and no method
        ("prepared", False),
        ("steps", lambda self: 1),
        ("checked", lambda self, value: value),
        ("penalties", lambda self: []),
        ("inactive", property(lambda self: False)),
        ("inner_dim", 3),
        ("compute_loss", lambda self, output, batch: None),
        ("blocks", ()),
    ],
)
def test_a_name_of_ones_own_is_not(name, value):
    made = type("Mine", (Keep,), {name: value})()
    assert made(SITE) is None
    made.looks_at_batch = True  # an attribute of an instance is its own business
    type("Other", (type(made),), {name: value})


def test_what_nobody_defines_has_its_default():
    provider = Keep()
    assert (provider.inner(), provider.parts()) == ([], [provider])
    assert not any((provider.looks_at_batches, provider.draws_in_prepare, provider.may_skip_blocks))
    assert (provider.first_epoch, provider.why_asleep(1000)) == (0, None)
    with pytest.raises(TypeError, match="abstract"):
        Regularizer()


test_one_kind_at_the_site_of_the_other_is_refused = refused(
    (lambda: DropHead()(STATES_AT, STATES), "DropHead regularizes attention: call it with an AttentionSite"),
    (lambda: DropHead()(SITE, STATES), "DropHead regularizes attention: .* without states"),
    (lambda: HiddenDropout()(SITE), "HiddenDropout regularizes hidden states: call it with a HiddenSite"),
    (lambda: HiddenDropout()(STATES_AT), "HiddenDropout regularizes hidden states: .* and the states"),
)


def test_a_composition_is_asked_at_both():
    both = OnLayers(AttentionDropout(1.0, "scores") & HiddenDropout(1.0), [0])
    assert not both(SITE).scores.any()
    assert not both(STATES_AT, STATES).any()
    later = CrossTuning(both)
    assert later(SITE) is None
    assert later(STATES_AT, STATES) is STATES


class Answers(MaskProvider):
    def forward(self, site):
        return torch.ones(3).bool()


class AnswersMask(HiddenProvider):
    def forward(self, site, states):
        return Mask()


test_an_answer_of_another_kind_is_refused = refused(
    (lambda: Answers()(SITE), r"Expected Answers to return a Mask or None, got Tensor, at .*Mask\(scores="),
    (lambda: AnswersMask()(STATES_AT, STATES), r"AnswersMask to return None .* states, of shape \(2, 3, 4\), got Mask"),
)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (DropHead, r"got the class DropHead: make one, as in DropHead\(\)"),
        ("DropHead(0.1)", r"got the text 'DropHead\(0.1\)': make a regularizer of it with `attnreg.parse_provider`"),
        (nn.Dropout(0.1), "got Dropout, which is no regularizer"),
    ],
)
def test_what_is_no_regularizer_is_refused(value, message):
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    for use, where in (
        (lambda: DropHead() & value, "Compose"),
        (lambda: OnLayers(value, [0]), "OnLayers"),
        (lambda: FineTuning(model, torch.optim.SGD(model.parameters()), value), "FineTuning"),
        (lambda: attnreg.attach(model, value), "attach"),
    ):
        with pytest.raises(InputError, match=f"Expected a regularizer in {where}, {message}"):
            use()
    assert not attnreg.is_attached(model)


@pytest.mark.parametrize("method", [FineTuning, SAM, Mixout, ChildTuning])
def test_an_optimizer_of_another_model_is_refused(method):
    model, other = (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2))
    with pytest.raises(InputError, match="holds no parameter that TransformerEncoderLayer trains: make a new one"):
        method(model, torch.optim.SGD(other.parameters(), 0.1))
    method(model, torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1))


def test_one_regularizer_twice_would_step_twice():
    once = attnreg.Scheduled(AttentionDropout(0.1), 100, p=[(0, 0), (1, 0.5)])
    with pytest.raises(InputError, match="One Scheduled is in the composition twice, and would step twice: make two"):
        OnLayers(once, [0]) & (Keep() & OnLayers(once, [1]))
    with pytest.raises(InputError, match="One Scheduled is in the composition twice"):
        CrossTuning(once) & once
    learned = attnreg.ConcreteDropout(num_layers=2)
    with pytest.raises(InputError, match="One ConcreteDropout is in the composition twice, and may add its penalty"):
        OnLayers(learned, [0]) & OnLayers(learned, [1])
    dropout = AttentionDropout(0.1)
    assert len((OnLayers(dropout, [0]) & OnLayers(dropout, [1])).providers) == 2  # nothing steps


class WithOptions(Keep):
    """Takes any further arguments."""

    def __init__(self, p=0.1, **options):
        super().__init__()
        self.p, self.options = p, options


class PerLayer(Keep):
    def __init__(self, rates):
        super().__init__()
        self.rates = rates


def test_arguments_by_any_name_come_back(tmp_path):
    WithOptions(0.2, only=[1]).save_pretrained(tmp_path / "saved")
    again = attnreg.MaskProvider.from_pretrained(tmp_path / "saved", providers=[WithOptions])
    assert (again.p, again.options) == (0.2, {"only": [1]})


def test_keys_that_json_would_change_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"PerLayer cannot be saved, .*: a key of \{0: 0.3\} is no string\.$"):
        PerLayer({0: 0.3}).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    PerLayer({"0": 0.3}).save_pretrained(tmp_path / "saved")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2).train()


def output(model, provider, change=lambda provider: None):
    """The output of a training pass, after a change to the attached provider."""
    with attnreg.attach(model, provider):
        change(provider)
        return model(torch.arange(24.0).view(2, 3, 4).sin())


LAST_KEY_GONE = Mask(scores=torch.tensor([True, True, False]))


class DropLastKey(MaskProvider):
    def forward(self, site):
        return LAST_KEY_GONE


class HalveOutputs(HiddenProvider):
    def forward(self, site, states):
        return states / 2


CONTAINERS = {
    "Compose": (attnreg.Compose, {}),
    "OnLayers": (OnLayers, {"layers": [0, 1]}),
    "CrossTuning": (CrossTuning, {"every": 1, "offset": 0}),
    "Scheduled": (Scheduled, {"total_steps": 2, "p": [(0, 0.0), (1, 0.0)]}),
}
contained = pytest.mark.parametrize(("kind", "options"), CONTAINERS.values(), ids=CONTAINERS)
of_states = pytest.mark.parametrize("of_states", [False, True], ids=["attention", "states"])


@contained
@of_states
@pytest.mark.parametrize("place", ["alone", "around", "before attach", "composed"])
def test_hooks_are_called_in_an_attached_model(model, kind, options, of_states, place):
    seen, alone = [], HiddenDropout(0.0) if of_states else AttentionDropout(0.0)
    hooked = provider = alone if place == "alone" else kind(alone, **options)

    def answer(module, args, answer):
        seen.append(("after", args[0].layer))
        return LAST_KEY_GONE if len(args) == 1 else answer / 2 if args[0].where == "output" else answer

    def hook(_):
        hooked.register_forward_pre_hook(lambda module, args: seen.append(("before", args[0].layer)))
        hooked.register_forward_hook(answer)

    if place in ("before attach", "composed"):
        hook(None)
    if place == "composed":
        provider = hooked & (HiddenDropout(0.0) if of_states else Keep())
    got = output(model, provider, hook if place in ("alone", "around") else lambda _: None)
    assert torch.equal(got, output(model, HalveOutputs() if of_states else DropLastKey()))
    assert seen == [(when, layer) for layer in range(2) for when in ("before", "after")]


@contained
@of_states
@pytest.mark.parametrize("place", ["class", "instance", "composed"])
def test_an_overridden_forward_of_a_container_is_called(model, kind, options, of_states, place):
    def forward(self, site, states=None):
        answer = kind.forward(self, site, states)
        return LAST_KEY_GONE if states is None else answer / 2 if site.where == "output" else None

    made = kind if place == "instance" else type("Mine", (kind,), {"forward": forward})
    provider = made(HiddenDropout(0.0) if of_states else AttentionDropout(0.0), **options)
    if place == "instance":
        provider.forward = forward.__get__(provider)
    if place == "composed":
        provider = provider & (HiddenDropout(0.0) if of_states else Keep())
    assert torch.equal(output(model, provider), output(model, HalveOutputs() if of_states else DropLastKey()))


@pytest.mark.parametrize("answer", [True, torch.ones(2)])
def test_a_wrong_answer_of_an_overridden_forward_is_refused(model, answer):
    class Mine(attnreg.Compose):
        def forward(self, site, states=None):
            return answer

    with pytest.raises(InputError, match=r"^Expected Mine to return a Mask or None, got (bool|Tensor), at layers\.0"):
        output(model, Mine(AttentionDropout(0.0)))
    with pytest.raises(InputError, match=r"^Expected Mine to return None or the changed states, of shape \(2, 3, 4\)"):
        output(model, Mine(HiddenDropout(0.0)))
