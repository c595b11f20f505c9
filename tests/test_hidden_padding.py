"""Which tokens of hidden states are padding, whoever is told so, and when checkpointing repeats a part of a pass."""

import copy
import functools
import itertools
from contextlib import nullcontext

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.injection.running.padding import Padding
from tests.helpers import handwritten
from tests.helpers.cases import SMALL
from tests.helpers.models import clip
from tests.helpers.regularizers import Scale

PADDING = torch.tensor([[False] * 2 + [True] * 4, [False] * 5 + [True]])
LENGTHS = [2, 5]


def lengths(provider):
    return {site.label: site.lengths.tolist() for site, _ in provider.seen}


@pytest.mark.parametrize("batch_first", [False, True])
def test_samples_come_first_and_torch_says_what_is_padding(batch_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    model, provider = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), Scale("output")
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2, 5, 8)
    with attnreg.attach(model, provider):
        model(x if batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
    for site, _ in provider.seen:
        assert site.shape == (2, 5, 8)
        assert site.lengths.tolist() == [5, 3]


@pytest.mark.parametrize("given", [True, False])
def test_layers_of_torch_are_given_the_mask_in_another_form(given):
    """In numbers that are added, where that of the whole is True for padding; both say the same."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, provider = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), Scale("output")
    padding, x = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]), torch.randn(2, 5, 8)
    example = {"src": x, **({"src_key_padding_mask": padding} if given else {})}
    with attnreg.attach(model, provider & attnreg.HiddenDropout(0.5, "span"), example_inputs=example):
        model(x, src_key_padding_mask=padding)
    assert [site.lengths.tolist() for site, _ in provider.seen] == [[5, 3]] * 2


def test_a_mask_of_other_tokens_makes_padding_unknown():
    class Prefixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

        def forward(self, x, attention_mask=None):
            return self.encoder(torch.cat([x.new_zeros(len(x), 2, 8), x], 1))

    model, x = Prefixed().train(), torch.randn(2, 5, 8)
    with attnreg.attach(model, attnreg.HiddenDropout(0.5, "span"), example_inputs=(x,)):
        model(x)
        says = r"padding of the hidden states of encoder.layers.0 is unknown: they have 7"
        with pytest.raises(ValueError, match=says):
            model(x, attention_mask=torch.ones(2, 5))


def test_a_mask_of_as_many_other_tokens_is_not_theirs():
    model, ids, pixels = clip()
    ids, mask = ids[:, :5], torch.arange(5).expand(3, 5) < 3
    with (
        attnreg.attach(model, attnreg.HiddenDropout(0.5, "span")),
        pytest.raises(ValueError, match=r"vision_model.encoder.layers.0 is unknown: they have 5 tokens, which are"),
    ):
        model(input_ids=ids, attention_mask=mask, pixel_values=pixels)


@pytest.mark.parametrize("length", [6, 8])
def test_longformer_pads_to_its_window(length):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = hf.LongformerModel(hf.LongformerConfig(**sizes, vocab_size=30, attention_window=8))
    provider, ids = Scale("output"), torch.randint(5, 30, (2, length))
    mask = torch.arange(length).expand(2, length) < torch.tensor([[length], [4]])
    with attnreg.attach(model.train(), provider):
        for given in (mask.long(), torch.ones_like(ids)):
            model(ids, attention_mask=given)
    assert [site.lengths.tolist() for site, _ in provider.seen] == [[length, 4], [length, length]]


class Stack(nn.Module):
    """Blocks, one by one; only ``tells`` gives them the padding. With ``checkpoints``, each is checkpointed."""

    def __init__(self, kind=nn.TransformerEncoderLayer, *, tells=True, checkpoints=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.tells, self.checkpoints = tells, checkpoints

    def forward(self, x, attention_mask=None, hidden_from_view=None):
        padding = hidden_from_view if attention_mask is None else ~attention_mask.bool()
        for layer in self.layers:
            block = functools.partial(layer, src_key_padding_mask=padding) if self.tells else layer
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True), 2)

    def forward(self, x, hidden_from_view, memory=None):
        return self.decoder(x, memory, tgt_key_padding_mask=hidden_from_view)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, key_padding_mask=None):
        return x + self.attention(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)[0]


class Residuals(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Residual(), Residual()])

    def forward(self, x, hidden_from_view):
        return functools.reduce(lambda states, layer: layer(states, key_padding_mask=hidden_from_view), self.layers, x)


@pytest.mark.parametrize("build", [Stack, Pair, Residuals])
def test_a_block_knows_the_padding_under_whatever_name_the_model_has_it(build):
    model, provider = build().train(), Scale(["embeddings", "output"])
    batch = {"x": torch.randn(2, 6, 16), "hidden_from_view": PADDING}
    batch |= {"memory": torch.randn(2, 5, 16)} if build is Pair else {}
    with attnreg.attach(model, provider, example_inputs=batch):
        provider.seen.clear()
        model(**batch)
    assert len(lengths(provider)) == 3
    assert all(each == LENGTHS for each in lengths(provider).values())


@pytest.mark.parametrize("name", ["src_key_padding_mask", "key_padding_mask"])
def test_torchs_names_tell_what_is_padding(name):
    valid, _ = Padding({name: PADDING}, conventions={}).tokens("encoder", (2, 6, 16))
    assert valid.sum(1).tolist() == LENGTHS


def test_in_a_wrapper_a_decoder_does_not_have_the_padding_of_its_encoder():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {f"{stack}_{size}": n for stack in ("encoder", "decoder") for size, n in SIZES.items()}
            self.model = hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=50, d_model=16, **sizes))

        def forward(self, **batch):
            return self.model(**batch)

    model, provider = Wrapper().train(), Scale("embeddings")
    ids = torch.randint(5, 50, (2, 6))
    batch = {"input_ids": ids, "attention_mask": (~PADDING).long(), "labels": ids}
    with attnreg.attach(model, provider, example_inputs=batch):
        provider.seen.clear()
        model(**batch)
    assert lengths(provider) == {"encoder.0.embeddings": LENGTHS, "decoder.0.embeddings": [6, 6]}


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}


def test_a_pass_takes_its_padding_along():
    model, provider, x = Stack().train(), Scale("embeddings"), torch.randn(2, 6, 16)
    with attnreg.attach(model, provider, example_inputs=(x,)):
        model(x, ~PADDING)
        provider.seen.clear()
        model.layers[0](x)
        assert lengths(provider) == {"encoder.0.embeddings": [6, 6]}


class Lengths(attnreg.HiddenProvider):
    """Looks at lengths and draws nothing, so that no pass leaves a trace in the generator."""

    where = "input"

    def forward(self, site, states):
        return states / site.lengths[:, None, None]


@pytest.mark.parametrize("repeated", ["blocks", "model"])
@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("provider", ["EmbeddingNoise(20.0)", "HiddenDropout(0.4, 'span')", "Lengths()"])
def test_what_checkpointing_repeats_has_the_padding_of_its_own_pass(provider, tells, repeated):
    torch.manual_seed(1)
    x, everything = torch.randn(4, 8, 16), torch.ones(4, 8)
    some = everything.clone()
    some[:, 3:] = 0
    gradients = []
    for checkpoints in (None, repeated):
        model = Stack(tells=tells, checkpoints=checkpoints == "blocks")
        run = functools.partial(checkpoint, model, use_reentrant=False) if checkpoints == "model" else model
        made = attnreg.parse_provider(provider, providers=[Lengths])
        with attnreg.attach(model, made, example_inputs=(x, everything)) as handle:
            torch.manual_seed(2)
            loss = sum(run(x, mask).tanh().pow(3).mean() for mask in (everything, some))
            copy.deepcopy(handle)  # between the passes and their repetition
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


class OneMask(nn.Module):
    """Blocks that give `attention_mask` to torch's attention, as what the argument `gives` says."""

    def __init__(self, gives):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.gives = nn.Embedding(99, 16), gives
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))

    def forward(self, ids, attention_mask=None):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x) if attention_mask is None else layer(x, **self.gives(attention_mask))
        return x


