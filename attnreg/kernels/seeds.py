"""The finalizer of splitmix64 on integers, by which seeds are mixed."""

from __future__ import annotations

SHIFTS_64 = 30, 27
MULTIPLIERS_64 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix_64(x: int) -> int:
    """Return the mixed integer, of 64 bits, signed.

    Example:
        >>> mix_64(0), mix_64(1)
        (0, 6238072747940578789)
    """
    x %= 2**64
    for shift, multiplier in zip(SHIFTS_64, MULTIPLIERS_64, strict=True):
        x = (x ^ x >> shift) * multiplier % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def seed_halves(seed: int) -> tuple[int, int]:
    """Return the two halves of a mixed seed, each of 32 bits, signed."""
    mixed = mix_64(seed)
    low = mixed & 0xFFFFFFFF
    return mixed >> 32, low - 2**32 if low >= 2**31 else low
