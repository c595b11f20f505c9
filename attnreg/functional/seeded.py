r"""Random numbers that are a pure function of a seed and a position: the same bits on any device, compiled or not.

A row is hashed in 64 bits, by the finalizer of splitmix64; its two halves, a and c, and k in 32 bits, by two rounds of
multiplication. Only integer arithmetic with wrap-around is used, which is exact everywhere:

.. math::
    (a, c) = \mathrm{mix}_{64}(\mathrm{mix}_{64}(\text{seed}) + 2^{40} b + 2^{28} h + q), \qquad
    u = 2^{-24} \lfloor 2^{-8}\, \mathrm{mix}_{32}(a + g k,\, c) \rfloor
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from attnreg import kernels
from attnreg.kernels.seeds import MULTIPLIERS_64, SHIFTS_64, mix_64

BITS = 24  # of a number, as many as float32 holds
CHUNK = 2**16  # positions hashed at once on a CPU, so that they stay in its cache
GPU_CHUNK = 2**24  # positions hashed at once on other devices, so that they take little memory
B_SHIFT, H_SHIFT = 40, 28
GOLDEN = 0x9E3779B1 - 2**32
MULTIPLIERS = 0x7FEB352D, 0x846CA68B - 2**32
LOW = {16: 2**16 - 1, 15: 2**17 - 1}  # a shift of signed integers repeats the sign: the bits that are not repeated

INTERPRETERS: Any = torch._C._functorch.peek_interpreter_stack  # the innermost function transform that runs


class Place(TypedDict, total=False):
    """The first indices and the device of a tensor; see :func:`seeded_uniform`."""

    device: torch.device | None
    first_query: int | Tensor
    samples: Tensor | None
    first_key: Tensor | None
    traced: bool | None


def uniform_at(seed: int | Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the random numbers at some positions: float32 in ``[0, 1)``, multiples of 2^-24.

    The seed is any integer; or int64, 0-d, so that compiled code serves all seeds. b, h, q and k are indices of samples
    (at most 2^23), heads (2^12), queries (2^28) and keys, int64, which broadcast.

    Example:
        >>> one, keys = torch.tensor(0), torch.arange(4)
        >>> uniform_at(7, one, one, one, keys)
        tensor([0.9648, 0.1883, 0.0521, 0.4259])
    """
    return _as_float(_hashed(row_words(seed, b, h, q), key_steps(k)))


def seeded_uniform(seed: int | Tensor, shape: Sequence[int], **place: Unpack[Place]) -> Tensor:
    """Return the random numbers of :func:`uniform_at` at all positions of a tensor.

    Args:
        seed: as in :func:`uniform_at`.
        shape: ``(..., H, Q, K)`` or fewer dimensions; all dimensions before H together count samples.
        place: ``device`` of the result, which does not change the bits; ``samples``, the index of each sample,
            ``(B,)``, in the first of two to four dimensions; ``first_query`` and ``first_key``, the indices of the
            first query and key, of which tensors must broadcast to ``(B, H, Q)``. By default, all begin at 0.
            ``traced``: the result of ``is_traced``, if it is known.

    Example:
        >>> whole = seeded_uniform(7, (2, 3, 4, 5))
        >>> bool(whole[1, 2, 3, 4] == uniform_at(7, *torch.tensor([1, 2, 3, 4])))
        True
    """
    return _everywhere(seed, shape, None, **place)


def seeded_keep(seed: int | Tensor, shape: Sequence[int], p: float | Tensor, **place: Unpack[Place]) -> Tensor:
    """Decide at all positions of a tensor whether to keep them: whether :func:`seeded_uniform` is at least p, 0-d.

    Example:
        >>> seeded_keep(7, (4,), p=0.5)
        tensor([ True, False, False, False])
    """
    return _everywhere(seed, shape, p, **place)


