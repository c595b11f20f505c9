"""What differs from the dry run in one pass, and what its scores look like, is read off each pass."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.errors import NoAttentionError
from tests.helpers import handwritten
from tests.helpers.reference import attention
from tests.sweep.checks import Answer


class Sharp(nn.Module):
    """Self-attention whose scores of a token with itself are about 1024, others within 100."""

    def __init__(self, fused, change=lambda scores: scores):
        super().__init__()
        self.words, self.fused, self.change = nn.Embedding(99, 1024), fused, change

    def forward(self, ids):
        x = self.words(ids)
        if self.fused:
            return F.scaled_dot_product_attention(x, x, x, scale=1.0)
        return self.change(x @ x.mT).softmax(-1) @ x


def no_self(site):
    return attnreg.Mask(scores=~torch.eye(site.shape[-1], dtype=torch.bool).expand(site.shape))


@pytest.mark.parametrize("fused", [True, False])
def test_sharp_scores_are_not_the_models_own_mask(fused):
    torch.manual_seed(0)
    model, ids = Sharp(fused).train(), torch.randperm(99)[:24].view(3, 8)
    x = model.words(ids)
    expected = (x @ x.mT).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf).softmax(-1) @ x
    with attnreg.attach(model, Answer(no_self), example_inputs=(ids,)) as handle:
        assert torch.allclose(model(ids), expected, atol=1e-5)
        assert handle.drop_rates() == {"encoder.0": 1 / 8}
        with torch.no_grad(), handle.probing():
            assert torch.allclose(model(ids), expected, atol=1e-5)


PADDING = torch.arange(8) >= 6
WAYS = {
    "added": lambda scores: scores + PADDING * -100.0,
    "added in place": lambda scores: scores.add_(PADDING * -1000.0),
    "subtracted": lambda scores: scores - 100.0 * PADDING,
    "filled": lambda scores: scores.masked_fill(PADDING, -100.0),
    "chosen": lambda scores: torch.where(PADDING, torch.tensor(-1000.0), scores),
    "added in integers": lambda scores: scores + PADDING * -100,
    "cut": lambda scores: scores.masked_fill(PADDING, -1e9).clamp(min=-1000.0),
    "in place of infinities": lambda scores: scores.masked_fill(PADDING, -torch.inf).nan_to_num(neginf=-1000.0),
    "two values": lambda scores: scores + PADDING * -100.0 * torch.arange(8).clamp(max=7),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_of_low_numbers_is_the_models_own(way):
    torch.manual_seed(0)
    model, ids = Sharp(False, WAYS[way]).train(), torch.randperm(99)[:24].view(3, 8)
    model.words.weight.data /= 32
    nothing = Answer(lambda site: attnreg.Mask(scores=torch.zeros(site.shape[-2:], dtype=torch.bool)))
    with attnreg.attach(model, nothing, example_inputs=(ids,)):
        assert torch.allclose(model(ids), model.words(ids)[:, :6].mean(1, keepdim=True), atol=1e-6)
    model.double()
    padding = Answer(lambda site: attnreg.Mask(normalized=PADDING.expand(site.shape[-2:])))
    with attnreg.attach(model, padding, example_inputs=(ids,)):
        assert torch.allclose(model(ids), model.words(ids)[:, :6].mean(1, keepdim=True), atol=1e-6)


def test_the_highest_value_of_a_cosine_is_no_mask():
    model, ids = Sharp(False, lambda scores: scores.clamp(max=100.0)).train(), torch.randperm(99)[:24].view(3, 8)
    provider = Answer(lambda site: None)
    with attnreg.attach(model, provider, example_inputs=(ids,)):
        model(ids)
    assert provider.asked[0].valid is None or bool(provider.asked[0].valid.all())


def test_an_empty_batch_leaves_the_mean_of_drop_rates_a_number():
    model, ids = Sharp(True).train(), torch.randperm(99)[:24].view(3, 8)
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(ids,)) as handle:
        model(ids[:0])
        assert handle.drop_rates() == {"encoder.0": 0.0}


def padded_keys(a, x, y):
    """Keys are padded to a multiple of 8."""
    x = a.q(x)
    keys = F.pad(x, (0, 0, 0, -x.shape[1] % 8))
    scores = x @ keys.mT
    scores[..., x.shape[1] :] = -1e9
    return scores.softmax(-1) @ keys


def test_padded_keys_are_no_sinks():
    shapes = []

    def last(site):
        shapes.append(site.shape)
        keep = torch.ones(site.shape, dtype=torch.bool)
        keep[..., -1] = False
        return attnreg.Mask(scores=keep)

    model = handwritten.Attention(padded_keys)
    with attnreg.attach(model, Answer(last), example_inputs=(torch.randn(2, 5, 16),)) as handle:
        for length, keys in ((8, 8), (5, 8), (11, 16)):
            model(torch.randn(4, length, 16))
            assert shapes[-1] == (4, 1, length, keys)
            assert handle.drop_rates() == {"encoder.0": 1 / 8 if length == 8 else 0}


def prefixed(a, x, y):
    """Learned keys come before those of the tokens."""
    x = a.q(x)
    keys = torch.cat([a.probe[:, : a.number].expand(len(x), -1, -1), x], 1)
    return (x @ keys.mT).softmax(-1) @ keys


def test_the_number_of_sinks_is_read_off_each_pass():
    model, provider = handwritten.Attention(prefixed), Answer(lambda site: None)
    model.number = 3
    with attnreg.attach(model, provider, example_inputs=(torch.randn(2, 5, 16),)):
        for model.number in (3, 0):
            model(torch.randn(4, 8, 16))
        assert [site.shape for site in provider.asked] == [(4, 1, 8, 8)] * 2
        model.number = 2
        with pytest.raises(NoAttentionError, match="2 columns that belong to no query, but 3 when the model was att"):
            model(torch.randn(4, 8, 16))


class NullKey(nn.Module):
    """Attention with a learned key in front, which the mask may shut, too."""

    def __init__(self, fused):
        super().__init__()
        self.qkv, self.null, self.fused = nn.Linear(8, 24), nn.Parameter(torch.randn(2, 1, 2, 1, 4)), fused

    def projected(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return q, *(
            torch.cat([null.expand(len(x), -1, -1, -1), y], 2) for null, y in zip(self.null, (k, v), strict=True)
        )

    def forward(self, x, mask):
        q, k, v = self.projected(x)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, mask)
        return (q @ k.mT / 2).masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("fused", [True, False])
def test_a_row_without_valid_keys_keeps_its_sink(fused):
    model, x = NullKey(fused).double().train(), torch.randn(3, 4, 8, dtype=torch.float64)
    example = x[:2, :3], torch.ones(2, 1, 1, 4, dtype=torch.bool)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0]]).bool()[:, None, None]
    with attnreg.attach(model, attnreg.DropKey(0.0), example_inputs=example):
        assert (model(x, mask) - attention(*model.projected(x), valid=mask)).abs().max() < 1e-12
    with attnreg.attach(model, attnreg.AttentionLayerDrop(1.0), example_inputs=example):
        mask[0, ..., 0] = False  # the keys are dropped, and so is the sink in rows that have valid keys
        expected = attention(*model.projected(x), keep=torch.tensor(False), valid=mask)
        mask[0, ..., 0] = True
        assert (model(x, mask) - expected).abs().max() < 1e-12


def chunked(a, x, y):
    """Queries come in chunks of 2 that save memory; or at once. With ``causal``, a chunk sees fewer keys."""
    q, k, v = a.heads(x, y)
    out, length = [], x.shape[1]
    for begin in range(0, length, a.size):
        end = min(begin + a.size, length)
        seen = end if a.causal else length
        later = torch.arange(seen) > torch.arange(begin, end)[:, None] if a.causal else torch.tensor(False)
        scores = (q[:, :, begin:end] @ k[:, :, :seen].mT).masked_fill(later, -torch.inf)
        out.append(scores.softmax(-1) @ v[:, :, :seen])
    return torch.cat(out, 2)


ALIKE = {
    "AttentionDropout": lambda: attnreg.AttentionDropout(0.5),
    "DropHead": lambda: attnreg.DropHead(0.5),
    "AttentionLayerDrop": lambda: attnreg.AttentionLayerDrop(0.5),
    "DropAttention": lambda: attnreg.DropAttention(0.5, window=2),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ALIKE)
def test_queries_in_chunks_are_masked_as_at_once(name, causal):
    torch.manual_seed(0)
    model, x = handwritten.Attention(chunked).double(), torch.randn(2, 6, 16).double()
    model.causal = causal
    outs, rates = [], []
    for model.size in (2, 100):
        with attnreg.attach(model, ALIKE[name](), example_inputs=(x,)) as handle:
            torch.manual_seed(1)
            outs.append(torch.stack([model(x), model(x)]))
            rates += handle.drop_rates().values()
            if model.size == 2:
                with pytest.raises(NoAttentionError, match=r"computes more attention .* than when it was attached"):
                    model(torch.cat([x, x], 1))
    assert torch.allclose(*outs)
    assert rates[0] == pytest.approx(rates[1], abs=1e-6)


LOCAL = "each query has its own keys: choose other attention"
PER_SAMPLE = [attnreg.DropHead(0.5), attnreg.DropKey(0.5, share_queries=True), attnreg.DropAttention(0.5, "column")]


@pytest.mark.parametrize("provider", PER_SAMPLE, ids=lambda provider: type(provider).__name__)
def test_what_holds_for_a_sample_is_refused_where_each_query_has_its_own_keys(provider):
    inputs = {"input_ids": torch.randint(1, 20, (2, 7))}
    with pytest.raises(ValueError, match=f"{type(provider).__name__}.* {LOCAL}"):
        attnreg.attach(handwritten.Layers(handwritten.local), provider, example_inputs=inputs)
    blocks = handwritten.Layers(handwritten.blocks)
    if isinstance(provider, attnreg.DropHead):
        attnreg.attach(blocks, provider, example_inputs=inputs).detach()
    else:
        with pytest.raises(ValueError, match="each part has its own keys"):
            attnreg.attach(blocks, provider, example_inputs=inputs)


def test_a_head_is_dropped_in_all_blocks_of_a_sparse_attention():
    model = handwritten.Layers(handwritten.blocks)
    seen = []
    with attnreg.attach(model, attnreg.DropHead(0.5), example_inputs={"input_ids": torch.randint(1, 20, (2, 7))}):
        for layer in model.modules():
            if isinstance(layer, handwritten.Attention):
                layer.o.register_forward_pre_hook(lambda _, args: seen.append((args[0] == 0).unflatten(-1, (4, -1))))
        model(torch.randint(1, 20, (3, 9)))
    for dropped in seen:
        heads = dropped.all(-1)  # (B, Q, H)
        assert torch.equal(heads.any(1), heads.all(1))
        assert heads.any()


@pytest.mark.parametrize("keeps_state", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_any_number_of_parts(reentrant, keeps_state):
    torch.manual_seed(0)
    model = handwritten.Layers(handwritten.pieces).double().train()
    ids = torch.randint(1, 20, (100, 3))  # each sample is a part
    inputs = {"input_ids": ids[:2]}
    gradients = []
    with attnreg.attach(model, attnreg.AttentionDropout(0.5), example_inputs=inputs):
        for checkpoints in (False, True):
            if checkpoints:
                for layer in model.layers:
                    layer.forward = functools.partial(
                        checkpoint, layer.forward, use_reentrant=reentrant, preserve_rng_state=keeps_state
                    )
            torch.manual_seed(1)
            model.zero_grad()
            model(input_ids=ids).pow(2).sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients)


def core(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


class Own(torch.autograd.Function):
    """The usual hand-written backward pass of attention."""

    @staticmethod
    def forward(q, k, v):
        return core(q, k, v)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            return torch.autograd.grad(core(*inputs), inputs, grad)


def unused(q, k, v):
    with torch.no_grad():  # no checkpoint, and no gradient to be wrong
        return core(q, k, v) + 0 * q.sum()


OWN = r"Attention computes its attention in an autograd.Function \(.*forward\)"
INSIDE = "Attention runs gradient checkpointing inside its own forward"
REFUSED = {
    "reentrant": (lambda *given: checkpoint(core, *given, use_reentrant=True), INSIDE),
    "not reentrant": (lambda *given: checkpoint(core, *given, use_reentrant=False), INSIDE),
    "own backward": (Own.apply, OWN),
    "checkpointed, own backward": (lambda *given: checkpoint(Own.apply, *given, use_reentrant=False), OWN),
}


@pytest.mark.parametrize("placement", ["scores", "weights"])
@pytest.mark.parametrize("name", REFUSED)
def test_attention_whose_backward_pass_does_not_know_the_masks_is_refused(name, placement):
    model, x = handwritten.Attention(lambda a, x, y: a.core(*a.heads(x, y))), torch.randn(2, 6, 16)
    model.core = core
    with attnreg.attach(model, attnreg.AttentionDropout(0.5, placement), example_inputs=(x,)) as handle:
        model.core, message = REFUSED[name]
        with handle.disabled():
            model(x).sum().backward()
        with pytest.raises(NoAttentionError, match=message):
            model(x)
        model.core = unused
        model(x)
        model.core = core
        checkpoint(model, x, use_reentrant=False).sum().backward()  # around the module it is right
