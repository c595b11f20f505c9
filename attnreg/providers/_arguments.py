"""Checks that several providers' constructors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from attnreg.errors import InputError

Choice = TypeVar("Choice", bound=str)


def probability(name: str, value: float) -> float:
    """Return ``value`` if it is a probability.

    Raises:
        ValueError: if it is not a number in ``[0, 1]``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InputError(f"Expected `{name}` to be a probability in [0, 1], got {value!r}.")
    return value


def one_of(name: str, value: Choice, choices: Sequence[str]) -> Choice:
    """Return ``value`` if it is one of the choices.

    Raises:
        ValueError: if it is not.
    """
    if value not in choices:
        raise InputError(f"Expected `{name}` to be one of {', '.join(choices)}, got {value!r}.")
    return value
