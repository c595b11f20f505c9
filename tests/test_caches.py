"""Caches of keys and values: each pass has that of its batch, and a continuation has the masks of the whole."""

import copy
import functools

import pytest
import torch
import transformers as hf

import attnreg
from attnreg.attendout.rewards import negative_loss
from attnreg.integrations import RegularizedTrainer
from attnreg.training import SAM, FineTuning, R3FLoss, RDropLoss, adamw
from tests.helpers.cases import CACHE, SMALL, sample

IDS = torch.randint(1, 9, (3, 8), generator=torch.Generator().manual_seed(0))


def llama(**options):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "vocab_size": 50, "num_key_value_heads": 4, **options}))


def continued(model, keys):
    """A batch whose first tokens are in a cache."""
    with torch.no_grad():
        model(input_ids=IDS[:, :5], **{CACHE: keys})
    return {"input_ids": IDS[:, 5:], "labels": IDS[:, 5:], CACHE: keys}


@pytest.mark.parametrize("cache", [hf.DynamicCache, functools.partial(hf.StaticCache, max_cache_len=16)])
@pytest.mark.parametrize("case", ["attribute", "learnable", "hidden", "r-drop", "r3f", "sam"])
def test_each_pass_has_the_cache_of_the_batch(case, cache):
    model = llama().double()
    keys = cache(config=model.config)
    batch = continued(model, keys)
    plain = float(model(**{**batch, CACHE: copy.deepcopy(keys)}).loss.detach())
    provider = {
        "attribute": attnreg.AttributionProvider(0.5, 0.0),
        "learnable": attnreg.LearnableBernoulli(2, p=1e-9, regularizer=0.0),
        "hidden": attnreg.HiddenAttributionDropout(0.5, 0.0),
    }.get(case)
    objective = {"r-drop": RDropLoss(1.0), "r3f": R3FLoss(eps=1e-12)}.get(case)
    optimizer = adamw(model, 0.0)
    if case == "learnable":
        optimizer.add_param_group({"params": provider.learned_parameters()})
    if case == "sam":
        method = SAM(model, optimizer, rho=1e-12)
    else:
        method = FineTuning(model, optimizer, provider, objective=objective)
    for _ in range(2):
        assert float(method.step(batch).loss) == pytest.approx(plain, rel=1e-6)
        assert float(negative_loss(model, batch).mean().detach()) == pytest.approx(-plain, rel=1e-6)  # a reward
    assert int(keys.get_seq_length()) == 5


def test_a_cache_of_example_inputs_or_of_a_trainer_stays_as_it_is(tmp_path):
    model = llama().double()
    keys = hf.DynamicCache(config=model.config)
    batch = continued(model, keys)
    attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=batch).detach()
    attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(IDS[:, 5:], None, None, keys)).detach()
    assert int(keys.get_seq_length()) == 5
    grown = hf.DynamicCache(config=model.config)
    model(input_ids=IDS[:, :5], **{CACHE: grown})  # with gradients
    attnreg.attach(model, attnreg.DropKey(0.5), example_inputs={**batch, CACHE: grown}).detach()
    loss = float(FineTuning(model, adamw(model, 0.0)).step({**batch, CACHE: grown}).loss)
    assert loss == pytest.approx(float(model(**{**batch, CACHE: copy.deepcopy(keys)}).loss.detach()), rel=1e-6)
    arguments = hf.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = RegularizedTrainer(model.train(), arguments, objective=RDropLoss(1.0))
    losses = [float(trainer.compute_loss(model, batch).detach()) for _ in range(2)]
    assert losses == pytest.approx([float(model(**batch).loss.detach())] * 2, rel=1e-6)


def test_a_static_cache_of_padding_continues_its_masks():
    model = llama().eval()
    mask = (torch.arange(8) > 1).long().expand(3, -1)  # each row begins with two tokens of padding
    with attnreg.attach(model, attnreg.DropKey(0.5)) as handle, torch.no_grad():
        with handle.replay(3):
            whole = model(input_ids=IDS, attention_mask=mask).logits
        cache, parts = hf.StaticCache(config=model.config, max_cache_len=16), []
        for begin, end in ((0, 5), (5, 8)):
            with handle.replay(3):
                given = {"attention_mask": mask[:, :end], CACHE: cache, "use_cache": True}
                parts.append(model(input_ids=IDS[:, begin:end], **given).logits)
    assert torch.allclose(torch.cat(parts, 1)[:, 2:], whole[:, 2:], atol=1e-5)


CACHED = {
    "scores": lambda: attnreg.AttentionDropout(0.5, placement="scores"),
    "weights": lambda: attnreg.AttentionDropout(0.5),
    "DropHead": lambda: attnreg.DropHead(0.5),
    "DropKey": lambda: attnreg.DropKey(0.5, share_heads=True),
    "DropKey, shared": lambda: attnreg.DropKey(0.5, share_queries=True),
    "DropAttention": lambda: attnreg.DropAttention(0.5),
    "AttentionLayerDrop": lambda: attnreg.AttentionLayerDrop(0.5),
    "LayerDrop": lambda: attnreg.LayerDrop(0.7),  # skips the first layer in the pass of seed 7
}


# for one token, transformers packs heads that share keys as queries
@pytest.mark.parametrize(("kernel", "groups"), sample([("sdpa", 4), ("sdpa", 2), ("eager", 2), ("eager", 4)], lambda kernel, groups: kernel == "sdpa"))  # fmt: skip
@pytest.mark.parametrize("name", CACHED)
def test_a_cached_continuation_equals_the_full_pass(name, kernel, groups):
    model = llama(num_key_value_heads=groups, initializer_range=0.3, attn_implementation=kernel).eval()
    ids, config = torch.randint(1, 50, (2, 8)), model.config
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[1, :2] = 0
    with attnreg.attach(model, CACHED[name]()) as handle, torch.no_grad(), handle.replay(7):
        for mask in (padding, None):
            full = model(input_ids=ids, attention_mask=mask).logits
            for cache in (hf.DynamicCache(config=config), hf.StaticCache(config=config, max_cache_len=11)):
                parts = []
                for begin, end in ((0, 5), (5, 6), (6, 8)):
                    given = None if mask is None else mask[:, :end]
                    out = model(input_ids=ids[:, begin:end], attention_mask=given, **{CACHE: cache})
                    parts.append(out.logits)
                difference = (torch.cat(parts, 1) - full)[padding.bool()].abs().max()
                assert difference < 1e-4, (mask is None, type(cache).__name__)
