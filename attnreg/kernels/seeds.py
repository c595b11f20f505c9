"""The finalizer of splitmix64 on integers, by which seeds are mixed."""

from __future__ import annotations

SHIFTS_64 = 30, 27
MULTIPLIERS_64 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

LOW_22 = 2**22 - 1


def mix_64(x: int) -> int:
    """Return the mixed integer, of 64 bits, signed.

    Example:
        >>> mix_64(0), mix_64(1)
        (0, 6238072747940578789)
    """
    x %= 2**64
    x = (x ^ x >> SHIFTS_64[0]) * MULTIPLIERS_64[0] % 2**64
    x = (x ^ x >> SHIFTS_64[1]) * MULTIPLIERS_64[1] % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def seed_parts(mixed: int) -> tuple[float, float, float]:
    """Split an integer of 64 bits into three numbers of 22 bits or fewer, lowest first, for a kernel.

    They are floats, since Triton compiles a kernel again for integers that are 1 or divisible by 16.
    """
    return float(mixed & LOW_22), float(mixed >> 22 & LOW_22), float(mixed >> 44 & LOW_22)
