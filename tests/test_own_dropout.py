"""One seed, one pass, in every family: own dropout, stochastic depth, LayerDrop and jitter follow from it."""

import contextlib
import copy
import itertools
import pickle

import pytest
import torch
import transformers as hf
from transformers import DynamicCache, StaticCache

import attnreg
from attnreg.errors import InputError
from tests.helpers.cases import CACHE, keep_few_activations, sample
from tests.helpers.own_dropout_cases import (
    EVERY,
    FAMILIES,
    MASKED,
    OPTIONS,
    SEED,
    assert_same,
    batch_of,
    build,
    check_the_side_of_padding,
    outputs,
    pass_of,
    seeded,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@EVERY
def test_a_pass_repeats_bit_for_bit_and_another_seed_gives_another(family):
    model = build(family)
    handle, batch = attnreg.seeded(model), batch_of(family)
    first, seed = outputs(model, batch), handle.seed
    other = outputs(model, batch)
    assert handle.seed != seed
    assert not torch.equal(first, other)
    with handle.replay(seed):
        assert torch.equal(outputs(model, batch), first)
        with torch.no_grad():
            assert torch.equal(outputs(model, batch), first)


@EVERY
def test_kernels_agree(family):
    eager, *others = FAMILIES[family].kernels
    if not others:
        pytest.skip("one kernel")
    assert_same(pass_of(family, eager), pass_of(family, others[0]))


@pytest.mark.parametrize(("family", "options"), [
    (family, options) for family, row in FAMILIES.items() if row.checkpoints for options in OPTIONS
    if family == "bert" or not options["preserve_rng_state"]
])  # fmt: skip
def test_gradient_checkpointing_draws_the_same(family, options):
    assert_same(pass_of(family), pass_of(family, options=options))


def test_lower_precision_repeats_bit_for_bit_too():
    passes = []
    for kernel in ("sdpa", "eager", "sdpa"):
        model, batch = build("bert", kernel), batch_of("bert")
        with attnreg.seeded(model) as handle, handle.replay(SEED), torch.autocast("cpu", torch.bfloat16):
            passes.append(model(**batch).logits)
    assert torch.equal(passes[0], passes[2])
    assert torch.allclose(passes[0], passes[1], rtol=0.1, atol=0.02)


@EVERY
def test_eval_mode_and_a_detached_model_are_plain(family):
    model, batch = build(family), batch_of(family)
    torch.manual_seed(1)
    training = outputs(model, batch)
    plain = outputs(model.eval(), batch)
    keys = list(model.state_dict())
    with attnreg.seeded(model) as handle:
        assert torch.equal(outputs(model, batch), plain)
        with handle.replay(SEED):
            assert torch.equal(outputs(model, batch), plain)
        assert list(model.state_dict()) == keys
        copied = copy.deepcopy(model) if family != "bert" else pickle.loads(pickle.dumps(model))
    for each in (copied, model):
        with attnreg.seeded(each) if each is model else contextlib.nullcontext():
            each.train()
            assert not torch.equal(outputs(each, batch), plain)
    torch.manual_seed(1)
    assert torch.equal(outputs(model, batch), training)
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert attnreg.is_attached(copied)
    assert not attnreg.is_attached(model)


WITH_ROWS = [name for name, row in FAMILIES.items() if row.rows]


@pytest.mark.parametrize("family", WITH_ROWS)
def test_parts_of_a_batch_draw_what_the_whole_draws(family):
    whole = pass_of(family)
    model, batch, parts = build(family), batch_of(family), []
    handle = attnreg.seeded(model)
    for rows in ([0, 1], [5, 4, 2], [7, 3], [6]):  # in any order and number
        part = {name: value[rows] for name, value in batch.items()}
        if family in ("bert", "roberta"):  # and of any length
            part = {name: value[:, : int(part["attention_mask"].sum(1).max())] for name, value in part.items()}
        with handle.replay(SEED, rows):
            out = outputs(model, part)
        out.square().sum().backward()
        parts += zip(rows, out.detach(), strict=True)
    out = torch.stack([out for _, out in sorted(parts, key=lambda part: part[0])])
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert_same(whole, (out, grads))


def test_rows_are_refused_where_samples_are_unknown():
    model, batch = build("switch"), batch_of("switch", 2)
    handle = attnreg.seeded(model)
    with handle.replay(SEED, [2, 3]), pytest.raises(ValueError, match=r"has shape .* of 2 samples: replay the whole"):
        model(**batch)
    with handle.replay(SEED, [2]), pytest.raises(ValueError, match="an index for each of 2 samples, got 1"):
        model(**batch)


def test_rows_are_refused_where_they_may_be_tokens():
    model, batch = build("bert"), batch_of("bert", 6)  # of six tokens
    handle = attnreg.seeded(model)
    with handle.replay(SEED, [5, 4, 3, 2, 1, 0]), pytest.raises(InputError, match="which of its values belong to whic"):
        model(**batch)


MASKED += ["DropHead(0.4) & HiddenNoise(0.1)"]
SIDES = [
    ("gpt2", "eager", None),
    ("opt", "sdpa", None),
    ("llama with lora", "sdpa", None),
    *(("llama with lora", "sdpa", text) for text in MASKED),
]


@pytest.mark.parametrize(("family", "kernel", "text"), SIDES)
def test_the_side_of_padding_does_not_matter(family, kernel, text):
    check_the_side_of_padding(family, kernel, text)


def cache_of(model, *, static):
    return StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("family", "text"), [("gpt2", None), ("opt", None), ("llama with lora", None), ("llama with lora", MASKED[2])]
)
def test_a_cached_continuation_goes_on(family, text, static, compiled):
    torch._dynamo.reset()
    model, ids = build(family), torch.randint(2, 40, (2, 8), generator=torch.Generator().manual_seed(1))
    # torch.compile cannot follow the calls of two regularizers in those of pytest.
    text = text.partition(" & ")[0] if compiled and text else text
    handle, run = seeded(model, text), torch.compile(model, backend="aot_eager") if compiled else model
    padded = torch.ones_like(ids)
    padded[0, :2] = 0
    bounds = (0, 3, 6, 8) if static or compiled else (0, 4, 6, 7, 8)
    for mask in (None,) if compiled else (None, padded):  # with a mask, heads that share keys are packed for one token
        cache, parts = cache_of(model, static=static), []
        with torch.no_grad(), handle.replay(SEED):
            whole = model(input_ids=ids, attention_mask=mask).logits
            for begin, end in itertools.pairwise(bounds):
                seen = None if mask is None else mask[:, :end]
                part = run(input_ids=ids[:, begin:end], attention_mask=seen, use_cache=True, **{CACHE: cache})
                parts.append(part.logits)
        real = padded.bool() if mask is not None else slice(None)
        torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-4, atol=1e-5)


