"""The time of a fit."""

from __future__ import annotations

import time
from collections.abc import Callable

from attnreg.experiments.results.document import duration

_QUIET = 30.0  # seconds without a line


class Clock:
    """The budget of a fit, in seconds of this machine, of which an earlier part of the fit may have spent some."""

    #: Seconds that have passed since some time; an experiment on a busy machine may count those of the process.
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

    def tick(self, doing: str) -> None:
        """Say what is being done and how much time is left, every half a minute."""
        if self.now() - self._said > _QUIET:
            self.tell(doing)

    def tell(self, what: str) -> None:
        """Say something, and how much time is left."""
        self._said = self.now()
        self.say(f"{what}  (at most {duration(max(0.0, self.left))} left)")
