"""Every provider on every model: what attaching promises."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import attnreg
from tests.helpers.cases import MODELS, output, pairs, refusal, shown_attentions
from tests.helpers.passes import Recorder, Traces, checkpointed, models, run, same, under_both_kernels, without_dropout
from tests.helpers.provider_cases import PROVIDERS

rows = pytest.mark.parametrize(("case", "provider_case"), pairs(), ids=lambda x: str(x))
some_rows = pytest.mark.parametrize(("case", "provider_case"), pairs(on_few=True), ids=lambda x: str(x))
portable = pytest.mark.parametrize(("case", "provider_case"), pairs(lambda p: p.portable, on_few=True), ids=lambda x: str(x))  # fmt: skip


def count_calls(module, args, out):
    module.__dict__["seen"] = module.__dict__.get("seen", 0) + 1


def pop_counts(model):
    return [module.__dict__.pop("seen", 0) for module in model.modules()]


@some_rows
def test_in_eval_mode_disabled_and_detached_it_is_bitwise_the_plain_model_without_a_trace(case, provider_case):
    model, batch = case.build(), case.batch()
    provider = provider_case.make(model)
    for module in model.modules():
        module.register_forward_hook(count_calls)

    def in_eval_mode():
        model.eval()
        with torch.no_grad():
            without_grad = output(model, batch)
        outputs = without_grad, output(model, batch)
        model.train()
        return outputs

    expected, plain = in_eval_mode(), run(model, batch)
    pop_counts(model)
    assert same(run(model, batch), plain)
    before, calls = Traces(model), pop_counts(model)
    random = torch.get_rng_state()
    handle = attnreg.attach(model, provider)
    assert torch.equal(torch.get_rng_state(), random)
    assert list(model.state_dict()) == before.keys
    assert [(name, type(m)) for name, m in model.named_modules()] == before.classes
    assert [m.training for m in model.modules()] == before.modes
    assert [(name, id(p)) for name, p in model.named_parameters()] == before.parameters
    assert attnreg.is_attached(model)
    assert all(map(torch.equal, in_eval_mode(), expected))
    assert torch.equal(torch.get_rng_state(), random)
    with handle.disabled():
        assert same(run(model, batch), plain)
    provider.eval()
    assert same(run(model, batch), plain)
    provider.train()
    run(model, batch)
    handle.detach()
    handle.detach()
    assert not attnreg.is_attached(model)
    pop_counts(model)
    assert same(run(model, batch), plain)
    assert vars(Traces(model)) == vars(before)
    assert pop_counts(model) == calls


@rows
def test_attached_trains_otherwise_than_plain_and_stays_finite(case, provider_case):
    model, batch = case.build(), case.batch()
    without_dropout(model)
    plain = run(model, batch)
    with attnreg.attach(model, provider_case.make(model)) as handle:
        attached = run(model, batch)
        rates = handle.drop_rates()
    assert torch.equal(attached[0], plain[0]) is not provider_case.changes_output
    assert not same(attached, plain)
    assert attached[0].isfinite().all()
    assert all(grad.isfinite().all() for grad in attached[1] if grad is not None)
    # Distributed data parallel waits for every parameter that has had a gradient before.
    assert [grad is None for grad in attached[1]] == [grad is None for grad in plain[1]]
    assert set(rates) == {site.label for site in handle.sites}
    assert any(0 < rate <= 1 for rate in rates.values()) is provider_case.drops


@some_rows
def test_copies_are_attached_to_a_copy_of_the_provider(case, provider_case):
    model, batch = case.build(), case.batch()
    with attnreg.attach(model, provider_case.make(model)) as handle:
        clones = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # torch.save: tests/test_copies.py
        expected = run(model, batch)
        for clone in clones:
            assert same(run(clone, batch), expected)
            attnreg.detach(clone)
            assert not attnreg.is_attached(clone)
            assert not same(run(clone, batch), expected)
        assert handle.attached
        assert same(run(model, batch), expected)


@some_rows
def test_gradient_checkpointing_sees_the_same_masks(case, provider_case):
    expected, within, around = checkpointed(case, provider_case.make)
    assert same(within, expected)
    assert same(around, expected)


@pytest.mark.parametrize("provider_case", [p for p in PROVIDERS if refusal(MODELS[0], p) is None], ids=str)
def test_masks_do_not_depend_on_how_far_a_batch_is_padded(provider_case):
    model, batch = MODELS[0].build().double(), MODELS[0].batch()
    without_dropout(model)
    provider, got = provider_case.make(model).double(), []
    with attnreg.attach(model, provider) as handle:
        run(model, batch)  # calibrates what is calibrated
        for more in (0, 3):
            padded = {name: nn.functional.pad(value, (0, more)) for name, value in batch.items()}
            provider.attribute(model, padded)
            with handle.replay(5):
                got.append(output(model, padded))
    torch.testing.assert_close(got[1], got[0], rtol=0, atol=1e-9)


@some_rows
def test_autocast_to_bfloat16(case, provider_case):
    model, batch = case.build(), case.batch()
    with attnreg.attach(model, provider_case.make(model)), torch.autocast("cpu", torch.bfloat16):
        out, grads = run(model, batch)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads if grad is not None)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("case", "provider_case"), pairs(lambda p: p.made_for_model), ids=lambda x: str(x))
def test_what_learns_with_the_model_has_finite_gradients_in_every_layer(case, provider_case, autocast):
    model, batch = case.build(), case.batch()
    provider = provider_case.make(model)
    with attnreg.attach(model, provider), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        provider.attribute(model, batch)
        out = output(model, batch)
        penalty = provider.penalty()
    assert penalty.shape == ()
    (out.float().square().mean() + penalty).backward()
    for name, parameter in provider.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isfinite().all(), name


@portable
def test_provider_comes_back_from_its_folder(case, provider_case, tmp_path):
    model, batch = case.build(), case.batch()
    provider = provider_case.make(model)
    with attnreg.attach(model, provider):
        run(model, batch)  # calibrates what is calibrated
        provider.step()
        for parameter in provider.parameters():
            parameter.data += torch.randn_like(parameter) / 10
        expected = run(model, batch)
    provider.save_pretrained(tmp_path / "provider")
    assert sorted(p.name for p in (tmp_path / "provider").iterdir()) == [
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
    ]
    with attnreg.attach(model, type(provider).from_pretrained(tmp_path / "provider")):
        assert same(run(model, batch), expected)


@pytest.mark.parametrize(("case", "provider_case"), pairs(refused=True), ids=lambda x: str(x))
def test_unsupported_pairs_are_refused_before_anything_changes(case, provider_case):
    model = case.build()
    before = Traces(model)
    with pytest.raises(ValueError, match=refusal(case, provider_case)):
        attnreg.attach(model, provider_case.make(model))
    assert vars(Traces(model)) == vars(before)


class Raising(attnreg.MaskProvider):
    def forward(self, site):
        raise ZeroDivisionError


class Interrupting(attnreg.MaskProvider):
    def forward(self, site):
        raise KeyboardInterrupt


@models
@pytest.mark.parametrize(("provider", "error"), [(Raising, ZeroDivisionError), (Interrupting, KeyboardInterrupt)])
def test_an_exception_in_the_middle_leaves_no_trace(case, provider, error):
    model, batch = case.build(), case.batch()
    before, plain = Traces(model), run(model, batch)
    handle = attnreg.attach(model, provider())
    with pytest.raises(error):
        output(model, batch)
    assert not _get_current_function_mode_stack()
    handle.detach()
    assert vars(Traces(model)) == vars(before)
    assert same(run(model, batch), plain)


@models
def test_a_provider_that_keeps_everything_changes_nothing_and_is_asked_once_a_site(case):
    model, batch = case.build(), case.batch()
    plain, recorder = run(model, batch), Recorder()
    with attnreg.attach(model, recorder, stacks=list(case.stacks)) as handle:
        assert same(run(model, batch), plain)
    assert [site.label for site in recorder.sites] == [site.label for site in handle.sites]
    assert [site.name for site in recorder.sites] == [site.name for site in handle.sites]
    assert sorted({(s.stack, s.num_layers) for s in handle.sites}) == sorted(case.stacks.items())
    assert sorted(s.label for s in handle.sites) == sorted(f"{k}.{i}" for k, n in case.stacks.items() for i in range(n))
    assert recorder.prepared == [batch] or all(torch.equal(recorder.prepared[0][k], v) for k, v in batch.items())
    assert len(recorder.prepared) == 1
    for site in recorder.sites:
        assert site.shape[0] == 3
        assert site.shape[1] == 4
        assert site.units is None or site.units.any()


@models
def test_masks_reach_exactly_the_layers_asked_for(case):
    model, recorder = case.build(), Recorder()
    stack = next(iter(case.stacks))
    with attnreg.attach(model, recorder, layers=[-1], stacks=[stack]) as handle:
        output(model, case.batch())
    assert [site.label for site in recorder.sites] == [f"{stack}.1"] == [site.label for site in handle.sites]


@models
def test_validity_is_what_the_model_was_given(case):
    model, recorder, batch = case.build(), Recorder(), case.batch()
    with attnreg.attach(model, recorder, stacks=list(case.stacks)):
        output(model, batch)
    real = batch.get("attention_mask", torch.ones(3, 1)).bool()
    for site in recorder.sites:
        queries, keys = site.shape[2:]
        expected = torch.ones(3, queries, keys, dtype=torch.bool)
        if site.stack != "decoder" or case.inputs == "ids":
            expected &= real[:, None, :]
        if site.stack == "decoder":
            expected &= torch.ones(queries, keys, dtype=torch.bool).tril()
        got = torch.ones(()).bool() if site.valid is None else site.valid
        got = got.expand(site.shape)[:, 0]
        if site.name == "model.layers.1.attn" and case.name == "modernbert":
            expected &= (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 2  # its local window
        # What happens in the rows of padding is the model's own affair; DeBERTa allows them nothing.
        rows = real if site.stack == "encoder" or case.inputs == "ids" else torch.ones(3, queries).bool()
        assert torch.equal(got[rows.expand(3, queries)], expected[rows.expand(3, queries)]), site.label


class DropFirstKey(attnreg.MaskProvider):
    """Deterministic: drops key 0 everywhere, and in row 1 every key."""

    def forward(self, site):
        keep = torch.ones(site.shape[-2:], dtype=torch.bool)
        keep[:, 0] = False
        keep[1] = False
        return attnreg.Mask(scores=keep)


@pytest.mark.parametrize("case", [c for c in MODELS if c.eager], ids=str)
def test_fused_and_written_out_attention_agree_and_show_the_mask(case):
    plain, (fused, _), (written_out, _) = under_both_kernels(case, DropFirstKey(), layers=[1])
    # Models that upcast their softmax to float32 are exact to 1e-7 only when written out.
    assert (written_out - fused).abs().max() < 1e-6
    assert (plain - fused).abs().max() > 1e-8
    model = case.build()
    without_dropout(model)
    with attnreg.attach(model, DropFirstKey(), layers=[1], stacks=list(case.stacks)):
        shown = shown_attentions(case, model, case.batch())
    for attentions in shown.values():
        assert attentions[0][:, :, 2:, 0].gt(0).any()
        masked = attentions[1]
        assert masked[:, :, 2:, 0].abs().max() == 0
        allowed = masked[:, :, 1] > 0  # the row of which everything was dropped is uniform over valid keys
        uniform = allowed / allowed.sum(-1, keepdim=True)
        assert (masked[:, :, 1] - uniform).abs().max() < 1e-6
