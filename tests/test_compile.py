"""An attached model under torch.compile: the same numbers, drop rates too, and no compilation at each step."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attnreg
from attnreg.training import FineTuning
from tests.helpers.cases import NEEDS_TORCH_2_13, NO_DROPOUT, bert_in_float64
from tests.helpers.provider_cases import CASES as ALL
from tests.helpers.provider_cases import COMPILED, MATRIX, PROVIDERS

CASES = {case.name: case.make for case in ALL if case.role in (MATRIX, COMPILED)}
STEPS = 4


def bert(layers=2):
    # Without dropout of its own: a dropped layer or block leaves it out, uncompiled, and draws nothing for it.
    return bert_in_float64(**NO_DROPOUT, num_hidden_layers=layers).float().train()


def batch(length=7):
    ids = torch.arange(3 * length).view(3, length) % 29 + 1
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0])}


def steps(model, provider, runs, lengths=(7,) * STEPS):
    """Losses, gradients, drop rates and what the provider learns from, of some steps; it begins where it began before."""
    begin = {name: value.clone() for name, value in provider.state_dict().items()}
    torch.manual_seed(1)
    seen = []
    handle = attnreg.injection.handle_of(model, provider)
    for length in lengths:
        model.zero_grad()
        provider.zero_grad()
        provider.attribute(model, batch(length))
        loss = runs(**batch(length)).loss
        penalty = provider.penalty()
        (loss if penalty is None else loss + penalty).backward()
        handle.step()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        learned = {name: p.grad.clone() for name, p in provider.named_parameters() if p.grad is not None}
        seen.append((loss.detach(), gradient, handle.drop_rates(), learned))
    provider.load_state_dict(begin)
    if hasattr(provider, "_update"):
        provider._update()
    return seen


# Masks on scores, from two passes, from tensors that a schedule changes, and in one graph with what learns.
FAST = ("scores-dropout",)
LEARNED = [case.name for case in PROVIDERS if case.made_for_model and not case.variant]


@NEEDS_TORCH_2_13  # before, attached modules stay out of graphs
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES])
def test_compiled_it_computes_the_same_and_is_compiled_once(name):
    torch._dynamo.reset()
    model = bert(layers=1 if name in FAST else 2)
    provider = CASES[name](model)
    counter = CompileCounterWithBackend("aot_eager")
    # What learns with the model must be in one graph with it, or it would learn something else.
    options = {"backend": counter, "fullgraph": name in LEARNED}
    with attnreg.attach(model, provider) as handle:
        provider.attribute(model, batch())
        model(**batch())  # in its first pass of all, a G-Net sets its biases; the test below compiles this one
        handle.step()
        expected = steps(model, provider, model)
        got = steps(model, provider, torch.compile(model, **options))
        compiled = counter.frame_count
        steps(model, provider, torch.compile(model, **options))
    assert 1 <= compiled <= 2  # a first step may find what later ones do not: nothing drawn yet
    assert counter.frame_count == compiled
    for (loss, gradient, rates, learned), (its_loss, its_gradient, its_rates, its_learned) in zip(
        expected, got, strict=True
    ):
        torch.testing.assert_close(its_loss, loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(its_learned, learned, rtol=1e-4, atol=1e-6)
        assert its_rates == pytest.approx(rates, abs=1e-6)
        assert rates
        assert name not in LEARNED or any(p.abs().max() > 0 for p in learned.values())


@pytest.mark.slow
@NEEDS_TORCH_2_13
def test_a_generator_sets_its_biases_in_a_compiled_pass_and_later_ones_are_one_graph():
    torch._dynamo.reset()
    model = bert()
    provider = CASES["g-net"](model)
    with attnreg.attach(model, provider):
        expected = steps(model, provider, model)
        got = steps(model, provider, torch.compile(model, backend="aot_eager"))
        for (loss, gradient, rates, _), (its_loss, its_gradient, its_rates, _) in zip(expected, got, strict=True):
            torch.testing.assert_close(its_loss, loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(its_gradient, gradient, rtol=1e-4, atol=1e-4)
            assert its_rates == pytest.approx(rates, abs=1e-6)
        provider.calibrate(batch())
        torch._dynamo.reset()
        assert torch.compile(model, backend="aot_eager", fullgraph=True)(**batch()).loss.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scores-dropout", "scheduled, training", "blocks 0.5", "hidden-dropout", "concrete"])
def test_other_lengths_and_rates_are_compiled_for_once(name):
    torch._dynamo.reset()
    model = bert()
    provider = CASES[name](model)
    counter = CompileCounterWithBackend("eager")
    lengths = [5 + step * 7 % 11 for step in range(50)]
    with attnreg.attach(model, provider):
        expected = steps(model, provider, model, lengths)
        got = steps(model, provider, torch.compile(model, backend=counter), lengths)
    assert counter.frame_count == 2  # one for the first length, one for all
    for (loss, *_), (compiled_loss, *_) in zip(expected, got, strict=True):
        torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_eval_mode_probing_and_detaching_are_noticed():
    torch._dynamo.reset()
    model = bert(layers=1)
    plain = {**batch(), "labels": None}
    compiled = torch.compile(model, backend="eager")  # when to compile anew is decided before a backend is asked
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(1.0))
    model.eval()
    with torch.no_grad():
        expected = model(**plain).logits
        torch.testing.assert_close(compiled(**plain).logits, expected)
        model.train()
        compiled(**plain)
        assert handle.drop_rates() == {}
        with torch.enable_grad():
            compiled(**plain)
        assert handle.drop_rates() == {"encoder.0": 1.0}
        model.eval()
        with handle.probing():
            probed = compiled(**plain).logits
            torch.testing.assert_close(probed, model(**plain).logits)
            assert not torch.allclose(probed, expected)
        torch.testing.assert_close(compiled(**plain).logits, expected)
        model.train()
        handle.detach()
        torch.testing.assert_close(compiled(**plain).logits.isfinite(), torch.ones(3, 2, dtype=torch.bool))
        model.eval()
        torch.testing.assert_close(compiled(**plain).logits, expected)


@pytest.mark.slow
def test_ad_drop_trains_compiled():
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        model = bert()
        handle = attnreg.attach(model, attnreg.CrossTuning(attnreg.AttributionProvider(0.6, 0.6)))
        runs = torch.compile(model, backend="aot_eager") if compiled else model
        method = FineTuning(runs, torch.optim.SGD(model.parameters(), lr=0.01), handle)
        torch.manual_seed(1)
        for epoch in range(2):
            method.on_epoch(epoch)
            losses += [float(method.step(batch()).loss) for _ in range(2)]
        assert method.drop_rates()
    assert losses[4:] == pytest.approx(losses[:4], abs=1e-5)


@pytest.mark.parametrize("how", ["torch.compile", "in place", "a part"])
def test_attaching_after_compiling_is_refused_with_advice(how):
    model = bert()
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    else:
        (model if how == "in place" else model.bert.encoder).compile(backend="eager")
    with pytest.raises(ValueError, match=r"is already compiled\. Attach first, then compile"):
        attnreg.attach(model, attnreg.AttentionLayerDrop())


@pytest.mark.slow
@NEEDS_TORCH_2_13
def test_one_graph_serves_all_lengths_as_that_of_the_plain_model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 16, 0.0, batch_first=True), 1).train()
    counter = CompileCounterWithBackend("eager")
    with attnreg.attach(model, attnreg.DropHead(0.3) & attnreg.AttentionDropout(0.3, "scores")) as handle:
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        batches = [torch.randn(size, length, 16) for size, length in ((2, 6), (3, 7), (5, 4))]
        passes = [(x, compiled(x), handle.seed) for x in batches]
        assert counter.frame_count == 1
        for x, out, seed in passes:
            with handle.replay(seed):
                torch.testing.assert_close(out, model(x))
            with handle.disabled():
                assert not torch.allclose(out, model(x), atol=1e-3)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("unidrop", "hidden-cut", "weights-dropout")] + ["blocks 0.5"])  # fmt: skip
def test_an_exported_program_draws_masks_of_its_own(name):
    model, inputs = bert(), {name: x for name, x in batch().items() if name != "labels"}
    provider = CASES[name](model)
    with attnreg.attach(model, provider) as handle:
        provider.attribute(model, batch())
        torch.manual_seed(3)
        expected, rates = model(**inputs).logits, handle.drop_rates()
        assert rates
        program = torch.export.export(model, (), inputs).module()
        assert handle.seed is None  # nothing was computed
        assert handle.drop_rates() == {}
        torch.manual_seed(3)
        torch.testing.assert_close(program(**inputs).logits, expected)
        assert not all(torch.allclose(program(**inputs).logits, expected) for _ in range(9))
        torch.manual_seed(3)
        assert torch.equal(model(**inputs).logits, expected)
        assert handle.drop_rates() == rates
        assert handle.report()


def test_what_cannot_be_exported_is_said():
    model, inputs = bert(), {name: x for name, x in batch().items() if name != "labels"}
    for provider, sentence in (
        (attnreg.AttributionProvider(), "AttributionProvider makes its masks for one batch, so torch.export cannot"),
        (
            attnreg.GNetProvider.for_model(model),
            "GNetProvider is calibrated in its first training pass: run one before",
        ),
    ):
        with attnreg.attach(model, provider) as handle:
            with pytest.raises(RuntimeError, match=sentence):
                torch.export.export(model, (), inputs)
            provider.attribute(model, batch())
            model(**inputs)
            assert handle.drop_rates()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of torch itself
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_a_backward_pass_that_computes_again_has_the_same_masks_or_is_refused(budget):
    model, gradients = bert(layers=1), []
    with attnreg.attach(model, attnreg.AttentionDropout(0.5)) as handle:
        for runs in (model, torch.compile(model, backend="aot_eager_decomp_partition")):
            torch._dynamo.reset()
            model.zero_grad()
            torch.manual_seed(0)
            with torch._functorch.config.patch(activation_memory_budget=budget):
                runs(**batch()).loss.backward()
            gradients.append([p.grad.clone() for p in model.bert.encoder.parameters()])
            assert min(handle.drop_rates().values()) > 0.2
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        torch._dynamo.reset()
        fails = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
        with (
            torch._functorch.config.patch(activation_memory_budget=budget),
            pytest.raises(RuntimeError, match="a compiled backward pass would draw its masks again"),
        ):
            fails(**batch())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch itself looks at
@pytest.mark.slow
def test_a_block_that_is_compiled_in_place_after_attaching():
    model = bert()
    with attnreg.attach(model, attnreg.AttentionDropout(0.5, placement="scores")) as handle:
        expected = model(**batch()).logits
        model.bert.encoder.layer[1].compile(backend="eager")
        with handle.replay():
            torch.testing.assert_close(model(**batch()).logits, expected)
        assert not torch.equal(model(**batch()).logits, expected)


@pytest.mark.slow
def test_the_mean_rate_counts_compiled_passes():
    model, ids = bert(1), batch()["input_ids"]
    with attnreg.attach(model, attnreg.AttentionDropout(0.4)) as handle:
        compiled, rates = torch.compile(model, backend="eager"), []
        for _ in range(3):
            compiled(input_ids=ids).logits.sum().backward()
            rates.append(handle.drop_rate_tensors()["encoder.0"])
            handle.step()
        assert len({float(each) for each in rates}) > 1
        assert abs(handle.rates.mean()["encoder.0"] - float(torch.stack(rates).mean())) < 1e-6
