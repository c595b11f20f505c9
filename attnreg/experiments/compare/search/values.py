"""The values that a search may give to an option or an argument: a range, or a choice."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.errors import InputError

if TYPE_CHECKING:
    from optuna.trial import Trial

_RANGE = re.compile(r"([^\s/]+?)\.\.([^\s/]+)(?:\s+(\S+))?")
_DIGITS = 3  # of a number that is drawn, so that the winner is easy to read and type


@dataclass(frozen=True)
class Range:
    """The numbers between two ends.

    Args:
        low: the lower end.
        high: the upper end.
        log: draw the logarithm uniformly.
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether both ends are whole numbers; then all numbers are."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def extremes(self) -> Sequence[Any]:
        """The values to check before the search starts."""
        return [self.low, self.high]

    @property
    def start(self) -> Any:
        """The value of a first trial, as optuna stores it: the middle."""
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return round(middle) if self.whole else middle

    def draw(self, trial: Trial, name: str) -> Any:
        """Draw a number; one that is not whole has three significant digits."""
        if self.whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        value = trial.suggest_float(name, self.low, self.high, log=self.log)
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """A list of values; a single one is fixed."""

    values: Sequence[Any]

    @property
    def extremes(self) -> Sequence[Any]:
        """The values to check before the search starts: all."""
        return self.values

    @property
    def start(self) -> Any:
        """The value of a first trial, as optuna stores it: the first one, or ``None`` if there is nothing to choose."""
        return literal(self.values[0]) if len(self.values) > 1 else None

    def draw(self, trial: Trial, name: str) -> Any:
        """Choose a value."""
        if len(self.values) == 1:
            return self.values[0]
        named = {literal(value): value for value in self.values}  # optuna's file holds no lists
        return named[trial.suggest_categorical(name, list(named))]


Values = Range | Choice


def read_values(value: Any, name: str) -> Values:
    """Read a range such as ``0.1..0.5``, ``1..8`` or ``1e-5..1e-3 log``, a list of choices, or a fixed value.

    Args:
        value: the value, as YAML reads it.
        name: what has this value, for messages.

    Raises:
        InputError: if it is none of these.

    Example:
        >>> read_values("1e-5..1e-3 log", "--learning-rate")
        Range(low=1e-05, high=0.001, log=True)
        >>> read_values("1..8", "window").whole, read_values([1, 8], "window")
        (True, Choice(values=[1, 8]))
    """
    if isinstance(value, str) and (found := _RANGE.fullmatch(value.strip())):
        low, high = _number(found[1]), _number(found[2])
        log = found[3] == "log"
        numbers = not isinstance(low, str) and not isinstance(high, str) and (log or found[3] is None)
        if not numbers or not low < high or (log and low <= 0):
            raise InputError(
                f"Expected {name} in the search space as a range from low to high, such as 0.1..0.5 or "
                f"1e-5..1e-3 log (above 0), got {value!r}."
            )
        return Range(low, high, log)
    values = [_number(each) for each in value] if isinstance(value, list) else [_number(value)]
    if not values or any(isinstance(each, dict) for each in values):
        raise InputError(
            f"Expected {name} in the search space as a range such as 0.1..0.5, a list of values, or a value, got "
            f"{value!r}."
        )
    return Choice(values)


def literal(value: Any) -> str:
    """Return a value as it is written in an expression; texts are in double quotes.

    Example:
        >>> literal("scores"), literal([0, 1]), literal(True), literal(0.5)
        ('"scores"', '[0, 1]', 'True', '0.5')
    """
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _number(value: Any) -> Any:
    """Return the number that a text stands for (YAML reads ``1e-5`` as a text), or else the value itself."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        return number if math.isfinite(number) else value
    return value
