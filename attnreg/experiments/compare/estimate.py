"""How long runs take: timed steps before the first one, and the share of its steps that a running one has made."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from typing_extensions import override

from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.folder.history import History
from attnreg.experiments.runs.run import Run
from attnreg.training.method import TrainingMethod

_STEPS = 2  # that are timed in an epoch, after a first one


class _Measured(Exception):  # noqa: N818 (no error)
    """Ends a run that is only timed."""


class _Timed(Run):
    """A run that trains for a few steps of its first two epochs, writes nothing, and then ends."""

    seconds = 0.0  #: of all its steps

    @override
    def fit(self, method: TrainingMethod) -> History:
        seconds = list[float]()
        for epoch in range(min(2, self.epochs)):  # AD-DROP acts in the second one
            method.on_epoch(epoch)
            clocks = [time.perf_counter()]
            for batch in itertools.islice(self.train_batches(epoch).epoch(epoch), 1 + _STEPS):
                float(method.step(batch).loss)  # waits for the device
                clocks.append(time.perf_counter())
            steps = [after - before for before, after in itertools.pairwise(clocks)]
            seconds += steps[1:] or steps
        self.seconds = fmean(seconds) * self.total_steps
        raise _Measured

    @override
    def report(self, *args: Any, **options: Any) -> None:
        raise _Measured


def timed(run: PlannedRun) -> float:
    """Return the seconds that the steps of a run will take on this machine, by a few of them."""
    settings = run.settings
    made = _Timed(settings)
    recipe: Callable[..., None] = inspect.unwrap(run.method.command.callback)  # type: ignore[arg-type]
    with suppress(_Measured):
        recipe(made, **settings.own)
    return made.seconds


class Clock:
    """Estimates the time that is left, from runs that have ended and from the steps of those that are running."""

    def __init__(self, runs: Sequence[PlannedRun], total: int) -> None:
        self._runs, self._total = runs, total
        self._known: dict[Method, list[float]] = {}
        self._began: dict[Path, tuple[float, float]] = {}  # of running runs: when, and the share that was done
        self._over = set[Path]()  # ended, with a result or without
        self._most, self._lock = 1, threading.Lock()
        for run in runs:
            if run.finished:
                self._known.setdefault(run.method, []).append(run.seconds)

    def started(self, run: PlannedRun) -> None:
        """Note that a run has started."""
        with self._lock:
            self._began[run.folder] = time.monotonic(), run.reader.share_done
            self._most = max(self._most, len(self._began))

    def ended(self, run: PlannedRun) -> None:
        """Note that a run has ended."""
        with self._lock:
            self._over.add(run.folder)
            began, before = self._began.pop(run.folder, (0.0, 1.0))
            if run.finished and before < 1:
                self._known.setdefault(run.method, []).append((time.monotonic() - began) / (1 - before))

    def left(self) -> float | None:
        """Return the estimate in seconds; ``None`` until a first run has logged some steps."""
        with self._lock:
            began, known = dict(self._began), {method: list(each) for method, each in self._known.items()}
        now, remaining = time.monotonic(), dict[Path, float]()
        for run in (run for run in self._runs if run.folder in began):
            since, before = began[run.folder]
            if (share := run.reader.share_done) > before:
                whole = (now - since) / (share - before)
                remaining[run.folder] = whole * (1 - share)
                known.setdefault(run.method, []).append(whole)
        if not known:
            return None
        usual = fmean(itertools.chain.from_iterable(known.values()))
        waiting = [run for run in self._runs if run.folder not in {*remaining, *self._over} and not run.finished]
        seconds = sum(fmean(known[run.method]) if run.method in known else usual for run in waiting)
        later = (self._total - len(self._runs)) * usual
        return (sum(remaining.values()) + seconds + later) / self._most


def shares(runs: Sequence[PlannedRun], named: Mapping[Path, str]) -> str:
    """Say which runs are running, and how far they are."""
    told = {run.folder: run.reader.share_done for run in runs if run.folder in named}
    return " | ".join(f"{named[folder]} ({share:.0%})" for folder, share in told.items())
