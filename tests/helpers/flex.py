"""Ways to call FlexAttention, and attention by its formula."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnreg.injection.backends.flex import OLDEST_TORCH

B, H, N, D = 2, 4, 5, 4
NEEDS_FLEX = pytest.mark.skipif(torch.__version__ < OLDEST_TORCH, reason=f"needs torch {OLDEST_TORCH}")

generator = torch.Generator().manual_seed(0)
SLOPES = torch.rand(H, generator=generator, dtype=torch.float64)
RELATIVE = torch.randn(H, N, N, generator=generator, dtype=torch.float64)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
Q, K = torch.arange(N)[:, None], torch.arange(N)[None, :]
ALL = torch.ones(B, H, N, N, dtype=torch.bool)


class Model(nn.Module):
    """An attention module whose forward is one call of the kernel."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return flex_attention(q, k, v, **self.options)


def blocks(mask_mod, batch=None):
    return create_block_mask(mask_mod, batch, None, N, N, device="cpu")


def capped(score, b, h, q, k):
    return 2 * torch.tanh(score / 2)


WAYS = {
    # name: arguments, the same for all scores at once, what is valid
    "plain": ({}, lambda s: s, ALL),
    "scale": ({"scale": 0.3}, lambda s: s * 0.3 * math.sqrt(D), ALL),
    "alibi": ({"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs()},
              lambda s: s - SLOPES[:, None, None] * (Q - K).abs(), ALL),
    "relative bias": ({"score_mod": lambda s, b, h, q, k: s + RELATIVE[h][q][k]}, lambda s: s + RELATIVE, ALL),
    "softcap": ({"score_mod": capped}, lambda s: 2 * torch.tanh(s / 2), ALL),
    "causal": ({"block_mask": blocks(lambda b, h, q, k: q >= k)}, lambda s: s, ALL & (Q >= K)),
    "sliding window, a row of nothing": (
        {"block_mask": blocks(lambda b, h, q, k: (q >= k) & (q - k < 2) & (q > 0))},
        lambda s: s, ALL & (Q >= K) & (Q - K < 2) & (Q > 0),
    ),
    "documents and a bias": (
        {"block_mask": blocks(lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k], B),
         "score_mod": lambda s, b, h, q, k: s + RELATIVE[h, q, k], "scale": 1.0},
        lambda s: s * math.sqrt(D) + RELATIVE, ALL & (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]),
    ),
    "forbidden by scores": (
        {"score_mod": lambda s, b, h, q, k: torch.where(DOCUMENTS[b, k] == 0, s, -torch.inf)},
        lambda s: s, ALL & (DOCUMENTS == 0)[:, None, None],
    ),
}  # fmt: skip

GROUPED = "grouped queries, documents and a bias"

WAYS[GROUPED] = ({**WAYS["documents and a bias"][0], "enable_gqa": True}, *WAYS["documents and a bias"][1:])

KEEP = torch.rand(B, H, N, N, generator=generator) < 0.4
FACTOR = torch.rand(B, H, N, N, generator=generator, dtype=torch.float64)


def dense(q, k, v, change, valid, scores=None, weights=None, normalized=None, relaxed=None):
    """Output and log-sum-exp, from the formulas."""
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    before = change(torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(D)).masked_fill(~valid, -torch.inf)
    if scores is not None:
        before = before.masked_fill(~scores, -torch.inf)
        all_dropped = (before == -torch.inf).all(-1, keepdim=True)
        before = torch.where(all_dropped & valid, 0.0, before)
    lse = before.logsumexp(-1)
    a = before.exp() / before.exp().sum(-1, keepdim=True).clamp(min=1e-300)
    if relaxed is not None:
        spread = (before > -torch.inf).double()  # over the kept keys; in a row without any, over its valid ones
        mixed = (1 - relaxed) * a + relaxed * spread / spread.sum(-1, keepdim=True).clamp(min=1)
        a = torch.where(valid.any(-1, keepdim=True), mixed, a)
    if normalized is not None:
        a = a * normalized
        total = a.sum(-1, keepdim=True)
        uniform = valid.double() / valid.sum(-1, keepdim=True).clamp(min=1)
        a = torch.where(total > 0, a / total.clamp(min=1e-300), uniform)
    return torch.einsum("bhqk,bhkd->bhqd", a if weights is None else a * weights, v), lse


def qkv(*, enable_gqa=False, **options):
    """Queries, keys and values for a way with these options."""
    generator = torch.Generator().manual_seed(2)
    shared = H // 2 if enable_gqa else H
    return [torch.randn(B, h, N, D, dtype=torch.float64, generator=generator) for h in (H, shared, shared)]


# of torch's own
deprecated = pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
