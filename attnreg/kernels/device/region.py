"""The candidate region of AD-DROP in one launch: the gradients of attention weights are never in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.errors import InputError
from attnreg.kernels.device.dropping import DTYPES
from attnreg.kernels.device.launch_attention import addressable
from attnreg.kernels.device.ranking import FRACTION, select_keys
from attnreg.kernels.launching import MOST_RANKED, launch, likeness

BYTES = 2**16  # of values in shared memory; small GPUs have 99 KiB
PLACES = 8192  # attributions in a block, but of at least 16 rows
PLACES_PER_WARP = 1024  # so that a thread holds 32
SCHEMA = "(Tensor output_gradient, Tensor value, Tensor? valid, float p, bool low) -> Tensor"


def region(output_gradient: Tensor, value: Tensor, valid: Tensor | None, p: float, region: str = "high") -> Tensor:
    """Return what :func:`attnreg.functional.factored_region` does, from float16, bfloat16 or float32.

    Products of float16 and bfloat16 are summed in float32. There are at most 2048 keys, 1024 in float32.

    Raises:
        InputError: if the arguments do not fit together.
    """
    if not 0 <= p <= 1:
        raise InputError(f"Expected `p` in [0, 1], got {p}.")
    if region not in ("high", "low"):
        raise InputError(f"Expected `region` to be one of ('high', 'low'), got {region!r}.")
    (heads, _, size), (shared, keys) = output_gradient.shape[1:], value.shape[1:3]
    if output_gradient.dtype not in DTYPES or value.dtype not in DTYPES:
        raise InputError(f"Expected float16, bfloat16 or float32, got {output_gradient.dtype} and {value.dtype}.")
    dtype = torch.promote_types(output_gradient.dtype, value.dtype)
    fit = heads % shared == 0 and value.shape[3] == size and len(value) == len(output_gradient)
    if not fit or keys * dtype.itemsize > MOST_RANKED:
        shapes = f"{tuple(output_gradient.shape)} and {tuple(value.shape)}"
        most = MOST_RANKED // dtype.itemsize
        raise InputError(f"Expected gradients and values of the same heads, and at most {most} keys, got {shapes}.")
    find = region_op if torch.compiler.is_compiling() else _region
    return find(output_gradient.detach(), value.detach(), valid, p, region == "low")


def _region(output_gradient: Tensor, value: Tensor, valid: Tensor | None, p: float, low: bool) -> Tensor:
    (batch, heads, queries, size), (shared, keys) = output_gradient.shape, value.shape[1:3]
    out = torch.empty((batch, heads, queries, keys), dtype=torch.bool, device=output_gradient.device)
    if not out.numel():
        return out
    if output_gradient.dtype != value.dtype:
        dtype = torch.promote_types(output_gradient.dtype, value.dtype)
        output_gradient, value = output_gradient.to(dtype), value.to(dtype)
    output_gradient, value = addressable(output_gradient), addressable(value)
    if keys * value.stride(2) >= 2**31:  # offsets of keys are in 32 bits
        value = value.contiguous()
    single = value.dtype is torch.float32
    mask = None
    if valid is not None:
        valid = valid.expand(out.shape)
        mask = (valid, *valid.stride())
    width = max(16, 1 << (keys - 1).bit_length())
    rows = max(16, min(64, PLACES // width))
    strides = output_gradient.stride()[:3], value.stride()[:3]
    share = round(p * 2**FRACTION.value)
    arguments = (output_gradient, value, out, mask, *strides, share, heads, heads // shared, queries, keys)
    step = 16 if single else min(32, BYTES // (2 * width))
    constants = (mask is not None, low, "ieee" if single else "tf32", size, step, rows, width)
    grid = (batch * heads * -(-queries // rows), 1, 1)
    warps = max(4, min(16, rows * width // PLACES_PER_WARP))
    launch(select_keys, grid, out.device, arguments, constants, likeness(arguments), warps=warps, stages=2)
    return out


@torch.library.custom_op("attnreg::region", mutates_args=(), schema=SCHEMA)
def region_op(output_gradient: Tensor, value: Tensor, valid: Tensor | None, p: float, low: bool) -> Tensor:
    """Return the region."""
    return _region(output_gradient, value, valid, p, low)


@region_op.register_fake
def _(output_gradient: Tensor, value: Tensor, *_: object) -> Tensor:
    return output_gradient.new_empty((*output_gradient.shape[:3], value.shape[2]), dtype=torch.bool)
