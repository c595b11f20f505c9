"""FlexAttention: decisions that its kernel makes itself, against the same masks in memory, in float64."""

import functools

import pytest
import torch

import attnreg
from attnreg.draws import Drawn, Draws
from attnreg.injection.backends.allowed import LazySite
from attnreg.injection.running.passes import Passes
from tests.helpers.cases import sample
from tests.helpers.flex import ALL, FACTOR, KEEP, NEEDS_FLEX, WAYS, B, H, Model, N, dense, deprecated, qkv
from tests.helpers.own_dropout_cases import MASKED, check_the_side_of_padding
from tests.helpers.reference import assert_same
from tests.sweep.checks import Answer

pytestmark = [NEEDS_FLEX, pytest.mark.usefixtures("eager_flex")]

DRAWING = {
    "scores": lambda: attnreg.AttentionDropout(0.4, placement="scores"),
    "keys of a sample": lambda: attnreg.DropKey(0.4, share_heads=True, share_queries=True),
    "all": lambda: attnreg.DropKey(1.0),
    "a schedule": lambda: attnreg.BernoulliScheduleProvider([(0, 0.5)], 1),
    "two": lambda: attnreg.DropKey(0.4, share_queries=True) & attnreg.AttentionDropout(0.3, placement="scores"),
    "with a written mask": lambda: attnreg.DropKey(0.4) & Answer(lambda site: attnreg.Mask(scores=KEEP)),
    "weights": lambda: attnreg.AttentionDropout(0.4),
    "most weights, unscaled": lambda: attnreg.AttentionDropout(0.8, rescale=False),
    "all weights": lambda: attnreg.AttentionDropout(1.0),
    "weights and scores": lambda: attnreg.AttentionDropout(0.4) & attnreg.DropKey(0.6) & attnreg.AttentionDropout(0.1),
    "weights and a written mask": lambda: attnreg.AttentionDropout(0.4) & Answer(lambda site: attnreg.Mask(scores=KEEP)),
    "weights with factors": lambda: attnreg.AttentionDropout(0.4) & attnreg.DropHead(0.5),
    "weights with factors that count as kept": lambda: attnreg.AttentionDropout(0.4) & Answer(lambda site: attnreg.Mask(weights=FACTOR, kept=KEEP)),
    "with factors": lambda: attnreg.DropKey(0.4) & attnreg.DropHead(0.5),
    "relaxed": lambda: attnreg.RelaxedAttention(0.3) & attnreg.AttentionDropout(0.4, "scores"),
}  # fmt: skip


def written(provider, seed):
    """The same mask in memory, from a site that is in no kernel."""
    site = attnreg.AttentionSite(shape=(B, H, N, N), stack="cross", draws=Draws(seed), dtype=torch.float64)
    return provider(site)


DRAWING_EVERY_WAY = [
    pytest.param(*WAYS[way], make, id=f"{way}-{name}", marks=[] if way == "plain" or name == "weights" or (way, name) == ("documents and a bias", "two") else pytest.mark.slow)
    for way in WAYS
    for name, make in DRAWING.items()
]  # fmt: skip


@pytest.mark.parametrize(("options", "change", "valid", "make"), DRAWING_EVERY_WAY)
def test_decisions_within_the_kernel(options, change, valid, make, trainable_flex, monkeypatch):
    inputs = [x.requires_grad_() for x in qkv(**options)]
    model, provider = Model(**options), make()
    monkeypatch.setattr(Passes, "draws_at", lambda *args: Draws(9))
    with attnreg.attach(model, provider, stacks=["cross"], example_inputs=inputs) as handle:
        out = model(*inputs)
        rates = handle.drop_rates()
    mask = written(provider, 9)
    slow = dense(*inputs, change, valid, scores=mask.scores, weights=mask.weights, relaxed=mask.relaxed)[0]
    assert_same(out, slow, *inputs, tolerance=1e-11)
    expected = attnreg.functional.drop_rate(mask.units_kept.expand(B, H, N, N), valid)
    assert rates == {"cross.0": pytest.approx(float(expected), abs=1e-6)}


@pytest.mark.parametrize("name", ["scores", "two", "weights", "all weights"])
def test_decisions_within_the_kernel_are_not_in_memory(name, monkeypatch):
    """Neither masks, nor attention weights, nor what is valid, beyond the rows on which rates are measured."""
    for holder, function in ((Drawn, "written_out"), (attnreg.functional, "masked_scores")):
        monkeypatch.setattr(holder, function, None)
    monkeypatch.setattr("attnreg.injection.running.rates.POSITIONS", B * H * N)
    inputs = qkv()
    options, _, _ = WAYS["documents and a bias"]
    handle = attnreg.attach(Model(**options), DRAWING[name](), stacks=["cross"], example_inputs=inputs)
    seen = functools.cached_property(lambda site: pytest.fail("all valid positions were asked for"))
    seen.__set_name__(LazySite, "valid")
    monkeypatch.setattr(LazySite, "valid", seen)
    with handle.probing():
        handle._passes.model(*inputs)
    assert 0 < handle.drop_rates()["cross.0"] <= 1


def test_rows_that_are_dropped_have_good_gradients_in_single_precision(trainable_flex):
    inputs = [x.float().requires_grad_() for x in qkv()]
    with attnreg.attach(Model(), attnreg.DropKey(1.0), stacks=["cross"], example_inputs=inputs) as handle:
        out = handle._passes.model(*inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    slow = dense(*exact, lambda s: s, ALL, ~ALL)[0]
    assert (out - slow).abs().max() < 1e-6
    out.sin().sum().backward()
    slow.sin().sum().backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        scale = exact[2].grad.abs().max()
        assert ((ours.grad - theirs.grad).abs().max() / scale) < 1e-3


def test_the_rate_is_measured_on_some_rows_of_a_long_input(monkeypatch):
    monkeypatch.setattr("attnreg.injection.running.rates.POSITIONS", B * H * N * 2)
    inputs = qkv()
    with attnreg.attach(Model(), attnreg.DropKey(0.5), stacks=["cross"], example_inputs=inputs) as handle:
        monkeypatch.setattr(Passes, "draws_at", lambda *args: Draws(9))
        with handle.probing():
            handle._passes.model(*inputs)
        keep = written(attnreg.DropKey(0.5), 9).scores[:, :, [0, N - 1]]
        assert handle.drop_rates() == {"cross.0": pytest.approx(float((~keep).double().mean()), abs=1e-6)}


def test_decisions_in_the_kernel_of_some_rows_are_those_of_the_whole():
    rows, shape = torch.tensor([5, 2]), (2, 2, 3, 4)
    whole = attnreg.functional.seeded_keep(7, (6, *shape[1:]), 0.5)[rows]
    drawn = Drawn(7, 0.5, shape, samples=rows)
    grid = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    for found in (drawn.written_out(), drawn.of_queries(torch.arange(3)), drawn.keep_at()(*grid)):
        assert torch.equal(found, whole)


@deprecated
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("text", sample(MASKED[:3], lambda text: text == MASKED[0]))
def test_padding_on_the_left_does_not_count(text, trainable_flex):
    check_the_side_of_padding("llama with lora", "flex_attention", text)
