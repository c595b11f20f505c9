"""From the layouts in which models hold attention to ``(B, H, Q, K)`` and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.injection.errors import NoAttentionError

STANDARD = "bhqk"


@dataclass(frozen=True)
class Layout:
    """What the dimensions of a tensor of attention scores are.

    Args:
        dims: a letter for each dimension: ``b`` samples (or windows of them), ``h`` heads, ``q`` queries, ``k`` keys;
            ``f`` samples times heads in one dimension, ``g`` heads times samples. A letter may occur more than once.
            ``1`` is a dimension of one entry, of which nothing more is known.
        heads: H, where one dimension holds it together with B.
        sinks_before: leading columns that are no keys, such as learned sinks.
        sinks_after: trailing ones.

    Example:
        >>> layout = Layout("fqk", heads=2)
        >>> layout.canonical(torch.zeros(6, 5, 4)).shape
        torch.Size([3, 2, 5, 4])
        >>> layout.restored(torch.zeros(3, 2, 5, 4), (6, 5, 4)).shape
        torch.Size([6, 5, 4])
    """

    dims: str = STANDARD
    heads: int = 1
    sinks_before: int = 0
    sinks_after: int = 0

    @property
    def has_queries(self) -> bool:
        """Whether queries share their keys; otherwise each has keys of its own (a local layout), and Q is 1."""
        return "q" in self.dims

    @property
    def has_sinks(self) -> bool:
        """Whether some columns are no keys."""
        return self.sinks_before + self.sinks_after > 0

    @property
    def _order(self) -> list[int]:
        return [dim for letters in ("bf1", "hg", "q", "k") for dim, letter in enumerate(self.dims) if letter in letters]

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """``(B, H, Q, K)``, sinks among the keys.

        Raises:
            NoAttentionError: if a dimension is larger than what was seen of it says.
        """
        if any(letter == "1" and n > 1 for n, letter in zip(shape, self.dims, strict=True)):
            raise NoAttentionError(
                f"Attention scores of shape {shape} have a dimension that had one entry when the model was attached, "
                "so what it holds is not known: attach with `example_inputs` as long as yours."
            )
        size = {x: math.prod(n for n, y in zip(shape, self.dims, strict=True) if x == y) for x in "bhqkfg"}
        return size["b"] * size["f"] * size["g"] // self.heads, size["h"] * self.heads, size["q"], size["k"]

    def canonical(self, tensor: Tensor) -> Tensor:
        """Scores as ``(B, H, Q, K)``."""
        if self.dims == STANDARD:
            return tensor
        batch, heads, queries, keys = self.sizes(tuple(tensor.shape))
        tensor = tensor.permute(self._order)
        if "g" in self.dims:
            tensor = (
                tensor.reshape(batch, heads, queries, keys)
                if batch == 1
                else tensor.reshape(heads, batch, queries, keys).transpose(0, 1)
            )
        return tensor.reshape(batch, heads, queries, keys)

    def restored(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What :meth:`canonical` made of scores of this shape, as it was."""
        if self.dims == STANDARD:
            return tensor
        order = self._order
        if "g" in self.dims:
            tensor = tensor.transpose(0, 1)
        tensor = tensor.reshape([shape[dim] for dim in order])
        return tensor.permute([order.index(dim) for dim in range(len(order))])

    def canonical_rows(self, rows: Tensor) -> Tensor:
        """Queries, keys or values ``(..., N, D)`` of fused attention as ``(B, H, N, D)``."""
        return self.canonical(rows) if rows.dim() == len(self.dims) else rows

    def restored_rows(self, rows: Tensor, lead: tuple[int, ...]) -> Tensor:
        """What :meth:`canonical_rows` made of ``(*lead, D)``, as it was."""
        return self.restored(rows, (*lead, rows.shape[-1]))

    def canonical_mask(self, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A mask that broadcasts to scores of this shape as one that broadcasts to ``(B, H, Q, K)``."""
        return mask if self.dims == STANDARD else self.canonical(mask.expand(shape))

    def number_of_keys(self, columns: int) -> int:
        """K without sinks."""
        return columns - self.sinks_before - self.sinks_after

    def of_keys(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Without the columns of sinks."""
        if not self.has_sinks or tensor.shape[dim] == 1:
            return tensor
        return tensor.narrow(dim, self.sinks_before, self.number_of_keys(tensor.shape[dim]))

    def with_keys(self, tensor: Tensor, own: Tensor) -> Tensor:
        """With other columns for those of keys."""
        if not self.has_sinks:
            return own
        end = self.sinks_before + own.shape[-1]
        return torch.cat([tensor[..., : self.sinks_before], own, tensor[..., end:]], -1)

    def around_keys(self, keep: Tensor, valid: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """A mask on keys, and what is valid among them, with columns for sinks.

        Sinks stay, but not in rows of which every key is dropped: those attend to their valid keys alone.

        Args:
            keep: bool, broadcastable to ``(B, H, Q, K)``, without sinks.
            valid: the same; ``None`` where all is.
            shape: ``(B, H, Q, K)``, with sinks.
        """
        if not self.has_sinks:
            return keep, valid
        own = (*shape[:-1], self.number_of_keys(shape[-1]))
        allowed = (keep if valid is None else keep & valid).expand(own)
        dead = ~allowed.any(-1, keepdim=True)
        pad = (self.sinks_before, self.sinks_after)
        sinks = F.pad(torch.zeros(own[-1], dtype=torch.bool, device=keep.device), pad, value=True)
        open_ = torch.ones((), dtype=torch.bool, device=keep.device) if valid is None else valid
        return F.pad(allowed, pad) | (sinks & ~dead), F.pad(open_.expand(own), pad) | (sinks & ~dead)
