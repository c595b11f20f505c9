"""Start the runs: as processes on this machine, or as commands for a scheduler; show how they go."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.results.document import duration, say
from attnreg.experiments.runs.signals import interruptible


class Board:
    """Print a line per run that ends, and show what runs, and how much time is left, in a bar.

    ``runs`` are all runs, including finished ones; ``total`` is their number in the end, if more will become known.
    """

    def __init__(self, runs: Sequence[PlannedRun], console: Console, *, total: int | None = None) -> None:
        self._runs, self._total, self._console = runs, total or len(runs), console
        self._running: dict[Path, str] = {}
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Progress(*columns, console=console, transient=True)
        self._before, self._began = self._done, time.monotonic()
        self._task = self._bar.add_task("", total=self._total, completed=self._done)

    @property
    def _done(self) -> int:
        return sum(run.finished for run in self._runs)

    def started(self, run: PlannedRun) -> None:
        """Note that a run has started."""
        self._running[run.folder] = _named(run)
        self._update()

    def ended(self, run: PlannedRun) -> None:
        """Note that a run has ended, with a result or without."""
        self._running.pop(run.folder, None)
        ended = f"{run.failure or 'no result'} (see {run.log})"
        if run.finished:
            ended = f"{run.score:.4f} ({run.seconds:.0f} s)"
        done, left = self._done, ""
        if self._before < done < self._total:
            seconds = (time.monotonic() - self._began) / (done - self._before) * (self._total - done)
            left = f", about {duration(seconds)} left"
        say(self._console, f"{_named(run)}: {ended}; {done} of {self._total} runs done{left}")
        self._update()

    def _update(self) -> None:
        self._bar.update(self._task, completed=self._done, description=" | ".join([*self._running.values()]))

    def __enter__(self) -> Board:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def _named(run: PlannedRun) -> str:
    role = "" if run.role == "final" else f" ({run.role})"
    return f"{run.method.name}{role}, seed {run.seed}"


Launcher = Callable[[Sequence[PlannedRun], Board], None]


def _make(words: Sequence[str], log: Path, threads: int, stopped: Sequence[object]) -> None:
    """Run one command in a child process, which is told to end when something is in ``stopped``.

    It also ends when this process ends.
    """
    variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "ATTNREG_CHILD": "1"}
    command, environment = [sys.executable, "-m", "attnreg", *words], {**os.environ, **variables}
    with log.open("wb") as file:
        stdin, stderr = subprocess.PIPE, subprocess.STDOUT
        with subprocess.Popen(command, stdin=stdin, stdout=file, stderr=stderr, env=environment) as child:
            while child.poll() is None and not stopped:
                time.sleep(0.05)
            child.terminate()  # so that it keeps a checkpoint; nothing happens if it has ended
            child.wait()  # before its input is closed, at which it would end at once


def usual_jobs(threads: int, on_cpu: bool) -> int:
    """Return the number of runs at a time: as many as fit the cores, at most four; one on a GPU."""
    from attnreg.experiments.setup.device import choose_device  # late: it imports torch

    if choose_device("cpu" if on_cpu else None).type != "cpu":
        return 1  # parallel runs would share the GPU's memory
    return max(1, min(4, (os.cpu_count() or 1) // threads))


def local(jobs: int, threads: int) -> Launcher:
    """Return a launcher that runs several processes at a time on this machine, each with so many threads."""

    def launch(runs: Sequence[PlannedRun], board: Board) -> None:
        broken: set[Method] = set()  # if a method's first run fails, its others probably would

        def make(run: PlannedRun) -> None:
            if run.method in broken or stopped:
                return
            board.started(run)
            run.prepare()
            _make(run.command_line(), run.log, threads, stopped)
            run.tidy()
            board.ended(run)
            if not any(other.finished for other in runs if other.method == run.method):
                broken.add(run.method)

        with interruptible() as stopped, ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(make, runs))
            except BaseException:
                stopped.append(signal.SIGTERM)  # for the other runs
                raise
        if stopped:
            raise KeyboardInterrupt

    return launch


def commands(runs: Sequence[PlannedRun], threads: int, echo: Callable[[str], None]) -> int:
    """Print one shell command per unfinished run that is not in progress; return how many."""
    waiting = [run for run in runs if not run.reader.running]
    for run in waiting:
        run.prepare()
        words = shlex.join(["attnreg", *run.command_line()])
        echo(f"cd {shlex.quote(str(Path.cwd()))} && OMP_NUM_THREADS={threads} {words}")
    return len(waiting)
