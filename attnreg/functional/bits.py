"""Boolean masks at one bit per unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a boolean tensor into bytes, eight units each.

    Args:
        mask: bool, any shape.

    Returns:
        uint8, ``(ceil(mask.numel() / 8),)``.

    Example:
        >>> pack_bits(torch.tensor([True, False, True]))
        tensor([5], dtype=torch.uint8)
    """
    flat = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8))
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=mask.device)
    return (flat.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`pack_bits`.

    Args:
        packed: uint8, ``(ceil(prod(shape) / 8),)``.
        shape: shape of the mask that was packed.

    Returns:
        bool, of that shape.

    Example:
        >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), (3,))
        tensor([ True, False,  True])
    """
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) & weights) != 0).flatten()[: math.prod(shape)].view(*shape)
