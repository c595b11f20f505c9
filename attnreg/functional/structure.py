"""Masks that follow a structure: a window, or a parse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.errors import InputError


def window_mask(length: int, distance: int, *, device: torch.device | str | None = None) -> Tensor:
    r"""Keep pairs of positions that are at most a distance d apart.

    .. math:: M_{ij} = [\,|i - j| \le d\,]

    Args:
        length: N, the length of the sequence.
        distance: the largest distance d.
        device: device of the mask.

    Returns:
        bool, ``(N, N)``, ``True`` = kept.

    Example:
        >>> window_mask(3, 1).int()
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= distance


def ancestor_mask(parents: Tensor) -> Tensor:
    r"""Keep, for each word of a parse, the word itself and its ancestors.

    .. math:: M_{ij} = [\,j = i \text{ or } j \text{ is an ancestor of } i\,]

    Args:
        parents: long, ``(..., N)``: the position of each word's head, -1 where it has none (a root, padding).

    Returns:
        bool, ``(..., N, N)``, ``True`` = kept.

    Raises:
        InputError: if a position is not in ``-1..N-1``.

    Reference:
        SG-Net (AAAI 2020, arXiv 1908.05147), syntactic dependency of interest.

    Example:
        >>> ancestor_mask(torch.tensor([1, 2, -1])).int()
        tensor([[1, 1, 1],
                [0, 1, 1],
                [0, 0, 1]], dtype=torch.int32)
    """
    length = parents.shape[-1]
    if ((parents < -1) | (parents >= length)).any():
        raise InputError(f"Expected `parents` in -1..{length - 1}, got {parents.tolist()}.")
    reached = F.one_hot(parents + 1, length + 1)[..., 1:].float()
    reached = (reached + torch.eye(length, device=parents.device)).clamp(max=1)
    for _ in range((length - 1).bit_length()):  # each product doubles the length of the paths
        reached = (reached @ reached).clamp(max=1)
    return reached > 0
