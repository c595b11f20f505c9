"""AD-DROP as a provider and as a method: the life of its masks, cross-tuning, two passes."""

import itertools
import warnings

import pytest
import torch

import attnreg
from attnreg.errors import InputError
from attnreg.training import FineTuning, adamw
from tests.helpers.formulas import slow_region
from tests.helpers.regularizers import Watch
from tests.helpers.trainers import bert as bert_of_trainers

BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9, 3], [9, 8, 7, 4, 0, 0]]),
    "attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]),
    "labels": torch.tensor([0, 1]),
}
VALID = BATCH["attention_mask"].bool()[:, None, None, :].expand(2, 4, 6, 6)


def bert(dropout=0.1, **options):
    return bert_of_trainers(dropout, initializer_range=0.4, **options).train()


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients", "attention", "random"])
@pytest.mark.parametrize("region", ["high", "low"])
def test_with_q_one_the_region_is_dropped_and_nothing_else(method, region):
    model = bert()
    provider = attnreg.AttributionProvider(0.5, 1.0, method, region, steps=3)
    with attnreg.attach(model, Watch(provider)) as handle:
        provider.attribute(model, BATCH)
        model(**BATCH)
    assert list(handle.provider.seen) == ["encoder.0", "encoder.1"]
    for label, (_, dropped) in handle.provider.seen.items():
        assert torch.equal(dropped, slow_region(provider.attributions[label], VALID, 0.5, region))
        assert not (dropped & ~VALID).any()


def test_each_candidate_is_dropped_with_probability_q():
    model = bert()
    provider = attnreg.AttributionProvider(0.5, 0.3, "attention")
    drops, candidates, copies = torch.zeros(2, 4, 6, 6), None, 100
    batch = {name: tensor.repeat(copies, *[1] * (tensor.dim() - 1)) for name, tensor in BATCH.items()}
    with attnreg.attach(model, Watch(provider)) as handle:
        for _ in range(20):
            provider.attribute(model, batch)
            model(**batch)
            candidates = slow_region(provider.attributions["encoder.0"][:2], VALID, 0.5, "high")
            drops += handle.provider.seen["encoder.0"][1].unflatten(0, (copies, 2)).sum(0)
            provider.step()
    rates = drops[candidates] / 2000
    assert not drops[~candidates].any()
    assert (rates - 0.3).abs().max() < 5 * (0.3 * 0.7 / 2000) ** 0.5
    assert abs(rates.mean() - 0.3) < 5 * (0.3 * 0.7 / 2000 / len(rates)) ** 0.5


LOOKING = {
    # a provider that looks at each batch first, and the share that it then drops
    "ad-drop": (lambda: attnreg.AttributionProvider(0.5, 1.0), 0.5),
    "head-mask": (lambda: attnreg.HeadMask(1, by="importance"), 0.25),
    "hidden-attribution": (lambda: attnreg.HiddenAttributionDropout(0.5, 1.0), 0.5),
}


@pytest.mark.parametrize(("make", "rate"), LOOKING.values(), ids=LOOKING)
def test_a_first_pass_masks_the_next_training_pass_on_its_batch_alone(make, rate):
    model, provider = bert(0.0), make()
    plain = model(**BATCH).logits
    other = {**BATCH, "input_ids": BATCH["input_ids"] + 1}
    needs = rf"{type(provider).__name__} needs `provider.attribute\(model, batch\)` before each training step"
    with attnreg.attach(model, provider) as handle:
        with pytest.raises(RuntimeError, match=needs):
            model(**BATCH)
        provider.attribute(model, BATCH)
        assert torch.equal(model.eval()(**BATCH).logits, plain)  # an evaluation in between changes nothing
        assert not torch.equal(model.train()(**BATCH).logits, plain)
        assert next(iter(handle.drop_rates().values())) == pytest.approx(rate)
        assert torch.equal(model(**BATCH).logits, plain)
        assert not any(handle.drop_rates().values())
        for end in (provider.step, handle.step):
            provider.attribute(model, BATCH)
            end()
            assert torch.equal(model(**BATCH).logits, plain)
        for wrong, name in ((other, "input_ids"), ({name: tensor[:1] for name, tensor in BATCH.items()}, "input_ids")):
            provider.attribute(model, BATCH)
            with pytest.raises(
                ValueError, match=rf"not on the batch that `attribute` looked at \('{name}' differs\): call `attr"
            ):
                model(**wrong)


def test_a_first_pass_can_be_forgotten():
    model, provider = bert(0.0), attnreg.AttributionProvider(0.5, 1.0)
    plain = model(**BATCH).logits
    with attnreg.attach(model, provider):
        provider.attribute(model, BATCH)
        provider.clear()
        assert torch.equal(model(**BATCH).logits, plain)
        assert provider.attributions == {}


@pytest.mark.parametrize("make", [make for make, _ in LOOKING.values()], ids=LOOKING)
def test_a_first_pass_of_another_model_masks_nothing(make):
    first, second, provider = bert(0.0), bert(0.0), make()
    with attnreg.attach(first, provider):
        provider.attribute(first, BATCH)
    with (
        attnreg.attach(second, provider),
        pytest.raises(RuntimeError, match=r"needs `provider.attribute\(model, batch"),
    ):
        second(**BATCH)


@pytest.mark.parametrize("make", [make for make, _ in LOOKING.values()], ids=LOOKING)
def test_a_batch_that_is_changed_in_place_after_the_first_pass_is_noticed(make):
    model, provider = bert(0.0), make()
    batch = {name: tensor.clone() for name, tensor in BATCH.items()}
    with attnreg.attach(model, provider):
        provider.attribute(model, batch)
        batch["input_ids"][0, 0] = 6
        with pytest.raises(InputError, match=r"not on the batch .* looked at \('input_ids' differs"):
            model(**batch)


