"""AD-DROP as a provider and as a method: the life of its masks, cross-tuning, two passes."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.nn.parallel import DistributedDataParallel

import attnreg
from attnreg.errors import AttnRegWarning
from attnreg.regularizers import attribution
from attnreg.training import FineTuning, adamw
from tests.cases import SMALL, TEXT

BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9, 3], [9, 8, 7, 4, 0, 0]]),
    "attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]),
    "labels": torch.tensor([0, 1]),
}
VALID = BATCH["attention_mask"].bool()[:, None, None, :].expand(2, 4, 6, 6)


class Watch(attnreg.MaskProvider):
    """Notes what another provider answers."""

    def __init__(self, provider):
        super().__init__()
        self.provider = provider
        self.seen = {}

    def forward(self, site):
        mask = self.provider(site)
        self.seen[site.label] = None if mask is None else mask.scores
        return mask


def bert(**options):
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**{**TEXT, **SMALL, "initializer_range": 0.4, **options}))


def region_by_hand(attribution, p):
    region = torch.zeros_like(attribution, dtype=torch.bool)
    for b in range(2):
        n = int(BATCH["attention_mask"][b].sum())
        size = -int(-p * n // 1)
        for row, out in zip(attribution[b].flatten(0, 1), region[b].view(-1, 6), strict=True):
            if row[:n].min() < row[:n].max():
                out[row[:n].topk(size).indices] = True
    return region


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients", "attention", "random"])
@pytest.mark.parametrize("region", ["high", "low"])
def test_with_q_one_the_region_is_dropped_and_nothing_else(method, region):
    model = bert().train()
    provider = attnreg.AttributionProvider(0.5, 1.0, method, region, steps=3)
    with attnreg.attach(model, Watch(provider)) as handle:
        provider.attribute(model, BATCH)
        model(**BATCH)
    for label in ("encoder.0", "encoder.1"):
        attribution = provider.attributions[label] * (1 if region == "high" else -1)
        assert torch.equal(~handle.provider.seen[label], region_by_hand(attribution, 0.5))
        assert not (~handle.provider.seen[label] & ~VALID).any()


def test_each_candidate_is_dropped_with_probability_q():
    model = bert().train()
    provider = attnreg.AttributionProvider(0.5, 0.3, "attention")
    drops, candidates, copies = torch.zeros(2, 4, 6, 6), None, 100
    batch = {name: tensor.repeat(copies, *[1] * (tensor.dim() - 1)) for name, tensor in BATCH.items()}
    with attnreg.attach(model, Watch(provider)) as handle:
        for _ in range(20):
            provider.attribute(model, batch)
            model(**batch)
            candidates = region_by_hand(provider.attributions["encoder.0"][:2], 0.5)
            drops += (~handle.provider.seen["encoder.0"]).unflatten(0, (copies, 2)).sum(0)
            provider.step()
    rates = drops[candidates] / 2000
    assert not drops[~candidates].any()
    assert (rates - 0.3).abs().max() < 5 * (0.3 * 0.7 / 2000) ** 0.5
    assert abs(rates.mean() - 0.3) < 5 * (0.3 * 0.7 / 2000 / len(rates)) ** 0.5


def test_the_next_forward_pass_is_masked_and_the_one_after_is_not():
    model, provider = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train(), None
    plain = model(**BATCH).logits
    provider = attnreg.AttributionProvider(0.5, 1.0)
    with attnreg.attach(model, provider) as handle:
        provider.attribute(model, BATCH)
        assert torch.equal(model.eval()(**BATCH).logits, plain)  # an evaluation in between changes nothing
        masked = model.train()(**BATCH).logits
        assert not torch.equal(masked, plain)
        assert handle.drop_rates()["encoder.0"] > 0.4
        assert torch.equal(model(**BATCH).logits, plain)
        provider.attribute(model, BATCH)
        provider.step()
        assert torch.equal(model(**BATCH).logits, plain)
        provider.attribute(model, BATCH)
        provider.clear()
        assert provider.attributions == {}
        assert torch.equal(model(**BATCH).logits, plain)


def test_random_regions_need_no_first_pass():
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    plain = model(**BATCH).logits
    with attnreg.attach(model, attnreg.AttributionProvider(0.5, 1.0, "random")) as handle:
        masked = [model(**BATCH).logits for _ in range(2)]
        handle.step()
        masked.append(model(**BATCH).logits)
        assert torch.equal(model.eval()(**BATCH).logits, plain)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations([plain, *masked], 2))


def test_only_the_layers_asked_for():
    model = bert(num_hidden_layers=3).train()
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("ratio", "says"), [(1.5, 1), (1.1, 0), (0.5, 0)])
def test_a_first_pass_that_is_slower_in_half_precision_is_said_once(dtype, ratio, says, monkeypatch):
    monkeypatch.setattr(attribution, "times_float32", lambda dtype: ratio)
    attribution.warn_if_slower.cache_clear()
    model, provider = bert().train(), attnreg.AttributionProvider(first_pass_dtype=dtype)
    with attnreg.attach(model, provider), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            provider.attribute(model, BATCH)
    attribution.warn_if_slower.cache_clear()
    sentence = f"`first_pass_dtype='{dtype}'` makes AD-DROP slower here: on this CPU, a matrix product takes 1.5 times"
    assert [issubclass(each.category, AttnRegWarning) for each in caught] == [True] * says
    assert all(str(each.message).startswith(sentence) for each in caught)
    assert all(each.filename == __file__ for each in caught)


def test_a_cpu_is_asked_how_fast_half_precision_is_only_where_it_matters(monkeypatch):
    monkeypatch.setattr(attribution, "times_float32", lambda dtype: pytest.fail("asked"))
    attribution.warn_if_slower.cache_clear()
    for options, parameters in (({}, torch.float32), ({"first_pass_dtype": "bfloat16"}, torch.bfloat16)):
        model, provider = bert().to(parameters).train(), attnreg.AttributionProvider(**options)
        with attnreg.attach(model, provider):
            provider.attribute(model, BATCH)


def test_the_probe_of_half_precision_draws_nothing():
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert attribution.times_float32(torch.bfloat16) > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_use():
    model = bert().train()
    with pytest.raises(ValueError, match=r"Expected layers among \[0, 1\] in AttributionProvider, got \[7\]"):
        attnreg.attach(model, attnreg.AttributionProvider(layers=[7]))
    provider = attnreg.AttributionProvider()
    with attnreg.attach(model, provider):
        with pytest.raises(RuntimeError, match=r"needs `provider.attribute\(model, batch\)` before each training step"):
            model(**BATCH)
        provider.attribute(model, BATCH)
        with pytest.raises(
            ValueError, match=r"is not on the batch that `attribute` looked at \('input_ids' differs\): call `attr"
        ):
            model(**{name: tensor[:1] for name, tensor in BATCH.items()})


def test_a_function_as_target_is_not_saved(tmp_path):
    provider = attnreg.AttributionProvider(target=lambda output, batch: output.logits[:, 0])
    with pytest.raises(
        ValueError, match="AttributionProvider cannot be saved, because JSON cannot store one of its arguments"
    ):
        provider.save_pretrained(tmp_path / "provider")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("every", "offset"), [(2, 1), (2, 0), (3, 2), (1, 0)])
def test_cross_tuning(every, offset):
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    plain = model(**BATCH).logits
    provider = attnreg.CrossTuning(attnreg.AttentionLayerDrop(1.0), every=every, offset=offset)
    with attnreg.attach(model, provider) as handle:
        for epoch in range(7):
            provider.on_epoch(epoch)
            acts = epoch % every == offset
            assert provider.active == acts
            assert torch.equal(model(**BATCH).logits, plain) != acts
            assert set(handle.drop_rates().values()) == ({1.0} if acts else set())


def test_cross_tuning_within_a_composition():
    provider = attnreg.CrossTuning(attnreg.AttentionLayerDrop(1.0)) & attnreg.AttentionDropout(0.0)
    site = attnreg.AttentionSite(shape=(1, 1, 2, 2))
    assert provider.active
    assert provider(site).scores is None
    provider.on_epoch(1)
    assert not provider(site).scores
    assert not attnreg.OnLayers(attnreg.CrossTuning(attnreg.AttentionLayerDrop(1.0)), [0]).active


def test_cross_tuning_goes_on_in_its_epoch():
    provider = attnreg.CrossTuning(attnreg.AttentionLayerDrop(1.0))
    provider.on_epoch(3)
    other = attnreg.CrossTuning(attnreg.AttentionLayerDrop(1.0))
    other.load_state_dict(provider.state_dict())
    assert (other.epoch, other.active) == (3, True)


def test_two_pass_is_a_first_pass_and_a_step():
    losses = []
    for by_hand in (False, True):
        model = bert()
        optimizer = adamw(model, 1e-2)
        provider = attnreg.AttributionProvider(0.5, 0.5)
        torch.manual_seed(1)
        if by_hand:
            with attnreg.attach(model.train(), provider):
                for _ in range(4):
                    provider.attribute(model, BATCH)
                    loss = model(**BATCH).loss
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    provider.step()
        else:
            method = FineTuning(model, optimizer, provider)
            for _ in range(4):
                loss = method.step(BATCH).loss
            assert method.drop_rates()["encoder.0"] > 0
        losses.append(loss)
    assert torch.equal(*losses)


def test_no_first_pass_in_the_plain_epochs(monkeypatch):
    calls = []
    monkeypatch.setattr(attnreg.AttributionProvider, "attribute", lambda *args: calls.append(args))
    model = bert()
    provider = attnreg.CrossTuning(attnreg.AttributionProvider(0.5, 0.5))
    method = FineTuning(model, adamw(model, 1e-3), provider)
    method.on_epoch(0)
    method.step(BATCH)
    assert not calls
    assert method.drop_rates() == {}


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel(process_group):
    results = []
    for wrap in (lambda m: m, DistributedDataParallel):
        model = bert().train()
        provider = attnreg.AttributionProvider(0.5, 0.5)
        with attnreg.attach(model, provider):
            wrapped = wrap(model)
            torch.manual_seed(1)
            for _ in range(2):
                provider.attribute(wrapped, BATCH)
                loss = wrapped(**BATCH).loss
                loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
