"""The progress display of a comparison or a search."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import fmean, stdev

from rich.console import Console
from rich.live import Live
from rich.table import Table

from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.results.document import say


def _shown(run: PlannedRun) -> str:
    return run.method.name if run.role == "final" else f"{run.method.name} ({run.role})"


class Board:
    """Print a line for each run that ends and, on a terminal, a live table of progress, scores and time left.

    ``runs`` are all runs, including finished ones; ``budget`` is their number in the end, if more will become known.
    """

    def __init__(self, runs: Sequence[PlannedRun], jobs: int, console: Console, *, budget: int | None = None) -> None:
        self._runs = list(runs)
        self._budget = budget or len(self._runs)
        self._jobs = jobs
        self._console = console
        self._running: set[PlannedRun] = set()
        self.failed: list[PlannedRun] = []  # runs that ended without a result
        self._lock = threading.Lock()
        self._live = Live(console=console, transient=True, get_renderable=self._table, refresh_per_second=1)

    def started(self, run: PlannedRun) -> None:
        """Note that a run has started."""
        with self._lock:
            self._running.add(run)

    def ended(self, run: PlannedRun) -> None:
        """Note that a run has ended, with a result or without."""
        with self._lock:
            self._running.discard(run)
            if run.finished:
                outcome = f"{run.score:.4f} ({run.seconds:.0f} s)"
            else:
                self.failed.append(run)
                outcome = f"failed: see {run.log}"
        say(self._console, f"{_shown(run)}, seed {run.seed}: {outcome}; {self._summary()}")

    def _summary(self) -> str:
        done = sum(run.finished for run in self._runs)
        return f"{done} of {self._budget} runs done{self._time_left()}"

    def _time_left(self) -> str:
        left = [run for run in self._runs if not run.finished and run not in self.failed]
        known: dict[str, list[float]] = {}
        for run in self._runs:
            if run.finished:
                known.setdefault(run.method.words[0], []).append(run.seconds)
        if not (left or self._budget > len(self._runs)) or not known:
            return ""
        usual = fmean(seconds for times in known.values() for seconds in times)
        each = [fmean(known.get(run.method.words[0], [usual])) for run in left]
        each += [usual] * (self._budget - len(self._runs))
        seconds = sum(each) / min(self._jobs, len(each))
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"

    def _table(self) -> Table:
        table = Table("method", caption=self._summary(), caption_justify="left")
        for column in ("done", "running", "left", "score"):
            table.add_column(column, justify="right")
        with self._lock:
            for name in dict.fromkeys(map(_shown, self._runs)):
                runs = [run for run in self._runs if _shown(run) == name]
                scores = [run.score for run in runs if run.finished]
                running = sum(run in self._running for run in runs)
                score = f"{fmean(scores):.4f}" if scores else ""
                score += f" ± {stdev(scores):.4f}" if len(scores) > 1 else ""
                left = len(runs) - len(scores) - running
                table.add_row(name, str(len(scores)), str(running), str(left), score)
        return table

    def __enter__(self) -> Board:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
