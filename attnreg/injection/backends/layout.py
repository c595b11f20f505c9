"""Convert attention scores between a model's layout and ``(B, H, Q, K)``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.errors import NoAttentionError

STANDARD = "bhqk"


@dataclass(frozen=True)
class Layout:
    """The meaning of the dimensions of a tensor of attention scores, by letters, which may occur more than once.

    ``b`` are samples (or windows of them), ``h`` heads, ``q`` queries, ``k`` keys, ``f`` samples times heads in one
    dimension, ``g`` heads times samples. ``1`` is a dimension of size 1 whose meaning is unknown.
    """

    dims: str = STANDARD
    heads: int = 1  # H, if one dimension combines it with B
    sinks_before: int = 0  # number of leading columns that are not keys, such as learned sinks
    sinks_after: int = 0  # number of trailing columns that are not keys
    was_square: bool = False  # whether there were as many keys (without sinks) as queries when the model was attached
    has_sinks: bool = field(init=False, compare=False)  # whether some columns are not keys
    is_plain: bool = field(init=False, compare=False)  # whether scores are ``(B, H, Q, K)`` and all columns are keys

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_sinks", self.sinks_before + self.sinks_after > 0)
        object.__setattr__(self, "is_plain", self.dims == STANDARD and not self.has_sinks)

    def of_pass(self, shape: tuple[int, ...]) -> Layout:
        """Return the layout of the scores of a pass, which have no sinks if, say, a prefix adapter is switched off."""
        if not (self.has_sinks and self.was_square):
            return self
        _, _, queries, columns = self.sizes(shape)
        if columns == queries:
            return replace(self, sinks_before=0, sinks_after=0)
        if columns < queries + self.sinks_before + self.sinks_after:
            raise NoAttentionError(
                f"Attention scores of shape {shape} have {columns - queries} columns that belong to no query, but "
                f"{self.sinks_before + self.sinks_after} when the model was attached, so it is not known which are "
                "tokens. Attach with `example_inputs` like these inputs."
            )
        return self

    @property
    def has_queries(self) -> bool:
        """Whether queries share their keys. If not, every query has separate keys (a local layout), and Q is 1."""
        return "q" in self.dims

    @property
    def _order(self) -> list[int]:
        return [dim for letters in ("bf1", "hg", "q", "k") for dim, letter in enumerate(self.dims) if letter in letters]

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return the sizes ``(B, H, Q, K)``; sinks count as keys."""
        if any(letter == "1" and n > 1 for n, letter in zip(shape, self.dims, strict=True)):
            raise NoAttentionError(
                f"Attention scores of shape {shape} have a dimension whose meaning is unknown, because its size was 1 "
                "when the model was attached. Attach with `example_inputs` as long as your inputs."
            )
        size = {x: math.prod(n for n, y in zip(shape, self.dims, strict=True) if x == y) for x in "bhqkfg"}
        return size["b"] * size["f"] * size["g"] // self.heads, size["h"] * self.heads, size["q"], size["k"]

    def canonical(self, tensor: Tensor) -> Tensor:
        """Convert scores to ``(B, H, Q, K)``."""
        if self.dims == STANDARD:
            return tensor
        batch, heads, queries, keys = self.sizes(tuple(tensor.shape))
        tensor = tensor.permute(self._order)
        if "g" in self.dims:
            tensor = tensor.reshape(heads, batch, queries, keys).transpose(0, 1)
        return tensor.reshape(batch, heads, queries, keys)

    def restored(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Undo :meth:`canonical` for scores of this shape."""
        if self.dims == STANDARD:
            return tensor
        order = self._order
        if "g" in self.dims:
            tensor = tensor.transpose(0, 1)
        tensor = tensor.reshape([shape[dim] for dim in order])
        return tensor.permute([order.index(dim) for dim in range(len(order))])

    def canonical_rows(self, rows: Tensor) -> Tensor:
        """Convert queries, keys or values ``(..., N, D)`` of fused attention to ``(B, H, N, D)``."""
        return self.canonical(rows) if rows.dim() == len(self.dims) else rows

    def canonical_mask(self, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Convert a mask that broadcasts to scores of this shape to one that broadcasts to ``(B, H, Q, K)``."""
        return mask if self.dims == STANDARD else self.canonical(mask.expand(shape))

    def number_of_keys(self, columns: int) -> int:
        """Return K without sinks."""
        return columns - self.sinks_before - self.sinks_after

    def are_keys(self, columns: int, device: torch.device) -> Tensor:
        """Return which of these columns are keys, bool, ``(columns,)``."""
        keys = torch.ones(self.number_of_keys(columns), dtype=torch.bool, device=device)
        return F.pad(keys, (self.sinks_before, self.sinks_after))

    def of_keys(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Remove the columns of sinks."""
        if not self.has_sinks or tensor.shape[dim] == 1:
            return tensor
        return tensor.narrow(dim, self.sinks_before, self.number_of_keys(tensor.shape[dim]))

    def with_keys(self, tensor: Tensor, keys: Tensor) -> Tensor:
        """Replace the columns of keys by ``keys``, and keep the columns of sinks."""
        if not self.has_sinks:
            return keys
        end = self.sinks_before + keys.shape[-1]
        return torch.cat([tensor[..., : self.sinks_before], keys, tensor[..., end:]], -1)

    def around_keys(self, keep: Tensor, valid: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Add columns for sinks to a mask on keys and to the valid positions (``None``: all); ``shape`` has sinks.

        Sinks are kept, except in query rows whose valid keys are all dropped: those rows attend only to these keys. A
        row without valid keys keeps its sinks.
        """
        if not self.has_sinks:
            return keep, valid
        key_shape = (*shape[:-1], self.number_of_keys(shape[-1]))
        valid = torch.ones((), dtype=torch.bool, device=keep.device) if valid is None else valid
        kept, valid = (keep & valid).expand(key_shape), valid.expand(key_shape)
        pad = (self.sinks_before, self.sinks_after)
        is_alive = kept.any(-1, keepdim=True) | ~valid.any(-1, keepdim=True)
        sinks = ~self.are_keys(shape[-1], keep.device) & is_alive
        return F.pad(kept, pad) | sinks, F.pad(valid, pad) | sinks
