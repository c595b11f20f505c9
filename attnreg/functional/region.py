"""The candidate region of AD-DROP: the keys with the highest attribution in each row."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from attnreg import kernels
from attnreg.errors import InputError
from attnreg.functional.attention import per_head

Region = Literal["high", "low"]
POSITIONS = 2**22  # of the product, in memory at a time, on a CPU
GPU_POSITIONS = 2**26  # on other devices, where a chunk must be worth its launches


def candidate_region(attribution: Tensor, valid: Tensor | None, p: float, region: Region = "high") -> Tensor:
    r"""Select in every row about p·n of its n valid keys, with the highest, or the lowest, attribution.

    With the attributions of a row's n valid keys sorted in ascending order and ranks counted from 0, the high region
    holds all keys at or above the value at rank :math:`\lfloor (1 - p)\, n \rfloor` (p·n keys, rounded up, and ties).
    The low region holds all keys below the value at rank :math:`\lfloor p\, n \rfloor` (p·n keys, rounded down, less
    ties), and all n keys for p = 1. Both are empty for p = 0, and for a row whose attributions are all equal, which has
    no ranking. Returns bool, ``(B, H, Q, K)``, as is ``attribution``.

    Raises:
        InputError: if ``p`` is outside ``[0, 1]`` or ``region`` is neither ``"high"`` nor ``"low"``.

    Reference:
        AD-DROP (NeurIPS 2022), Section 2; the low region as in the authors' code.

    Example:
        >>> candidate_region(torch.tensor([[0.1, 0.4, 0.3, 0.2]]), None, p=0.5)
        tensor([[False,  True,  True, False]])
    """
    if not 0 <= p <= 1:
        raise InputError(f"Expected `p` in [0, 1], got {p}.")
    if region not in get_args(Region):
        raise InputError(f"Expected `region` to be one of {get_args(Region)}, got {region!r}.")
    score = attribution.detach()
    keys = score.shape[-1]
    if valid is None:
        n = torch.full((1,), keys, device=score.device)
    else:
        valid = torch.atleast_1d(valid)
        n = valid.expand(*valid.shape[:-1], keys).sum(-1, keepdim=True)
        score = score.masked_fill(~valid, -math.inf)  # sorted to the front
    ascending = _sorted(score)
    # Round off the floating-point error first: 0.7 * 10 is 7.000000000000001.
    share = (p * n.double()).round(decimals=9)
    if region == "high":
        size = torch.ceil(share).long()
        inside = score >= _at(ascending, keys - size)
    else:
        size = torch.floor(share).long()
        inside = (score < _at(ascending, keys - n + size)) | (size == n)
    ranked = (ascending[..., -1:] > _at(ascending, keys - n)) & (size > 0)
    inside = inside & ranked
    return inside if valid is None else inside & valid


def weights_gradient(output_gradient: Tensor, value: Tensor) -> Tensor:
    r"""Compute a score's gradient with respect to attention weights A from its gradient with respect to the output O.

    .. math:: \frac{\partial s}{\partial A} = \frac{\partial s}{\partial O} V^\top, \quad O = A V

    ``value`` may have fewer heads. Returns ``(B, H, Q, K)``, in float32 or wider, also under autocast.

    Example:
        >>> weights_gradient(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]]))
        tensor([[[[1., 2., 3.]]]])
    """
    dtype = torch.promote_types(output_gradient.dtype, torch.float32)
    with torch.autocast(output_gradient.device.type, enabled=False):
        return output_gradient.to(dtype) @ per_head(value, output_gradient.shape[1]).to(dtype).transpose(-1, -2)


def factored_region(
    output_gradient: Tensor,
    value: Tensor,
    valid: Tensor | None,
    p: float,
    region: Region = "high",
    *,
    positions: int | None = None,
) -> Tensor:
    """Select the :func:`candidate_region` of the :func:`weights_gradient`, which need not be in memory as a whole.

    The two factors take Q·D and K·D numbers per head, their product Q·K. A GPU kernel does not store the product, up to
    2048 keys (1024 in float32; half as many on GPUs that share less memory, such as an RTX 4090); elsewhere about
    ``positions`` of it, at least one query row, are in memory at a time.

    Example:
        >>> value = torch.tensor([0.1, 0.4, 0.3, 0.2]).view(1, 1, 4, 1)
        >>> factored_region(torch.ones(1, 1, 1, 1), value, None, p=0.5)
        tensor([[[[False,  True,  True, False]]]])
    """
    if kernels.ranks(output_gradient, value):
        return kernels.region(output_gradient, value, valid, p, region)
    value = per_head(value, output_gradient.shape[1])
    if positions is None:
        positions = POSITIONS if value.is_cpu else GPU_POSITIONS
    rows = max(1, positions // max(1, math.prod(output_gradient.shape[:2]) * value.shape[-2]))
    chunks = []
    for first in range(0, output_gradient.shape[-2], rows):
        gradient = weights_gradient(output_gradient[..., first : first + rows, :], value)
        open_ = valid
        if valid is not None and valid.dim() > 1 and valid.shape[-2] > 1:
            open_ = valid[..., first : first + rows, :]
        chunks.append(candidate_region(gradient, open_, p, region))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, -2)


def _at(ascending: Tensor, rank: Tensor) -> Tensor:
    rank = rank.clamp(0, ascending.shape[-1] - 1)
    return ascending.gather(-1, rank.expand(*ascending.shape[:-1], 1))


def _sorted(values: Tensor) -> Tensor:
    is_plain = values.device.type == "cpu" and not torch.compiler.is_exporting()
    if is_plain and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))  # 40 times as fast as torch.sort with AVX-512
    return values.sort(-1).values
