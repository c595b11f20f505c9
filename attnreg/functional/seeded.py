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
import struct
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from attnreg import kernels
from attnreg.kernels.seeds import MULTIPLIERS_64, SHIFTS_64, mix_64

BITS = 24  # of a number, as many as float32 holds
CHUNK = 2**16  # positions hashed at once on a CPU, so that they stay in its cache
GPU_CHUNK = 2**24  # and elsewhere, so that they take little memory, and starting the kernels little time
B_SHIFT, H_SHIFT = 40, 28
GOLDEN = 0x9E3779B1 - 2**32
MULTIPLIERS = 0x7FEB352D, 0x846CA68B - 2**32
LOW = {16: 2**16 - 1, 15: 2**17 - 1}  # a shift of signed integers repeats the sign: the bits that are not repeated


class Place(TypedDict, total=False):
    """Where the positions of a tensor are; see :func:`seeded_uniform`."""

    device: torch.device | None
    first_query: int | Tensor
    samples: Tensor | None
    first_key: Tensor | None


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
        shape: ``(..., H, Q, K)`` or fewer dimensions; those before H together count samples.
        place: ``device`` of the result, which does not change the bits; ``samples``, the index of each sample,
            ``(B,)``, in the first of two to four dimensions; ``first_query`` and ``first_key``, the indices of the
            first query and key, of which tensors must broadcast to ``(B, H, Q)``. By default, all begin at 0.

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
    """Derive a seed from a seed and a number, such as that of a layer: an integer of 64 bits or, as given, int64, 0-d.

    Example:
        >>> fold_seed(7, 0) == int(fold_seed(torch.tensor(7), 0)) != fold_seed(7, 1)
        True
    """
    if isinstance(seed, int):
        return mix_64(mix_64(seed) + number)
    return _mix_tensor(_mix_tensor(seed) + number)


def is_traced() -> bool:
    """Whether torch compiles or transforms a function, so that values cannot be read or changed in place."""
    return torch.compiler.is_compiling() or transformed()


def transformed() -> bool:
    """Whether a function transform such as ``vmap`` is running, in which tensor values cannot be read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def row_words(seed: int | Tensor, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two int32 words from which the numbers of a row follow, in the shape of the indices."""
    mixed = _mix_tensor((b << B_SHIFT) + (h << H_SHIFT) + q + _mix_64(seed))
    return mixed.to(torch.int32), (mixed >> 32).to(torch.int32)


def keep_of_rows(first: Tensor, second: Tensor, steps: Tensor, p: Tensor) -> Tensor:
    """Decide as :func:`seeded_keep` does, given the words of the rows and the steps of the keys."""
    return _as_float(_hashed((first, second), steps)) >= p


def key_steps(k: Tensor) -> Tensor:
    """Return int32, what a key adds to the first word of a row."""
    return k.to(torch.int32) * GOLDEN


def _everywhere(
    seed: int | Tensor,
    shape: Sequence[int],
    p: float | Tensor | None,
    device: torch.device | None = None,
    first_query: int | Tensor = 0,
    samples: Tensor | None = None,
    first_key: Tensor | None = None,
) -> Tensor:
    if device is not None and kernels.runs_on(device) and (torch.compiler.is_compiling() or not transformed()):
        written = kernels.numbers(seed, shape, p, device, first_query, samples, first_key)
        if written is not None:
            return written
    traced = is_traced()
    is_first = samples is None is first_key and isinstance(first_query, int) and not first_query
    if not traced and is_first and math.prod(shape) == 1 and not isinstance(seed, Tensor) and not isinstance(p, Tensor):
        number = _first_number(seed)
        return torch.full(tuple(shape), number if p is None else number >= _single(p), device=device)
    heads, queries, keys = (1, 1, 1, *shape)[-3:]
    b = torch.arange(math.prod(shape[:-3]), device=device)
    h, q = torch.arange(heads, device=device), torch.arange(queries, device=device)
    if samples is not None:
        samples = samples.to(b.device)
        b, h, q = (samples, h, q) if len(shape) > 3 else (b, samples, q) if len(shape) > 2 else (b, h, samples)
    words = row_words(seed, b[:, None, None], h[:, None], q + first_query)
    if first_key is not None:
        words = words[0] + key_steps(first_key), words[1]
    k = torch.arange(keys, device=device)
    if not traced and words[0].numel() and not k.is_meta:
        found = _in_chunks(words, k, p)
    else:
        found = _as_float(_hashed(tuple(word[..., None] for word in words), key_steps(k)))
        if p is not None:  # compiled code would fix a threshold; this comparison is the same
            found = found >= (p.to(torch.float32) if isinstance(p, Tensor) else p)
    return found.view(tuple(shape))


