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


def inner_probability(name: str, value: float) -> float:
    """Return ``value`` if it is a probability that has a logit.

    Raises:
        ValueError: if it is not a number in ``(0, 1)``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise InputError(f"Expected `{name}` to be a probability in (0, 1), got {value!r}.")
    return value


def positive(name: str, value: float) -> float:
    """Return ``value`` if it is above 0.

    Raises:
        ValueError: if it is not.
    """
    if not value > 0:
        raise InputError(f"Expected `{name}` to be above 0, got {value!r}.")
    return value


def not_negative(name: str, value: float) -> float:
    """Return ``value`` if it is 0 or more.

    Raises:
        ValueError: if it is not.
    """
    if not value >= 0:
        raise InputError(f"Expected `{name}` to be 0 or more, got {value!r}.")
    return value


def at_least_one(name: str, value: int) -> int:
    """Return ``value`` if it is 1 or more.

    Raises:
        ValueError: if it is not.
    """
    if value < 1:
        raise InputError(f"Expected `{name}` to be at least 1, got {value!r}.")
    return value


def one_of(name: str, value: Choice, choices: Sequence[str]) -> Choice:
    """Return ``value`` if it is one of the choices.

    Raises:
        ValueError: if it is not.
    """
    if value not in choices:
        raise InputError(f"Expected `{name}` to be one of {', '.join(choices)}, got {value!r}.")
    return value
