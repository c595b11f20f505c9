"""Checks that several providers' constructors share."""

from __future__ import annotations


def probability(name: str, value: float) -> float:
    """Return ``value`` if it is a probability.

    Raises:
        ValueError: if it is not a number in ``[0, 1]``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"Expected `{name}` to be a probability in [0, 1], got {value!r}.")
    return value