def with_windows(window):
    """A Gemma 3 with layers that attend to the latest tokens only, and a layer that attends to all."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.2}
    torch.manual_seed(0)
    config = hf.Gemma3TextConfig(**sizes, **heads, layer_types=kinds, sliding_window=window)
    return hf.Gemma3ForCausalLM(config).train()


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("window", [12, 4])
def test_a_cache_with_sliding_windows_is_continued_as_long_as_it_has_all_tokens(window, static):
    model, ids = with_windows(window), torch.arange(3, 21).view(2, 9)
    handle, cache = attnreg.seeded(model), cache_of(model, static=static)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad(), handle.replay(SEED):
        whole = model(input_ids=ids, attention_mask=mask).logits
        model(input_ids=ids[:, :4], attention_mask=mask[:, :4], use_cache=True, **{CACHE: cache})
        more = {"input_ids": ids[:, 4:], "attention_mask": mask, CACHE: cache, "use_cache": True}
        if window < 9:
            with pytest.raises(InputError, match="A cache with a sliding window of 4 tokens forgets the first ones"):
                model(**more)
        else:
            torch.testing.assert_close(model(**more).logits, whole[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("length", [3, 6])  # 6: as long as what the encoder reads
def test_a_cached_continuation_of_a_decoder_goes_on(family, length):
    model, batch = build(family), batch_of(family, 2)
    if family == "bart":
        model.model.decoder.layerdrop = 0.0  # BART counts the tokens in the cache of its first layer
    handle, ids = attnreg.seeded(model), batch.pop("decoder_input_ids").repeat(1, 2)
    with torch.no_grad(), handle.replay(SEED):
        whole = model(**batch, decoder_input_ids=ids)
        begun = model(**batch, decoder_input_ids=ids[:, :-length], use_cache=True)
        last = model(**batch, decoder_input_ids=ids[:, -length:], **{CACHE: begun[CACHE]})
    torch.testing.assert_close(torch.cat([begun.logits, last.logits], 1), whole.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.encoder_last_hidden_state, whole.encoder_last_hidden_state)


@pytest.mark.parametrize(
    ("text", "options"),
    sample(
        itertools.product(
            [
                "UniDrop(0.2, 0.3, 0.4)",
                "AttentionDropout(0.3)",
                "AttentionDropout(0.3, placement='scores')",
                "AttentionLayerDrop(1.0)",
            ],
            [None, *OPTIONS[1:]],
        ),
        lambda text, options: options is None or text.startswith("UniDrop"),
    ),
    ids=str,
)
def test_masks_and_own_dropout_follow_one_seed(text, options):
    passes = []
    for kernel in ("sdpa", "eager"):
        model, batch = build("bert", kernel), batch_of("bert")
        with attnreg.attach(model, attnreg.parse_provider(text, model), own_dropout="seeded") as handle:
            if options is not None and kernel == "eager":
                keep_few_activations(model, options)
                model.enable_input_require_grads()
            torch.manual_seed(1)
            out = model(**batch).logits
            out.square().sum().backward()
            with handle.replay():
                assert torch.equal(model(**batch).logits, out)
        passes.append((out.detach(), [p.grad for p in model.parameters()]))
    assert_same(*passes)


def test_parts_that_are_called_one_by_one_are_one_pass():
    model, batch = build("bert"), batch_of("bert")
    handle = attnreg.seeded(model)

    def by_hand():
        return model.dropout(model.bert(**batch).pooler_output)

    first, seed = by_hand(), handle.seed
    assert not torch.equal(by_hand(), first)
    assert handle.seed != seed
    with handle.replay(seed):
        assert torch.equal(by_hand(), first)
    model.eval()
    model.dropout.train()
    hidden = torch.ones(2, 16)
    with handle.replay(SEED):
        assert torch.equal(model.dropout(hidden), model.dropout(hidden))


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, "AttentionDropout(0.3)"])
def test_a_compiled_pass_draws_the_same(text):
    torch._dynamo.reset()
    model, batch = build("bert"), batch_of("bert")
    provider = None if text is None else attnreg.parse_provider(text, model)
    handle = attnreg.seeded(model) if text is None else attnreg.attach(model, provider, own_dropout="seeded")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    passes = []
    for run in (model, compiled):
        model.zero_grad()
        with handle.replay(SEED):
            out = outputs(run, batch)
        out.square().sum().backward()
        passes.append((out.detach(), [p.grad.clone() for p in model.parameters()]))
    assert_same(*passes)
    first, second = outputs(compiled, batch), outputs(compiled, batch)
    assert not torch.equal(first, second)
    with handle.replay():
        assert torch.allclose(outputs(compiled, batch), second, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_pass_that_would_draw_again_is_refused(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 0.3)
    model = build("bert")
    attnreg.seeded(model)
    with pytest.raises(Exception, match="activation_memory_budget` below 1"):
        outputs(torch.compile(model, backend="aot_eager", fullgraph=True), batch_of("bert"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_encoder_decoder_runs_uncompiled(fullgraph):
    model, batch = build("t5"), batch_of("t5")
    handle = attnreg.seeded(model)
    with handle.replay(SEED):
        expected = outputs(model, batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=fullgraph)
    with handle.replay(SEED):
        torch.testing.assert_close(outputs(compiled, batch), expected)


IN_PROCESSES = """
import torch, torch.distributed as dist
import attnreg
from tests.helpers.own_dropout_cases import SEED, batch_of, build

dist.init_process_group("gloo")
model, batch = build("bert"), batch_of("bert")
handle = attnreg.seeded(model)
network = torch.nn.parallel.DistributedDataParallel(model)
rows = torch.arange(dist.get_rank(), 8, dist.get_world_size())
with handle.replay(SEED, rows):
    network(**{name: value[rows] for name, value in batch.items()}).logits.square().sum().backward()
if dist.get_rank() == 0:
    torch.save([2 * p.grad for p in model.parameters()], "gradients.pt")  # the gradients are means over processes
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(warm, tmp_path):
    code, output = warm.run("-c", IN_PROCESSES, cwd=tmp_path, timeout=200, processes=2)
    assert code == 0, output
    out, grads = pass_of("bert")
    assert_same((out, torch.load(tmp_path / "gradients.pt")), (out, grads))
