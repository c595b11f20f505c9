"""G-Net's network, which maps token ids or images to the logits of keeping."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.errors import InputError

TABLES = ("tokens", "positions")


class GeneratorNetwork(nn.Module):
    """Token and position embeddings, then one attention layer, applied L times, whose scores are the logits.

    The arguments are those of :class:`attnreg.GNetProvider`; without ``initial_logit``, the biases are 0 and not
    learned; ``shared_tables`` are read from :attr:`tables`. Token ids ``(B, N)``, or images, and allowed positions
    ``(B, N, N)``, bool, give logits ``(B, L, G, N, N)``.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_positions: int,
        num_heads: int,
        initial_logit: float | None,
        position_offset: int = 0,
        feed_forward: bool = False,
        shared_tables: Collection[str] = (),
        patch: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise InputError(
                f"Expected `num_heads` to divide `hidden_size`, {hidden_size} (the width of the embeddings), got "
                f"{num_heads}."
            )
        if isinstance(shared_tables, str) or not set(shared_tables) <= set(TABLES):
            raise InputError(f"Expected `shared_tables` to list some of {', '.join(TABLES)}, got {shared_tables!r}.")
        self.num_heads = num_heads
        self.position_offset = position_offset
        self.tokens: nn.Module | None = None
        if patch is not None:
            self.tokens = PatchTokens(hidden_size, patch, vocab_size)
        elif "tokens" not in shared_tables:
            self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = None if "positions" in shared_tables else nn.Embedding(num_positions, hidden_size)
        for embedding in (self.tokens, self.positions):
            if isinstance(embedding, nn.Embedding):
                nn.init.normal_(embedding.weight, std=0.02)
        # Modules, because their weights may be replaced; in a dict, because as attributes they would be submodules.
        # A copy or a pickle of provider and model together refers to the tables of the new model.
        self.tables: dict[str, nn.Embedding] = {}
        # Without it, layer 0 would see states of the embeddings' scale, 0.02, and its logits could hardly move.
        self.embedding_norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)
        self.block = _FeedForward(hidden_size) if feed_forward else nn.Identity()
        self.bias: Tensor
        if initial_logit is None:
            self.register_buffer("bias", torch.zeros(num_layers))
        else:
            self.bias = nn.Parameter(torch.full((num_layers,), initial_logit))

    def forward(self, ids: Tensor, allowed: Tensor) -> Tensor:
        """Return the logits of keeping."""
        tokens = self._embed("tokens", ids)
        steps = torch.arange(tokens.shape[-2], device=ids.device) + self.position_offset
        x = self.embedding_norm(tokens + self._embed("positions", steps))
        attention = _OneHead(self.qkv, self.out) if self.num_heads == 1 else _Heads(self.qkv, self.out, self.num_heads)
        logits = []
        for layer in range(len(self.bias)):
            # Autocast lowers the precision of scores, but probabilities near 0 and 1, and draws from them, need it.
            scores = attention.scores(x).to(self.bias.dtype)
            logits.append(scores + self.bias[layer])
            if layer < len(self.bias) - 1:
                weights = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min).softmax(-1)
                x = self.block(self.norm(x + attention.mixed(weights, x)))
        return torch.stack(logits, dim=1)

    def _embed(self, name: str, indices: Tensor) -> Tensor:
        own: nn.Module | None = getattr(self, name)
        if own is not None:
            embedded: Tensor = own(indices)
            return embedded
        if name not in self.tables:
            raise RuntimeError(
                "A G-Net with shared embeddings must be attached to a model first: call `attnreg.attach(model, "
                "provider)`."
            )
        return F.embedding(indices, self.tables[name].weight.detach()).to(self.bias.dtype)


class PatchTokens(nn.Module):
    """A learned vector for each of the tokens before the patches, then a linear map of each patch, row by row."""

    def __init__(self, hidden_size: int, patch: Sequence[int], before: int) -> None:
        super().__init__()
        channels, height, width = patch
        self.projection = nn.Conv2d(channels, hidden_size, (height, width), stride=(height, width))
        self.before = nn.Parameter(0.02 * torch.randn(before, hidden_size))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the states ``(B, N, d)`` of images ``(B, C, height, width)``."""
        patches = self.projection(pixels.to(self.before.dtype)).flatten(2).transpose(1, 2)
        return torch.cat([self.before.expand(len(patches), -1, -1).to(patches.dtype), patches], 1)


class _Heads:
    def __init__(self, qkv: nn.Linear, out: nn.Linear, num_heads: int) -> None:
        self._qkv, self._out, self._num_heads = qkv, out, num_heads
        self._value: Tensor | None = None

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores ``(B, G, N, N)`` of hidden states ``(B, N, d)``."""
        query, key, self._value = (
            part.unflatten(-1, (self._num_heads, -1)).transpose(1, 2) for part in self._qkv(x).chunk(3, dim=-1)
        )
        return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])

    def mixed(self, weights: Tensor, x: Tensor) -> Tensor:
        """Return the attention's output for the hidden states whose scores were computed last."""
        assert self._value is not None
        return self._out((weights.to(self._value.dtype) @ self._value).transpose(1, 2).flatten(2))


class _OneHead:
    r"""The same with one head, for half of the matrix products: all layers share two products of weights.

    :math:`Q K^\top = x\, (W_Q W_K^\top)\, x^\top` and :math:`A V W_O = A\, x\, (W_V W_O)`, biases apart.
    """

    def __init__(self, qkv: nn.Linear, out: nn.Linear) -> None:
        (wq, wk, self._wv), (bq, bk, self._bv) = qkv.weight.chunk(3), qkv.bias.chunk(3)
        wq, bq = wq / math.sqrt(wq.shape[-1]), bq / math.sqrt(wq.shape[-1])
        self._query_key, self._key_bias = wk.t() @ wq, bq @ wk
        self._row, self._constant = bk @ wq, bq @ bk
        self._out = out
        self._value_out: tuple[Tensor, Tensor] | None = None

    def scores(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self._query_key, self._key_bias) @ x.to(self._query_key.dtype).transpose(-1, -2)
        of_rows = x @ self._row + self._constant
        return (scores + of_rows[..., None])[:, None]

    def mixed(self, weights: Tensor, x: Tensor) -> Tensor:
        if self._value_out is None:
            # The weights of a row sum to 1, so the values' bias is the same in all rows.
            self._value_out = self._out.weight @ self._wv, F.linear(self._bv, self._out.weight, self._out.bias)
        return F.linear(weights[:, 0].to(x.dtype) @ x, *self._value_out)


class _FeedForward(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, 4 * hidden_size)
        self.outer = nn.Linear(4 * hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.outer(F.gelu(self.inner(x))))
