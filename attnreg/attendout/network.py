"""G-Net's network, which maps token ids to the logits of keeping, and how it reads a model's inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnreg.errors import InputError


class TokenInputs(NamedTuple):
    """A model's inputs as a G-Net reads them."""

    ids: Tensor  # token ids, (B, N)
    allowed: Tensor  # the positions that attention allows, bool, (B, N, N)


def read_tokens(inputs: Mapping[str, Any], max_length: int, pad_token_id: int | None, *, causal: bool) -> TokenInputs:
    """Read token ids and the attention mask; the choices of multiple choice count as samples."""
    ids = inputs.get("input_ids")
    if ids is None:
        candidates = (v for v in inputs.values() if isinstance(v, Tensor) and v.dtype == torch.long and v.dim() > 1)
        ids = next(candidates, None)
    if ids is None:
        raise InputError(f"The model's inputs {sorted(inputs)} hold no token ids, which G-Net reads: pass `input_ids`.")
    length = ids.shape[-1]
    if length > max_length:
        raise InputError(f"Expected at most {max_length} tokens, got {length}: truncate, or raise `max_length`.")
    ids, mask = ids.reshape(-1, length), inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids) if pad_token_id is None else ids != pad_token_id
    if mask.numel() != ids.numel():
        raise InputError(f"Expected `attention_mask` to have the shape of the token ids, got {tuple(mask.shape)}.")
    allowed = mask.reshape(-1, 1, length).bool().expand(-1, length, length)
    return TokenInputs(ids, allowed.tril() if causal else allowed)


class GeneratorNetwork(nn.Module):
    """Token and position embeddings, then one attention layer, applied L times, whose scores are the logits.

    The arguments are those of :class:`attnreg.GNetProvider`; without ``initial_logit``, the biases stay 0.
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
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            size = f"`hidden_size`, {hidden_size} (the width of the embeddings)"
            raise InputError(f"Expected `num_heads` to divide {size}, got {num_heads}.")
        self.num_heads = num_heads
        self.position_offset = position_offset
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(num_positions, hidden_size)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        # Without the norm, layer 0 would see states of the embeddings' scale, 0.02, and its logits could hardly move.
        self.embedding_norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)
        self.bias: Tensor
        if initial_logit is None:
            self.register_buffer("bias", torch.zeros(num_layers))
        else:
            self.bias = nn.Parameter(torch.full((num_layers,), initial_logit))

    def forward(self, ids: Tensor, allowed: Tensor) -> Tensor:
        """Return the logits of keeping, ``(B, L, G, N, N)``, from the fields of :class:`TokenInputs`."""
        tokens = self.tokens(ids)
        steps = torch.arange(tokens.shape[-2], device=ids.device) + self.position_offset
        x = self.embedding_norm(tokens + self.positions(steps))
        attention = _OneHead(self.qkv, self.out) if self.num_heads == 1 else _Heads(self.qkv, self.out, self.num_heads)
        logits = []
        for layer in range(len(self.bias)):
            # Autocast lowers the precision of scores, but probabilities near 0 and 1, and draws from them, need it.
            scores = attention.scores(x).to(self.bias.dtype)
            logits.append(scores + self.bias[layer])
            if layer < len(self.bias) - 1:
                weights = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min).softmax(-1)
                x = self.norm(x + attention.mixed(weights, x))
        return torch.stack(logits, dim=1)


class _Heads:
    """Multi-head attention: scores ``(B, G, N, N)`` of states ``(B, N, d)``, then the output of these scores."""

    def __init__(self, qkv: nn.Linear, out: nn.Linear, num_heads: int) -> None:
        self._qkv, self._out, self._num_heads = qkv, out, num_heads

    def scores(self, x: Tensor) -> Tensor:
        parts = self._qkv(x).chunk(3, dim=-1)
        query, key, self._value = (part.unflatten(-1, (self._num_heads, -1)).transpose(1, 2) for part in parts)
        return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])

    def mixed(self, weights: Tensor, x: Tensor) -> Tensor:
        return self._out((weights.to(self._value.dtype) @ self._value).transpose(1, 2).flatten(2))


class _OneHead:
    r"""Attention with one head, in half as many matrix products: all layers share two products of weights.

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
        row_terms = x @ self._row + self._constant
        return (scores + row_terms[..., None])[:, None]

    def mixed(self, weights: Tensor, x: Tensor) -> Tensor:
        if self._value_out is None:
            # The weights of a row sum to 1, so the values' bias is the same in all rows.
            self._value_out = self._out.weight @ self._wv, F.linear(self._bv, self._out.weight, self._out.bias)
        return F.linear(weights[:, 0].to(x.dtype) @ x, *self._value_out)
