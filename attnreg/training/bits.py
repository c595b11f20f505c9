"""Masks packed into bytes, eight decisions each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(mask: Tensor) -> list[Tensor]:
    """Pack a bool tensor; return its bytes and its shape, in which dimensions that were expanded have size 1."""
    for dim in range(mask.dim()):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 and mask.shape[dim] else mask
    bits = mask.flatten().to(torch.uint8)
    bits = F.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return [(bits * powers).sum(1, dtype=torch.uint8), torch.tensor(mask.shape)]


def unpack(packed: list[Tensor]) -> Tensor:
    """Unpack what :func:`pack` returned."""
    values, shape = packed
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=values.device)
    size = shape.tolist()
    count = int(torch.tensor(size).prod())
    return ((values[:, None] & powers) != 0).flatten()[:count].view(size)