GIVES = {
    "True is padding": lambda mask: {"src_key_padding_mask": mask},
    "True is a token": lambda mask: {"src_key_padding_mask": ~mask},
    "added": lambda mask: {"src_key_padding_mask": torch.zeros(mask.shape).masked_fill(mask, -torch.inf)},
}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("convention", GIVES)
def test_a_mask_is_read_by_what_it_does_to_attention(convention, padded):
    ids, padding = torch.randint(0, 99, (3, 8)), torch.arange(8) >= torch.tensor([[5], [8], [3]])
    is_token = convention == "True is a token"
    example = padding & padded
    model, provider = OneMask(GIVES[convention]).train(), Scale("output")
    with attnreg.attach(model, provider, example_inputs=(ids, example ^ is_token)):
        model(ids, padding ^ is_token)
    assert lengths(provider) == {"encoder.0.output": [5, 8, 3], "encoder.1.output": [5, 8, 3]}


def test_a_mask_of_pairs_is_no_padding_also_with_as_many_samples_as_tokens():
    model, provider = OneMask(lambda mask: {"src_mask": mask}).train(), Scale("output")
    causal = torch.ones(8, 8, dtype=torch.bool).triu(1)
    with attnreg.attach(model, provider, example_inputs=(torch.randint(0, 99, (2, 8)), causal)):
        model(torch.randint(0, 99, (8, 8)), causal)
    assert {tuple(each) for each in lengths(provider).values()} == {(8,) * 8}


