"""Make the runs of comparisons: as processes on this machine, or as commands for a scheduler; show how they go."""

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
from statistics import fmean

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attnreg.errors import InputError, StoppedError, counted
from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.compare.report.study import write_study_report
from attnreg.experiments.compare.scoring import score_further
from attnreg.experiments.compare.study import Study
from attnreg.experiments.results.document import duration, say
from attnreg.experiments.runs.stopping import interruptible

STOPPED = "Stopped. Repeat the command to continue."


def make(study: Study, launcher: str, jobs: int | None, threads: int, *, of_file: bool) -> None:
    """Make the runs of comparisons that have not finished, and show the results; a study file also has a report.

    Raises an ``InputError`` in the end if runs have failed, a ``StoppedError`` if they were stopped by hand.
    """
    # Other lines go to stderr, so that a shell that reads the commands does not run them.
    console, failures = Console(stderr=launcher == "commands"), list[str]()
    for name, comparison in study.comparisons.items():
        if of_file:
            console.rule(name)
        with comparison.begun():
            if launcher == "commands":
                if pending := in_turn(comparison.runs()):
                    count = commands(pending, threads, click.echo)
                    progress = f"{counted(count, 'run')} to start, {len(pending) - count} running."
                    click.echo(f"{progress} Repeat this command when they have finished.", err=True)
                    continue
            elif (failure := _make_runs(comparison, jobs, threads, console)) is not None:
                failures.append(failure)
            for run in comparison.runs():
                run.tidy()  # runs from elsewhere, or from a comparison that was killed, are not tidy yet
            kept = [run for run in comparison.runs() if run.finished and run.keep_model]
            if missing := sum(not (run.folder / "model").is_dir() for run in kept):
                gone = f"{counted(missing, 'finished run')} kept no model"
                click.echo(f"{gone}: to repeat one, remove its folder.", err=True)
            if STOPPED not in failures:
                try:
                    failures += score_further(comparison, study.score_on.get(name, ()))
                except KeyboardInterrupt:
                    failures.append(STOPPED)
            if results := write_report(comparison):
                saved = f"Report saved to {comparison.folder}/report.md and {comparison.folder}/report.html."
                say(console, *results, *comparison.missing(), saved)
        if STOPPED in failures:
            break
    if of_file and (tables := write_study_report(study)):
        say(console, *tables, f"Report of the study saved to {study.folder}/report.md and report.html.")
    if STOPPED in failures:
        raise StoppedError(" ".join(failures), exit_code=128 + signal.SIGINT)
    if failures:
        raise InputError(" ".join(failures))


def _make_runs(comparison: Comparison, jobs: int | None, threads: int, console: Console) -> str | None:
    """Make the runs of a comparison that have not finished; return the reason if a run still has no result."""
    on_cpu, tried = comparison.options.get("device") == "cpu", set[Path]()
    start = local(jobs or usual_jobs(threads, on_cpu), threads)
    while True:
        for run in (planned := comparison.runs()):
            run.check()  # again, since the data or a file may have changed
        runs = [run for run in in_turn(planned) if run.folder not in tried]
        if not runs:
            break
        tried.update(run.folder for run in runs)  # a failed run starts again only when the command is repeated
        with Board(planned, console) as board:
            try:
                start(runs, board)
            except KeyboardInterrupt:
                return STOPPED
        comparison.decide()
    failed = [run for run in comparison.runs() if run.failure is not None]
    if not failed:
        return None
    return f"{len(failed)} of the runs failed. The log of the first, {failed[0].log}, ends with: {failed[0].failure}"


def in_turn(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that have not finished, in the order in which they are made."""
    return sorted((run for run in runs if not run.finished), key=lambda run: run.turn)


def describe(study: Study) -> None:
    """Print the runs of comparisons that are known so far, their number and an estimate of their time."""
    console, times, total = Console(), list[float](), 0
    for comparison in study.comparisons.values():
        runs = comparison.runs()
        done = [run for run in runs if run.finished]
        total += len(runs)
        times += [run.seconds for run in done]
        say(console, f"{comparison.folder}: {counted(len(runs), 'run')}, {len(done)} finished")
        for run in runs:
            say(console, f"  {run.method.name}, {run.role}, seed {run.seed}: {'finished' if run in done else 'to run'}")
        for method in comparison.methods:
            if comparison.chosen(method) is None:
                total += comparison.seeds
                final = counted(comparison.seeds, "run")
                say(console, f"  {method.name}, final: {final}, once its search has finished")
    estimate = ""
    if times:
        mean = fmean(times)
        estimate = f"; at {mean:.0f} s per run, {duration(mean * (total - len(times)))} of computing are left"
    say(console, f"{counted(total, 'run')} in all{estimate}.")


class Board:
    """Print a line per run that ends; a bar shows which runs are in progress and how much time is left.

    ``runs`` are all runs, finished or not; ``total`` is their number in the end, if more runs will follow.
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
        self._done_at_start, self._began = self._done, time.monotonic()
        self._task = self._bar.add_task("", total=self._total, completed=self._done)

    @property
    def _done(self) -> int:
        return sum(run.finished for run in self._runs)

    def started(self, run: PlannedRun) -> None:
        """Note that a run has started."""
        self._running[run.folder] = _label(run)
        self._update()

    def ended(self, run: PlannedRun) -> None:
        """Note that a run has ended, with a result or without."""
        self._running.pop(run.folder, None)
        outcome = f"{run.failure or 'no result'} (see {run.log})"
        if run.finished:
            outcome = f"{run.score:.4f} ({run.seconds:.0f} s)"
        done, estimate = self._done, ""
        if self._done_at_start < done < self._total:
            seconds = (time.monotonic() - self._began) / (done - self._done_at_start) * (self._total - done)
            estimate = f", about {duration(seconds)} left"
        say(self._console, f"{_label(run)}: {outcome}; {done} of {self._total} runs done{estimate}")
        self._update()

    def _update(self) -> None:
        self._bar.update(self._task, completed=self._done, description=" | ".join([*self._running.values()]))

    def __enter__(self) -> Board:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def _label(run: PlannedRun) -> str:
    role = "" if run.role == "final" else f" ({run.role})"
    return f"{run.method.name}{role}, seed {run.seed}"


Launcher = Callable[[Sequence[PlannedRun], Board], None]


def _make(words: Sequence[str], log: Path, threads: int, stopped: Sequence[object]) -> None:
    """Run one command in a child process, which is terminated when ``stopped`` is not empty.

    The child also ends when this process ends.
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
    """Return a launcher that runs several processes at a time on this machine, with these threads per process."""

    def launch(runs: Sequence[PlannedRun], board: Board) -> None:
        broken: set[Method] = set()  # if a method's first run fails, the method's other runs probably would

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
