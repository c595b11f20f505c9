"""What a Generator reads of a model's inputs: token ids, and the positions that attention allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnreg.errors import InputError


class TokenInputs:
    """Reads token ids from a model's inputs.

    Args:
        max_length: largest number of tokens.
        pad_token_id: token id of padding, for models that get no ``attention_mask``.
        causal: whether no position may attend to later ones.
    """

    def __init__(self, max_length: int, pad_token_id: int | None, *, causal: bool) -> None:
        self.max_length, self.pad_token_id, self.causal = max_length, pad_token_id, causal

    def read(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the token ids, ``(B, N)``."""
        ids = token_ids(inputs)
        if ids.shape[-1] > self.max_length:
            raise InputError(
                f"Expected at most {self.max_length} tokens, got {ids.shape[-1]}: truncate them, or make the G-Net "
                "with a larger `max_length`."
            )
        return ids

    def allowed(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return which positions attention allows, bool, ``(B, N, N)``."""
        return allowed_positions(inputs, self.pad_token_id, causal=self.causal)


def allowed_positions(inputs: Mapping[str, Any], pad_token_id: int | None, *, causal: bool) -> Tensor:
    """Return which positions attention allows, bool, ``(B, N, N)``."""
    ids, mask = token_ids(inputs), inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids) if pad_token_id is None else ids != pad_token_id
    length = ids.shape[-1]
    if mask.numel() != ids.numel():
        raise InputError(f"Expected `attention_mask` to have the shape of the token ids, got {tuple(mask.shape)}.")
    allowed = mask.reshape(-1, 1, length).bool().expand(-1, length, length)
    return allowed.tril() if causal else allowed


def token_ids(inputs: Mapping[str, Any]) -> Tensor:
    """Return the token ids, ``(B, N)``; the choices of multiple choice count as samples."""
    ids = inputs.get("input_ids")
    if ids is None:
        integer = (v for v in inputs.values() if isinstance(v, Tensor) and v.dtype == torch.long and v.dim() > 1)
        ids = next(integer, None)
    if ids is None:
        raise InputError(f"The model's inputs {sorted(inputs)} hold no token ids, which G-Net reads: pass `input_ids`.")
    return ids.reshape(-1, ids.shape[-1])