def test_random_regions_need_no_first_pass():
    model = bert(0.0)
    plain = model(**BATCH).logits
    with attnreg.attach(model, attnreg.AttributionProvider(0.5, 1.0, "random")) as handle:
        masked = [model(**BATCH).logits for _ in range(2)]
        handle.step()
        masked.append(model(**BATCH).logits)
        assert torch.equal(model.eval()(**BATCH).logits, plain)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations([plain, *masked], 2))


def test_only_the_layers_asked_for():
    model = bert(num_hidden_layers=3)
    provider = attnreg.AttributionProvider(0.5, 1.0, layers=[0, -1])
    with attnreg.attach(model, provider) as handle:
        provider.attribute(model, BATCH)
        model(**BATCH)
        rates = handle.drop_rates()
    assert list(provider.attributions) == ["encoder.0", "encoder.2"]
    assert repr(provider.attributions) == f"Attributions({provider.attributions.shapes})"  # no pages of numbers
    assert rates["encoder.1"] == 0 < rates["encoder.0"]
    inner = attnreg.AttributionProvider(0.5, 1.0)
    with attnreg.attach(model, attnreg.OnLayers(inner, [1])) as handle:
        handle.provider.attribute(model, BATCH)
    assert list(inner.attributions) == ["encoder.1"]


def test_a_first_pass_in_half_precision_attributes_nearly_the_same():
    found = []
    for dtype in (None, "bfloat16", "float16"):
        provider, model = attnreg.AttributionProvider(first_pass_dtype=dtype), bert()
        with attnreg.attach(model, provider):
            provider.attribute(model, BATCH)
            found.append(provider.attributions["encoder.0"])
    for rough in found[1:]:
        assert 0 < (rough - found[0]).norm() < 0.05 * found[0].norm()


@pytest.mark.parametrize(("every", "offset"), [(2, 1), (2, 0), (3, 2), (1, 0)])
def test_cross_tuning(every, offset):
    model = bert(0.0)
    plain = model(**BATCH).logits
    provider, restored = (attnreg.CrossTuning(attnreg.AttentionLayerDrop(1.0), every, offset) for _ in range(2))
    with attnreg.attach(model, provider) as handle:
        for epoch in range(7):
            provider.on_epoch(epoch)
            acts = epoch % every == offset
            assert provider.active == acts
            assert torch.equal(model(**BATCH).logits, plain) != acts
            assert set(handle.drop_rates().values()) == ({1.0} if acts else set())
            restored.load_state_dict(provider.state_dict())
            assert (restored.epoch, restored.active) == (epoch, acts)


def test_cross_tuning_within_a_composition():
    provider = attnreg.CrossTuning(attnreg.AttentionLayerDrop(1.0)) & attnreg.AttentionDropout(0.0)
    site = attnreg.AttentionSite(shape=(1, 1, 2, 2))
    assert provider.active
    assert provider(site).scores is None
    provider.on_epoch(1)
    assert not provider(site).scores
    assert not attnreg.OnLayers(attnreg.CrossTuning(attnreg.AttentionLayerDrop(1.0)), [0]).active


def test_a_step_is_a_first_pass_and_a_masked_one():
    model, slow = bert(), bert()
    method = FineTuning(model, adamw(model, 1e-2), attnreg.AttributionProvider(0.5, 0.5))
    torch.manual_seed(1)
    losses = [method.step(BATCH).loss for _ in range(4)]
    assert method.drop_rates()["encoder.0"] > 0
    optimizer, provider = adamw(slow, 1e-2), attnreg.AttributionProvider(0.5, 0.5)
    torch.manual_seed(1)
    with attnreg.attach(slow, provider):
        for expected in losses:
            provider.attribute(slow, BATCH)
            loss = slow(**BATCH).loss
            assert torch.equal(loss, expected)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(slow.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            provider.step()


def test_no_first_pass_in_the_plain_epochs(monkeypatch):
    monkeypatch.setattr(attnreg.AttributionProvider, "attribute", lambda *args: pytest.fail("a first pass"))
    model = bert()
    method = FineTuning(model, adamw(model, 1e-3), attnreg.CrossTuning(attnreg.AttributionProvider(0.5, 0.5)))
    method.on_epoch(0)
    method.step(BATCH)
    assert method.drop_rates() == {}


def test_ad_drop_trains_as_cross_tuned_attribution(tmp_path):
    def losses(provider):
        model = bert()
        method = FineTuning(model, adamw(model, 1e-2), provider)
        torch.manual_seed(1)
        for epoch in range(4):
            method.on_epoch(epoch)
            yield method.step(BATCH).loss

    short = attnreg.ADDrop(0.5, 0.6, layers=[0], every=2, method="attention")
    attribution_provider = attnreg.AttributionProvider(0.5, 0.6, layers=[0], method="attention")
    expected = [*losses(attnreg.CrossTuning(attribution_provider, every=2))]
    assert torch.equal(torch.stack([*losses(short)]), torch.stack(expected))
    short.save_pretrained(tmp_path / "saved")
    restored = attnreg.ADDrop.from_pretrained(tmp_path / "saved")
    assert restored.config == short.config == {
        "p": 0.5, "q": 0.6, "layers": [0], "every": 2, "offset": 1, "method": "attention",
    }  # fmt: skip
    assert (restored.epoch, restored.active) == (3, True)


def test_cross_tuning_in_every_epoch_needs_no_epoch(patience):
    with warnings.catch_warnings(), attnreg.attach(model := bert(), attnreg.ADDrop(every=1, offset=0)) as handle:
        warnings.simplefilter("error")
        for _ in range(patience + 1):
            handle.provider.attribute(model, BATCH)
            model(**BATCH).loss.backward()
