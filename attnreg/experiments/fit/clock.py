"""The time of a fit."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence

from attnreg.errors import InputError
from attnreg.experiments.results.document import duration
from attnreg.training.method import Batch

_QUIET = 30.0  # seconds without a line
_TELLING = 0.1  # of the budget, after which it is clear how long the reading of all rows takes
_BUDGET = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


class Clock:
    """The budget of a fit in seconds, of which an earlier process of the same fit may have spent some."""

    #: Seconds since a fixed moment; an experiment on a busy machine may count the CPU seconds of the process.
    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, budget: float, say: Callable[[str], None]) -> None:
        self.budget, self.say = budget, say
        self._began = self._said = self.now()

    def resume(self, seconds: float) -> None:
        """Count seconds that an earlier process has spent."""
        self._began -= seconds

    @property
    def spent(self) -> float:
        """Seconds that are spent."""
        return self.now() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.budget - self.spent

    def paced(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the batches that a model reads; raise if the budget does not suffice to read all of them once."""
        sizes, began, read = [next(iter(batch.values())).numel() for batch in batches], self.spent, 0
        for batch, size in zip(batches, sizes, strict=True):
            passed = self.spent - began
            needed = passed * sum(sizes) / read if read else 0.0
            if passed > _TELLING * self.budget and needed > self.budget:
                raise InputError(
                    f"Only to read all rows once takes about {duration(needed)} here, more than the budget: give a "
                    "larger one, fewer rows, or a smaller model."
                )
            self.tick("reading all rows")
            yield batch
            read += size

    def tick(self, activity: str) -> None:
        """Say, at most every half a minute, what the fit is doing and how much time is left."""
        if self.now() - self._said > _QUIET:
            self.tell(activity)

    def tell(self, news: str) -> None:
        """Say what has happened, and how much time is left."""
        self._said = self.now()
        self.say(f"{news}  (at most {duration(max(0.0, self.left))} left)")


def seconds_of(budget: str | float) -> float:
    """Return a budget, such as ``"15m"``, ``"1h30m"``, ``"90s"`` or a number of seconds, in seconds.

    Example:
        >>> seconds_of("1h30m"), seconds_of("90"), seconds_of(90)
        (5400.0, 90.0, 90.0)
    """
    match = _BUDGET.fullmatch(str(budget).strip().lower())
    amounts = [float(amount or 0) for amount in match.groups()] if match else [0.0]
    seconds = sum(amount * unit for amount, unit in zip(amounts, (3600, 60, 1), strict=False))
    if seconds <= 0:
        raise InputError(f"Expected a budget such as 15m, 90s or 1h, got {budget!r}.")
    return seconds
