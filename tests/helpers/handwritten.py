"""Attention as people write it: the same mathematics in many layouts, and things that only look like it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.injection import discover

C, H, D = 16, 4, 4


def split(x: Tensor) -> Tensor:
    """(B, N, C) to (B, H, N, D)."""
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Projections, and a function of them that does the rest."""

    def __init__(self, form: Callable[[Attention, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.q, self.k, self.v, self.o = (nn.Linear(C, C) for _ in range(4))
        self.gate = nn.Linear(C, 16)
        self.mix = nn.Linear(H, H, bias=False)
        self.one = nn.Linear(C, 1)
        self.sink = nn.Parameter(torch.randn(1, H, 1, 1))
        self.probe = nn.Parameter(torch.randn(1, 3, C))
        self.memory = nn.Parameter(torch.randn(1, 2, C))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.form(self, x, x if context is None else context)

    def heads(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(self.q(x)) / math.sqrt(D), split(self.k(context)), split(self.v(context))


def of_heads(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Attention, Tensor, Tensor], Tensor]:
    """A form whose output is a function of its queries, keys and values, all (B, H, N, D)."""

    @functools.wraps(attend)
    def form(a, x, y):
        return a.o(merge(attend(*a.heads(x, y))))

    return form


@of_heads
def plain(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@of_heads
def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def heads_after_queries(a, x, y):
    q, k, v = (t.transpose(1, 2) for t in a.heads(x, y))
    weights = torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1)
    return a.o(torch.einsum("bqhk,bkhd->bqhd", weights, v).flatten(2))


def heads_first(a, x, y):
    q, k, v = (t.transpose(0, 1) for t in a.heads(x, y))
    return a.o(merge((torch.softmax(q @ k.transpose(-1, -2), dim=3) @ v).transpose(0, 1)))


@of_heads
def transposed(q, k, v):
    weights = (k @ q.transpose(-1, -2)).softmax(-2)
    return (v.transpose(-1, -2) @ weights).transpose(-1, -2)


def samples_times_heads(a, x, y):
    q, k, v = (t.flatten(0, 1) for t in a.heads(x, y))
    return a.o(merge((torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)).unflatten(0, (len(x), H))))


def heads_times_samples(a, x, y):
    q, k, v = (torch.cat(t(z).chunk(H, -1), 0) for t, z in ((a.q, x), (a.k, y), (a.v, y)))
    return a.o(torch.cat(((q / math.sqrt(D) @ k.transpose(1, 2)).softmax(-1) @ v).chunk(H, 0), -1))


def time_first(a, x, y):
    """As fairseq has it: (T, B, C) inside, and (B * H, T, T)."""
    batch = len(x)

    def flat(t):
        return t.transpose(0, 1).contiguous().view(-1, batch * H, D).transpose(0, 1)

    q, k, v = flat(a.q(x)) / math.sqrt(D), flat(a.k(y)), flat(a.v(y))
    out = torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)
    return a.o(out.transpose(0, 1).contiguous().view(-1, batch, C).transpose(0, 1))


@of_heads
def multiplied_and_summed(q, k, v):
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(2)).sum(3)


def cast(a, x, y):
    """Softmax in another precision, weights dropped out, as most models have it."""
    q, k, v = a.heads(x, y)
    weights = F.softmax(q @ k.transpose(-1, -2), dim=-1, dtype=torch.float64).to(v.dtype)
    return a.o(merge(F.dropout(weights, 0.0, a.training) @ v))


#: The same function of the same parameters, and the letters of its scores' dimensions.
SAME = {
    plain: "bhqk",
    fused: "bhqk",
    heads_after_queries: "bqhk",
    heads_first: "hbqk",
    transposed: "bhkq",
    samples_times_heads: "fqk",
    heads_times_samples: "gqk",
    time_first: "fqk",
    multiplied_and_summed: "bhqk",
    cast: "bhqk",
}


def sink_after(a, x, y):
    q, k, v = a.heads(x, y)
    scores = q @ k.transpose(-1, -2)
    weights = torch.cat([scores, a.sink.expand(*scores.shape[:-1], 1)], -1).softmax(-1)
    return a.o(merge(weights[..., :-1] @ v))


