"""Start the runs: as processes on this machine, on a Ray cluster, or as commands for a scheduler."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attnreg.errors import InputError
from attnreg.experiments.compare.board import Board
from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.planned import PlannedRun

Launcher = Callable[[Sequence[PlannedRun], Board], None]


def _make(
    words: Sequence[str],
    log: str,
    threads: int,
    begun: Callable[[subprocess.Popen[bytes]], None] | None = None,
    folder: str | None = None,
) -> None:
    """Run one command in a child process, which ends when this process ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "attnreg.experiments.cli.child", *words]
    with Path(log).open("wb") as file:
        stdin, stderr = subprocess.PIPE, subprocess.STDOUT
        child = subprocess.Popen(command, stdin=stdin, stdout=file, stderr=stderr, env=environment, cwd=folder)
        if begun is not None:
            begun(child)
        child.wait()
    assert child.stdin is not None
    child.stdin.close()


def usual_jobs(threads: int, on_cpu: bool) -> int:
    """Return the number of runs at a time: as many as fit the cores, at most four; one on a GPU."""
    from attnreg.experiments.setup.device import choose_device  # late: it imports torch

    if choose_device("cpu" if on_cpu else None).type != "cpu":
        return 1  # parallel runs would share the GPU's memory
    return max(1, min(4, (os.cpu_count() or 1) // threads))


def local(jobs: int, threads: int) -> Launcher:
    """Return a launcher that runs several processes at a time on this machine, each with so many threads."""

    def launch(runs: Sequence[PlannedRun], board: Board) -> None:
        children: list[subprocess.Popen[bytes]] = []
        stopped = threading.Event()
        broken: set[Method] = set()  # if a method's first run fails, its others probably would

        def begun(child: subprocess.Popen[bytes]) -> None:
            children.append(child)
            if stopped.is_set():  # perhaps after all others were ended
                child.terminate()

        def make(run: PlannedRun) -> None:
            if run.method in broken or stopped.is_set():
                return
            board.started(run)
            run.prepare()
            _make(run.command_line(), str(run.log), threads, begun)
            run.tidy()
            board.ended(run)
            if not any(other.finished for other in runs if other.method == run.method):
                broken.add(run.method)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(make, runs))
            except BaseException:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for child in children:
                    child.terminate()
                raise

    return launch


def ray(threads: int, on_cpu: bool) -> Launcher:
    """Return a launcher for the Ray cluster at ``RAY_ADDRESS``, or on this machine. All nodes must share the folder."""
    try:
        import ray as engine
    except ImportError as error:
        raise InputError("--launcher ray needs Ray: pip install ray.") from error

    def launch(runs: Sequence[PlannedRun], board: Board) -> None:
        engine.init(ignore_reinit_error=True, log_to_driver=False)
        most = max(node["Resources"].get("CPU", 0) for node in engine.nodes())
        if threads > most:
            raise InputError(f"Expected --threads of at most {most:g}, the most CPUs of one machine, got {threads}.")
        gpus = 1 if engine.cluster_resources().get("GPU") and not on_cpu else 0
        make: Any = engine.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_make)
        here = str(Path.cwd())
        waiting: dict[Any, PlannedRun] = {}
        for run in runs:
            run.prepare()
            waiting[make.remote(run.command_line(), str(run.log.resolve()), threads, None, here)] = run
            board.started(run)
        while waiting:
            (done,), _ = engine.wait(list(waiting))
            run = waiting.pop(done)
            try:
                engine.get(done)
            except engine.exceptions.RayError as error:
                run.log.write_text(f"Ray: {error}", encoding="utf-8")
            run.tidy()
            board.ended(run)

    return launch


def commands(runs: Sequence[PlannedRun], threads: int, echo: Callable[[str], None]) -> int:
    """Print one shell command per unfinished run that is not in progress; return how many."""
    waiting = [run for run in runs if not run.reader.running]
    for run in waiting:
        run.prepare()
        words = shlex.join(["attnreg", *run.command_line()])
        echo(f"cd {shlex.quote(str(Path.cwd()))} && OMP_NUM_THREADS={threads} {words}")
    return len(waiting)