def fold_seed(seed: int | Tensor, number: int) -> int | Tensor:
    """Derive a seed from a seed and a number, such as a layer's index: of 64 bits, or int64, 0-d, like the seed.

    Example:
        >>> fold_seed(7, 0) == int(fold_seed(torch.tensor(7), 0)) != fold_seed(7, 1)
        True
    """
    if isinstance(seed, Tensor):
        return _mix_tensor(_mix_tensor(seed) + number)
    return mix_64(mix_64(seed) + number)


def on_device(numbers: Sequence[Any], device: torch.device | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for a GPU of NVIDIA.

    MPS, which may read numbers after they are freed (https://github.com/pytorch/pytorch/issues/189690), is waited for.
    """
    is_cuda = device is not None and device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=is_cuda)


def is_traced() -> bool:
    """Whether torch compiles or transforms a function, so that values cannot be read or changed in place."""
    return torch.compiler.is_compiling() or INTERPRETERS() is not None


def transformed() -> bool:
    """Whether a function transform such as ``vmap`` is running, in which tensor values cannot be read."""
    return INTERPRETERS() is not None


def row_words(seed: int | Tensor, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two int32 words from which the numbers of a row follow, in the shape of the indices."""
    mixed_seed = _mix_tensor(seed) if isinstance(seed, Tensor) else mix_64(seed)
    mixed = _mix_tensor((b << B_SHIFT) + (h << H_SHIFT) + q + mixed_seed)
    return mixed.to(torch.int32), (mixed >> 32).to(torch.int32)


def keep_of_rows(first: Tensor, second: Tensor, steps: Tensor, p: Tensor) -> Tensor:
    """Decide as :func:`seeded_keep` does, from the words of rows and the steps of keys."""
    return _as_float(_hashed((first, second), steps)) >= p


def key_steps(k: Tensor) -> Tensor:
    """Return the number, int32, that a key adds to the first word of a row."""
    return k.to(torch.int32) * GOLDEN


def _everywhere(
    seed: int | Tensor,
    shape: Sequence[int],
    p: float | Tensor | None,
    device: torch.device | None = None,
    first_query: int | Tensor = 0,
    samples: Tensor | None = None,
    first_key: Tensor | None = None,
    traced: bool | None = None,
) -> Tensor:
    if traced is None or type(seed) is not int:
        traced = is_traced()
    device = torch.get_default_device() if device is None and not traced else device
    if device is not None and kernels.runs_on(device) and (not traced or torch.compiler.is_compiling()):
        from_kernel = kernels.numbers(seed, shape, p, device, first_query, samples, first_key)
        if from_kernel is not None:
            return from_kernel
    if not traced and device is not None and device.type == "cpu":
        return _on_cpu(int(seed), tuple(shape), p, first_query, samples, first_key)
    heads, queries, keys = (1, 1, 1, *shape)[-3:]
    b = torch.arange(math.prod(shape[:-3]), device=device)
    h, q = torch.arange(heads, device=device), torch.arange(queries, device=device)
    if samples is not None:
        samples = samples.to(b.device)
        b, h, q = (samples, h, q) if len(shape) > 3 else (b, samples, q) if len(shape) > 2 else (b, h, samples)
    words = row_words(seed, b[:, None, None], h[:, None], q + first_query)
    if first_key is not None:
        words = words[0] + key_steps(first_key), words[1]
    steps = key_steps(torch.arange(keys, device=device))
    rows = words[0].numel() if traced else max(1, GPU_CHUNK // max(1, keys))
    if rows >= words[0].numel():
        return _decided(words, steps, p).view(tuple(shape))
    chunks = zip(*(word.reshape(-1).split(rows) for word in words), strict=True)
    return torch.cat([_decided(chunk, steps, p) for chunk in chunks]).view(tuple(shape))


def _decided(words: tuple[Tensor, Tensor], steps: Tensor, p: float | Tensor | None) -> Tensor:
    """Return the numbers of these rows, or with p whether they are at least p."""
    numbers = _as_float(_hashed((words[0][..., None], words[1][..., None]), steps))
    if p is None:
        return numbers
    if isinstance(p, Tensor):  # reading a value would wait for a GPU
        return numbers >= p.to(numbers.device, torch.float32).reshape(())
    return numbers >= p  # an integer threshold would be fixed in compiled code; this comparison is equivalent


def _on_cpu(
    seed: int,
    shape: tuple[int, ...],
    p: float | Tensor | None,
    first_query: int | Tensor,
    samples: Tensor | None,
    first_key: Tensor | None,
) -> Tensor:
    """Hash with numpy, whose unsigned integers take a third less time; few rows at once stay in the cache."""
    rows, steps, room = _rows_and_steps(shape)
    if samples is not None:
        dims = len(shape) - 1
        offsets = (samples.numpy() - np.arange(len(samples))).astype(np.uint64) << (0, 0, H_SHIFT, B_SHIFT)[dims]
        rows = rows + offsets.reshape(-1, *[1] * (dims - 1))
    if type(first_query) is not int:
        rows, first_query = rows + np.asarray(first_query).astype(np.uint64), 0
    x = rows.reshape(-1, 1) + np.uint64((mix_64(seed) + first_query) % 2**64)
    for shift, multiplier in zip(SHIFTS_64, MULTIPLIERS_64, strict=True):
        x = (x ^ x >> shift) * multiplier
    x ^= x >> 31
    a, c = x.astype(np.uint32), (x >> 32).astype(np.uint32)
    if first_key is not None:
        first = np.broadcast_to(first_key.numpy().astype(np.uint32), rows.shape).reshape(-1, 1)
        a = a + first * (GOLDEN % 2**32)
    limit = 0 if p is None else _threshold(float(p)) << (32 - BITS)
    out = np.empty((a.shape[0], steps.shape[0]), np.float32 if p is None else np.bool_)
    for begin in range(0, a.shape[0], room):
        part = slice(begin, begin + room)
        word = a[part] + steps
        word ^= word >> 16
        word *= MULTIPLIERS[0]
        word ^= c[part]
        word ^= word >> 15
        word *= MULTIPLIERS[1] % 2**32
        word ^= word >> 16
        signed = word.view(np.int32)
        if p is None:
            out[part] = ((signed >> (32 - BITS)) + 2 ** (BITS - 1)) * np.float32(2.0**-BITS)
        else:
            np.greater_equal(signed, limit, out=out[part])
    return torch.from_numpy(out).view(shape)


@functools.lru_cache(maxsize=8)
def _rows_and_steps(shape: tuple[int, ...]) -> tuple[Any, Any, int]:
    """Return the indices of rows ``(B, H, Q)`` as one number, the steps of keys, and the number of rows per chunk."""
    heads, queries, keys = (1, 1, 1, *shape)[-3:]
    b, h, q = (np.arange(size, dtype=np.uint64) for size in (math.prod(shape[:-3]), heads, queries))
    rows = (b << B_SHIFT)[:, None, None] + (h << H_SHIFT)[:, None] + q
    return rows, np.arange(keys, dtype=np.uint32) * (GOLDEN % 2**32), max(1, CHUNK // max(1, keys))


def _hashed(words: tuple[Tensor, ...], steps: Tensor) -> Tensor:
    a, c = words
    x = a + steps
    x = (x ^ (x >> 16 & LOW[16])) * MULTIPLIERS[0] ^ c
    x = (x ^ (x >> 15 & LOW[15])) * MULTIPLIERS[1]
    return x ^ (x >> 16 & LOW[16])


def _as_float(hashed: Tensor) -> Tensor:
    return ((hashed >> (32 - BITS)) + 2 ** (BITS - 1)) * 2.0**-BITS


@functools.lru_cache
def _threshold(p: float) -> int:
    """Return the lowest of the hashed numbers, without their low bits, at which a position is kept."""
    return math.ceil(float(np.float32(p)) * 2**BITS) - 2 ** (BITS - 1)


def _mix_tensor(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64, in arithmetic modulo 2^64."""
    # The masks after right shifts make signed integers behave like unsigned ones.
    for shift, multiplier in zip(SHIFTS_64, MULTIPLIERS_64, strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (multiplier - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))