def sink_before(a, x, y):
    q, k, v = a.heads(x, y)
    scores = q @ k.transpose(-1, -2)
    weights = torch.cat([a.sink.expand(*scores.shape[:-1], 1), scores], -1).softmax(-1)
    return a.o(merge(weights[..., 1:] @ v))


def memory(a, x, y):
    q, k, v = a.heads(x, torch.cat([a.memory.expand(len(y), -1, -1), y], 1))
    return a.o(merge((q @ k.transpose(-1, -2)).softmax(-1) @ v))


def gate(a, x, y):
    """Streams of one token are mixed by a square softmax that is no attention; then there is a sink."""
    streams = a.gate(x).unflatten(-1, (4, 4)).softmax(-1) @ x.unflatten(-1, (4, 4))
    return sink_after(a, streams.flatten(2), streams.flatten(2))


def talking_heads(a, x, y):
    q, k, v = a.heads(x, y)
    scores = a.mix((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    weights = a.mix(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return a.o(merge(weights @ v))


def bias_in_two_parts(a, x, y):
    """One part of the bias has queries first, the other keys."""
    q, k, v = a.heads(x, y)
    gate = a.q(x)[..., :H].transpose(1, 2)
    bias = (gate[..., None] - gate[..., None, :]).tril() + (gate[..., None, :] - gate[..., None]).triu()
    return a.o(merge((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v))


def additive(a, x, y):
    scores = a.one(torch.tanh(a.q(x)[:, :, None] + a.k(y)[:, None])).squeeze(-1)
    return a.o(scores.softmax(-1) @ a.v(y))


def pooled_queries(a, x, y):
    q, k, v = a.heads(x[:, :6].unflatten(1, (3, 2)).mean(2), y)
    return a.o(merge((q @ k.transpose(-1, -2)).softmax(-1) @ v)).repeat_interleave(2, 1)


def windows(a, x, y):
    q, k, v = a.heads(x[:, :6].reshape(-1, 2, C), y[:, :6].reshape(-1, 2, C))
    return a.o(merge((q @ k.transpose(-1, -2)).softmax(-1) @ v)).reshape(len(x), 6, C)


def windows_of_heads(a, x, y):
    """Windows of each head, in a dimension of their own; counts on softmax giving contiguous weights."""
    q, k, v = (t.unflatten(2, (3, 2)) for t in a.heads(x[:, :6], y[:, :6]))
    weights = (q @ k.transpose(-1, -2)).softmax(-1).view(len(x), H, 6, 2)
    return a.o(merge((weights.unflatten(2, (3, 2)) @ v).flatten(2, 3)))


def local(a, x, y):
    """Each query has three keys of its own."""
    around = F.pad(y, (0, 0, 1, 1)).unfold(1, 3, 1).transpose(2, 3)
    q = a.q(x).unflatten(-1, (H, D)).unsqueeze(3)
    k, v = (t(around).unflatten(-1, (H, D)).transpose(2, 3) for t in (a.k, a.v))
    return a.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).flatten(2))


@of_heads
def differential(q, k, v):
    scores = q @ k.transpose(-1, -2)
    return (scores.softmax(-1) - 0.5 * (2 * scores).softmax(-1)) @ v


@of_heads
def twice(q, k, v):
    scores = q @ k.transpose(-1, -2)
    return (2 * scores).softmax(-1) @ (scores.softmax(-1) @ v)


@of_heads
def joined(q, k, v):
    scores = q @ k.transpose(-1, -2)
    return torch.cat([part.softmax(-1) for part in scores.chunk(2, 1)], 1) @ v


@of_heads
def averaged(q, k, v):
    scores = q @ k.transpose(-1, -2)
    return torch.stack([scores.softmax(-1), (2 * scores).softmax(-1)]).mean(0) @ v


@of_heads
def pieces(q, k, v):
    """Each sequence goes through the kernel alone, as images of different sizes do."""
    parts = [F.scaled_dot_product_attention(*(t[i : i + 1] for t in (q, k, v)), scale=1.0) for i in range(len(q))]
    return torch.cat(parts)


@of_heads
def halves_of_values(q, k, v):
    return torch.cat([F.scaled_dot_product_attention(q, k, part, scale=1.0) for part in v.chunk(2, -1)], -1)


@of_heads
def blocks(q, k, v):
    """The first two queries look at everything, the others at what is near (block-sparse attention)."""
    first = (q[:, :, :2] @ k.transpose(-1, -2)).softmax(-1) @ v
    others = (q[:, :, 2:] @ k[:, :, 1:].transpose(-1, -2)).softmax(-1) @ v[:, :, 1:]
    return torch.cat([first, others], 2)


@of_heads
def shuffled(q, k, v):
    """The largest queries first (ProbSparse attention)."""
    order = q.norm(dim=-1, keepdim=True).argsort(2, descending=True).expand(q.shape)
    out = (q.gather(2, order) @ k.transpose(-1, -2)).softmax(-1) @ v
    return torch.zeros_like(out).scatter(2, order, out)


@of_heads
def sorted_keys(q, k, v):
    """The smallest keys first, in every head."""
    order = k.norm(dim=-1, keepdim=True).argsort(2).expand(k.shape)
    return (q @ k.gather(2, order).transpose(-1, -2)).softmax(-1) @ v.gather(2, order)


@of_heads
def gated_by_scores(q, k, v):
    scores = q @ k.transpose(-1, -2)
    return scores.softmax(-1) @ v * scores.logsumexp(-1, keepdim=True).sigmoid()


def convolution(a, x, y):
    """Three neighbours of each token are mixed with weights that it computes: a product, but of no queries and keys."""
    near = F.pad(y, (0, 0, 1, 1)).unfold(1, 3, 1)
    return a.o((near @ a.gate(x)[..., :3].softmax(-1).unsqueeze(-1)).squeeze(-1))


@of_heads
def slots(q, k, v):
    """Queries compete for keys: the softmax is over queries."""
    weights = (q @ k.transpose(-1, -2)).softmax(-2)
    return weights / weights.sum(-1, keepdim=True) @ v


def padded(a, x, y):
    """Both sequences are filled up with zeros to a whole number of blocks."""
    q, k, v = (F.pad(t, (0, 0, 0, 3)) for t in a.heads(x, y))
    scores = (q @ k.transpose(-1, -2)).masked_fill(torch.arange(k.shape[2]) >= y.shape[1], -1e9)
    return a.o(merge(scores.softmax(-1) @ v)[:, : x.shape[1]])


def learned_queries(a, x, y):
    q, k, v = a.heads(a.probe.expand(len(x), -1, -1), y)
    return a.o(merge((q @ k.transpose(-1, -2)).softmax(-1) @ v))


def pooling(a, x, y):
    return (x @ a.probe[0].T).softmax(1).transpose(1, 2) @ x


def probabilities(a, x, y):
    return plain(a, x, y).softmax(-1)


@of_heads
def log_softmax(q, k, v):
    return (q @ k.transpose(-1, -2)).log_softmax(-1).exp() @ v


@of_heads
def sigmoid(q, k, v):
    return (q @ k.transpose(-1, -2)).sigmoid() @ v


@of_heads
def exp_over_sum(q, k, v):
    scores = q @ k.transpose(-1, -2)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


class Layers(nn.Module):
    """Token ids, one attention of a form, one that is plain."""

    def __init__(self, form: Callable[..., Tensor], *, cross: bool = False) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(50, C)
        self.layers = nn.ModuleList([Attention(form), Attention(plain)])
        self.cross = cross

    def forward(self, input_ids: Tensor, context_ids: Tensor | None = None) -> Tensor:
        x = self.embeddings(input_ids)
        y = None if context_ids is None else self.embeddings(context_ids)
        out = self.layers[0](x, y)
        x = x + out if out.shape == x.shape else out
        return x + self.layers[1](x)


def ids(batch=2, length=7):
    return torch.randint(1, 20, (batch, length), generator=torch.Generator().manual_seed(0))


def layers(form, **options):
    torch.manual_seed(0)
    return Layers(form, **options).double()


INPUTS = {"input_ids": ids()}


def first(form, inputs=INPUTS):
    """The attention of the first layer."""
    found = discover(layers(form), inputs)
    return [site for site in found.sites if site.info.name.startswith("layers.0")], found