def _first_number(seed: int) -> float:
    """Return the number at position 0, without a tensor."""
    word = _mix_64(_mix_64(seed)) % 2**64
    x = word % 2**32
    x = (x ^ x >> 16) * MULTIPLIERS[0] % 2**32 ^ word >> 32
    x = (x ^ x >> 15) * MULTIPLIERS[1] % 2**32
    x ^= x >> 16
    return ((x >> (32 - BITS)) ^ 2 ** (BITS - 1)) * 2.0**-BITS  # as signed integers are ordered


def _in_chunks(words: tuple[Tensor, Tensor], k: Tensor, p: float | Tensor | None) -> Tensor:
    """Hash a few rows at a time and in place, which takes a third of the time on a CPU, and less memory anywhere."""
    first, second, keys = words[0].reshape(-1, 1), words[1].reshape(-1, 1), k.shape[0]
    out = torch.empty(first.shape[0], keys, dtype=torch.float32 if p is None else torch.bool, device=k.device)
    steps = key_steps(k)
    if isinstance(p, Tensor):  # a value on a GPU is not waited for
        p = float(p) if p.is_cpu or k.is_cpu else p.to(torch.float32).reshape(())
    threshold = 0 if p is None or isinstance(p, Tensor) else _threshold(p)
    at_once = max(1, (CHUNK if k.is_cpu else GPU_CHUNK) // max(1, keys))
    for begin in range(0, first.shape[0], at_once):
        rows = slice(begin, begin + at_once)
        a, c, part = (first, second, out) if at_once >= first.shape[0] else (first[rows], second[rows], out[rows])
        x = a + steps
        shifted = torch.empty_like(x)
        x ^= torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(LOW[16])
        x *= MULTIPLIERS[0]
        x ^= c
        x ^= torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(LOW[15])
        x *= MULTIPLIERS[1]
        x ^= torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(LOW[16])
        if p is None:
            part.copy_(_as_float(x))
        elif isinstance(p, Tensor):
            torch.ge(_as_float(x), p, out=part)
        else:
            torch.ge(x.bitwise_right_shift_(32 - BITS), threshold, out=part)
    return out


def _hashed(words: tuple[Tensor, ...], steps: Tensor) -> Tensor:
    a, c = words
    x = a + steps
    x = (x ^ (x >> 16 & LOW[16])) * MULTIPLIERS[0] ^ c
    x = (x ^ (x >> 15 & LOW[15])) * MULTIPLIERS[1]
    return x ^ (x >> 16 & LOW[16])


def _as_float(hashed: Tensor) -> Tensor:
    return ((hashed >> (32 - BITS)) + 2 ** (BITS - 1)) * 2.0**-BITS


def _single(p: float) -> float:
    (single,) = struct.unpack("f", struct.pack("f", p))
    return float(single)


@functools.lru_cache
def _threshold(p: float) -> int:
    """Return the lowest of the hashed numbers, without their low bits, at which a position is kept."""
    return math.ceil(_single(p) * 2**BITS) - 2 ** (BITS - 1)


def _mix_64(x: int | Tensor) -> int | Tensor:
    """Apply the finalizer of splitmix64, in arithmetic modulo 2^64."""
    return _mix_tensor(x) if isinstance(x, Tensor) else mix_64(x)


def _mix_tensor(x: Tensor) -> Tensor:
    # Shifted to the right as if they were unsigned.
    for shift, multiplier in zip(SHIFTS_64, MULTIPLIERS_64, strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (multiplier - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))