class Block(nn.TransformerEncoderLayer):
    """Names its mask as nobody else."""

    def forward(self, x, own=None):
        return super().forward(x, src_key_padding_mask=own)


def test_a_mask_that_the_dry_run_has_not_seen_is_not_guessed():
    model, ids = OneMask(lambda mask: {"own": mask}).train(), torch.randint(0, 99, (3, 8))
    model.layers = nn.ModuleList(Block(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
    with attnreg.attach(model, attnreg.HiddenCut(0.5), example_inputs=(ids,)):
        model(ids)
        with pytest.raises(ValueError, match=r"or the mask was not given when the model was attached. Attach with `ex"):
            model(ids, torch.zeros(3, 8, dtype=torch.bool))


@pytest.mark.parametrize("dtypes", [*itertools.permutations([torch.bool, torch.int64, torch.float32], 2)], ids=str)
def test_a_mask_of_tokens_may_come_in_another_type(dtypes):
    model, ids = OneMask(lambda mask: {"own": ~mask.bool()}).train(), torch.randint(0, 99, (3, 8))
    model.layers = nn.ModuleList(Block(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
    first, second = ((torch.arange(8) < torch.tensor([8, 5, 3])[:, None]).to(dtype) for dtype in dtypes)
    provider = Scale("output")
    with attnreg.attach(model, provider & attnreg.HiddenDropout(0.5, "span"), example_inputs=(ids, first)):
        model(ids, second)
    assert [site.lengths.tolist() for site, _ in provider.seen] == [[8, 5, 3]] * 2


@handwritten.of_heads
def without_the_last_two(q, k, v):
    return (q @ k.mT).masked_fill(torch.arange(k.shape[2]) >= k.shape[2] - 2, -1e9).softmax(-1) @ v


class Around(nn.Module):
    """A block."""

    def __init__(self, form):
        super().__init__()
        self.attention = handwritten.Attention(form)

    def forward(self, x):
        return x + self.attention(x)


@pytest.mark.parametrize(("form", "is_known"), [(without_the_last_two, False), (handwritten.padded, True)])
def test_padding_that_no_known_mask_explains_is_unknown(form, is_known):
    model, x = nn.Sequential(Around(form), Around(form)).train(), torch.randn(2, 5, handwritten.C)
    unknown = pytest.raises(ValueError, match=r"padding of the hidden states of 0 is unknown")
    provider = attnreg.HiddenDropout(0.5, "span")
    with attnreg.attach(model, provider, example_inputs=(x,)), nullcontext() if is_known else unknown:
        model(x)


def test_choices_of_one_row_have_their_own_lengths():
    seen = []

    class Lengths(attnreg.HiddenProvider):
        where = "embeddings"

        def forward(self, site, states):
            seen.append(site.lengths.tolist())

    model, ids = hf.BertForMultipleChoice(hf.BertConfig(**SMALL)), torch.ones(3, 8, dtype=torch.long)
    mask = (torch.arange(8) < torch.tensor([[8], [4], [2]])).int()
    with attnreg.attach(model, Lengths()):
        model.train()
        for rows in (1, 2):
            model(input_ids=ids.repeat(rows, 1, 1), attention_mask=mask.repeat(rows, 1, 1))
    assert seen[-2:] == [[8, 4, 2], [8, 4, 2] * 2]
