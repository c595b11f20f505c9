"""The progress display of a comparison or a search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnreg.experiments.compare.planned import PlannedRun, seconds_left
from attnreg.experiments.results.document import say


class Board:
    """Print a line for each run that ends and, on a terminal, show what runs now, what is done, and the time left.

    ``runs`` are all runs, including finished ones; ``budget`` is their number in the end, if more will become known.
    """

    def __init__(self, runs: Sequence[PlannedRun], jobs: int, console: Console, *, budget: int | None = None) -> None:
        self._runs, self._jobs, self._console = list(runs), jobs, console
        self._budget = budget or len(self._runs)
        self._running: dict[Path, str] = {}
        self._failed: set[Path] = set()
        self._status = console.status(self._summary())

    def started(self, run: PlannedRun) -> None:
        """Note that a run has started."""
        self._running[run.folder] = _named(run)
        self._update()

    def ended(self, run: PlannedRun) -> None:
        """Note that a run has ended, with a result or without."""
        self._running.pop(run.folder, None)
        if run.finished:
            outcome = f"{run.score:.4f} ({run.seconds:.0f} s)"
        else:
            self._failed.add(run.folder)
            outcome = f"failed: see {run.log}"
        say(self._console, f"{_named(run)}: {outcome}; {self._summary()}")
        self._update()

    def _update(self) -> None:
        self._status.update(" | ".join([self._summary(), *list(self._running.values())]))

    def _summary(self) -> str:
        done = sum(run.finished for run in self._runs)
        return f"{done} of {self._budget} runs done{self._time_left()}"

    def _time_left(self) -> str:
        going_on = [run for run in self._runs if run.folder not in self._failed]
        each = seconds_left(going_on, self._budget - len(self._runs))
        if not each:
            return ""
        seconds = sum(each) / min(self._jobs, len(each))
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"

    def __enter__(self) -> Board:
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()


def _named(run: PlannedRun) -> str:
    role = "" if run.role == "final" else f" ({run.role})"
    return f"{run.method.name}{role}, seed {run.seed}"
