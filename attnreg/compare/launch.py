"""Making runs: in processes on this machine, on a Ray cluster, or as commands for a scheduler."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from attnreg.compare.planned import PlannedRun
from attnreg.errors import InputError


class Watcher(Protocol):
    """Somebody who wants to know."""

    def started(self, run: PlannedRun) -> None:
        """A run begins."""

    def ended(self, run: PlannedRun) -> None:
        """A run has ended, finished or not."""


Launcher = Callable[[Sequence[PlannedRun], Watcher], None]


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
            arguments = [sys.executable, "-m", "attnreg.cli.child", *run.command()]
            with run.log.open("wb") as log:
                environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
                child = subprocess.Popen(
                    arguments, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
                )
                children.append(child)
                child.wait()
            assert child.stdin is not None
            child.stdin.close()
            run.tidy()
            watcher.ended(run)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                for _ in pool.map(make, runs):
                    pass
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in children:
                    child.terminate()
                raise

    return launch


def ray(threads: int) -> Launcher:
    """Tasks on the Ray cluster that ``RAY_ADDRESS`` names, or on this machine; all nodes must share the folder.

    Args:
        threads: CPUs of each run; it gets a GPU too where the cluster has some.

    Raises:
        InputError: if Ray is not installed.
    """
    try:
        import ray as engine
    except ImportError as error:
        raise InputError("Expected Ray for --launcher ray, found none: pip install 'attnreg[ray]'.") from error

    def launch(runs: Sequence[PlannedRun], watcher: Watcher) -> None:
        engine.init(ignore_reinit_error=True, log_to_driver=False)
        gpus = 1 if engine.cluster_resources().get("GPU") else 0

        @engine.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)
        def make(arguments: list[str], log: str, folder: str) -> None:
            with open(log, "wb") as file:  # noqa: PTH123 (runs on another machine)
                environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                subprocess.run(
                    [sys.executable, "-m", "attnreg", *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=folder,
                    check=False,
                )

        here = os.getcwd()  # noqa: PTH109
        waiting: dict[Any, PlannedRun] = {}
        for run in runs:
            waiting[make.remote(run.command(), str(run.log.resolve()), here)] = run
            watcher.started(run)
        while waiting:
            (done,), _ = engine.wait(list(waiting))
            run = waiting.pop(done)
            run.tidy()
            watcher.ended(run)

    return launch


def commands(runs: Sequence[PlannedRun], echo: Callable[[str], None]) -> None:
    """Print one command a line, for a scheduler of one's own.

    Args:
        runs: what is to be made.
        echo: prints a line.
    """
    for run in runs:
        echo(shlex.join(["attnreg", *run.command()]))
