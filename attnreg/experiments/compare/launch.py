"""Making runs: in processes on this machine, on a Ray cluster, or as commands for a scheduler."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from attnreg.errors import InputError
from attnreg.experiments.compare.planned import PlannedRun


class Watcher(Protocol):
    """Somebody who wants to know."""

    def started(self, run: PlannedRun) -> None:
        """A run begins."""

    def ended(self, run: PlannedRun) -> None:
        """A run has ended, finished or not."""


Launcher = Callable[[Sequence[PlannedRun], Watcher], None]


def _make(
    words: Sequence[str],
    log: str,
    threads: int,
    begun: Callable[[subprocess.Popen[bytes]], None] | None = None,
    folder: str | None = None,
) -> None:
    """One run in a process that ends with this one."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    with Path(log).open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "attnreg.experiments.cli.child", *words],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
        if begun is not None:
            begun(child)
        child.wait()
    assert child.stdin is not None
    child.stdin.close()


def local(jobs: int, threads: int) -> Launcher:
    """Several processes at a time.

    Args:
        jobs: number of processes.
        threads: of each; the same for any number of jobs, since sums depend on it in their last bits.
    """

    def launch(runs: Sequence[PlannedRun], watcher: Watcher) -> None:
        children: list[subprocess.Popen[bytes]] = []

        def make(run: PlannedRun) -> None:
            watcher.started(run)
            run.prepare()
            _make(run.command_line(), str(run.log), threads, children.append)
            run.tidy()
            watcher.ended(run)
            if not any(other.finished for other in runs):
                pool.shutdown(wait=False, cancel_futures=True)  # what ails the first one ails them all

        with ThreadPoolExecutor(jobs) as pool:
            try:
                for _ in pool.map(make, runs):
                    pass
            except CancelledError:
                pass
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in children:
                    child.terminate()
                raise

    return launch


def ray(threads: int, on_cpu: bool) -> Launcher:
    """Tasks on the Ray cluster that ``RAY_ADDRESS`` names, or on this machine; all nodes must share the folder.

    Args:
        threads: CPUs of each run.
        on_cpu: do without a GPU where the cluster has some; otherwise each run gets one.

    Raises:
        InputError: if Ray is not installed, or no machine of the cluster has so many CPUs.
    """
    try:
        import ray as engine
    except ImportError as error:
        raise InputError("Expected Ray for --launcher ray, found none: pip install 'attnreg[ray]'.") from error

    def launch(runs: Sequence[PlannedRun], watcher: Watcher) -> None:
        engine.init(ignore_reinit_error=True, log_to_driver=False)
        most = max(node["Resources"].get("CPU", 0) for node in engine.nodes())
        if threads > most:
            raise InputError(f"Expected --threads of at most {most:g}, as a machine of the cluster has, got {threads}.")
        gpus = 1 if engine.cluster_resources().get("GPU") and not on_cpu else 0
        make: Any = engine.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_make)
        here = str(Path.cwd())
        waiting: dict[Any, PlannedRun] = {}
        for run in runs:
            run.prepare()
            waiting[make.remote(run.command_line(), str(run.log.resolve()), threads, None, here)] = run
            watcher.started(run)
        while waiting:
            (done,), _ = engine.wait(list(waiting))
            run = waiting.pop(done)
            try:
                engine.get(done)
            except engine.exceptions.RayError as error:
                run.log.write_text(f"Ray: {error}", encoding="utf-8")
            run.tidy()
            watcher.ended(run)

    return launch


def commands(runs: Sequence[PlannedRun], threads: int, echo: Callable[[str], None]) -> int:
    """Print one command a line, for a scheduler of one's own, for each run that no process is at.

    Args:
        runs: what is to be made.
        threads: CPU threads of each.
        echo: prints a line.

    Returns:
        how many were printed.
    """
    waiting = [run for run in runs if not run.running]
    for run in waiting:
        run.prepare()
        words = shlex.join(["attnreg", *run.command_line()])
        echo(f"cd {shlex.quote(str(Path.cwd()))} && OMP_NUM_THREADS={threads} {words}")
    return len(waiting)
