"""Attention whose scores have another number of dimensions in a later pass: the same masks, or one sentence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnreg
from attnreg.errors import NoAttentionError

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))


class MultiHead(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, **options)

    def forward(self, x, weights=False):
        return self.attention(x, x, x, need_weights=weights)


class ByHand(nn.Module):
    """Fused in four dimensions, or written out in three."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, written=False):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if not written:
            return F.scaled_dot_product_attention(q, k, v)
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        return ((q @ k.mT / 2).softmax(-1) @ v).unflatten(0, (-1, 4))


PROVIDERS = {
    "keys": lambda: attnreg.DropKey(0.4),
    "heads": lambda: attnreg.DropHead(0.5),
    "weights": lambda: attnreg.AttentionDropout(0.4),
    "scores": lambda: attnreg.AttentionDropout(0.4, placement="scores"),
}


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}])  # fmt: skip
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_weights_that_are_asked_for_in_some_passes_change_no_mask(provider, options, first):
    model = MultiHead(**options).train()
    handle = attnreg.attach(model, PROVIDERS[provider](), example_inputs={"x": X, "weights": first})
    results = []
    for weights in (False, True):
        with handle.replay(2):
            results.append(model(X, weights)[0])
    torch.testing.assert_close(*results)
    with handle.disabled():
        assert not torch.allclose(results[0], model(X)[0])


@pytest.mark.parametrize("first", [False, True])
def test_attention_by_hand_in_another_rank_is_masked_or_refused(first):
    model = ByHand().train()
    attnreg.attach(model, attnreg.DropKey(0.4), example_inputs={"x": X, "written": first})
    model(X, first)
    with pytest.raises(NoAttentionError, match="ByHand computes less attention in this forward pass"):
        model(X, not first)


def test_nested_tensors_are_refused_in_a_sentence():
    model = ByHand().train()
    attnreg.attach(model, attnreg.DropKey(0.4), example_inputs={"x": X})
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    with pytest.raises(NoAttentionError, match=r"^ByHand got nested tensors, which cannot be masked: pad its inputs"):
        model(nested)
