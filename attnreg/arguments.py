"""Checks of arguments, which return the value or raise :class:`InputError`, and type names for their ranges."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeVar

from attnreg.errors import InputError, did_you_mean

Probability: TypeAlias = float  # in [0, 1]
ProbabilityBelowOne: TypeAlias = float  # in [0, 1)
InnerProbability: TypeAlias = float  # in (0, 1)
NotNegative: TypeAlias = float  # at least 0
Count: TypeAlias = int  # at least 1
Index: TypeAlias = int  # at least 0

Choice = TypeVar("Choice", bound=str)

SMALLEST, LARGEST = 1e-6, 1e6  # a loss in float32 can be divided or multiplied by these
LARGEST_WHOLE = 2**31 - 1
LONG = 200  # characters
LARGEST_SIZE = 2**16  # for sizes that take memory


def probability(name: str, value: float, interval: str = "[0, 1]") -> float:
    """Return ``value`` if it is a number in ``[0, 1]``, or in this interval, whose ends may be open."""
    inside = _is_number(value) and 0 <= value <= 1
    if not inside or (value == 0 and interval[0] == "(") or (value == 1 and interval[-1] == ")"):
        raise InputError(f"Expected `{name}` to be a probability in {interval}, got {short(value)}.")
    return value


def positive(name: str, value: float) -> float:
    """Return ``value`` if it is a number in ``[SMALLEST, LARGEST]``."""
    if not _is_number(value) or not value > 0:
        raise InputError(f"Expected `{name}` to be above 0, got {short(value)}.")
    if not SMALLEST <= value <= LARGEST:
        raise InputError(f"Expected `{name}` to be in [{SMALLEST:g}, {LARGEST:g}], got {short(value)}.")
    return value


def not_negative(name: str, value: float) -> float:
    """Return ``value`` if it is a number in ``[0, LARGEST]``."""
    if not _is_number(value) or not value >= 0:
        raise InputError(f"Expected `{name}` to be 0 or more, got {short(value)}.")
    if value > LARGEST:
        raise InputError(f"Expected `{name}` to be at most {LARGEST:g}, got {short(value)}.")
    return value


def whole_number(name: str, value: int, *, least: int = 1, most: int = LARGEST_WHOLE) -> int:
    """Return ``value`` as an ``int`` if it is a whole number, maybe of numpy, from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        wanted = "a whole number"
    elif not least <= value <= most:
        wanted = f"at least {least}" if value < least else f"at most {most}"
    else:
        return int(value)
    raise InputError(f"Expected `{name}` to be {wanted}, got {short(value)}.")


def true_or_false(name: str, value: bool) -> bool:
    """Return ``value`` if it is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise InputError(f"Expected `{name}` to be True or False, got {short(value)}.")
    return value


def a_function(name: str, value: Any, of: str) -> Any:
    """Return ``value`` if it can be called; not a class, and not a loss of torch, which takes logits and labels."""
    if not callable(value) or isinstance(value, type) or type(value).__module__ == "torch.nn.modules.loss":
        raise InputError(f"Expected `{name}` to be a function of {of}, got {short(value)}.")
    return value


def one_of(name: str, value: Choice, choices: Sequence[str]) -> Choice:
    """Return ``value`` if it is one of the choices."""
    if value not in choices:
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise InputError(f"Expected `{name}` to be one of {', '.join(choices)}, got {short(value)}.{near}")
    return value


def short(value: object) -> str:
    """Return the value as text; only its type where that is long, as for a model."""
    return text if len(text := repr(value)) < LONG else f"a {type(value).__name__}"


def _is_number(value: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
