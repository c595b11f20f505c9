"""Tries side by side: processes with a few threads each, where they train more rows a second than one with all."""

from __future__ import annotations

import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

import psutil
from joblib.externals import loky

if TYPE_CHECKING:
    from attnreg.experiments.fit.rows import Numbers
    from attnreg.experiments.fit.tries import Bench, Logits, Try

    Job = tuple[Try, Numbers, Numbers, int]  # rows to train on, rows held out, seed

_WORTH = 300.0  # seconds that must be left for processes to be worth their start, of about ten
_MOST = 8  # processes
_FASTER = 1.1  # times, by which they must be faster together
_PROCESS, _WEIGHT = 1e9, 16  # bytes of a process, and of each weight with its gradient and moments
_LOOK = 1.0  # seconds between two looks
_IDLE = 60.0  # seconds, after which a process without work ends; it is started again where needed


class Processes:
    """Processes that have a bench each; as long as they are not started, there is only this one."""

    count, slower = 1, 1.0  #: how many there are, and how many times as long a training takes in each
    _pool: Any = None

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def start(self, left: float) -> None:
        """Start processes if cores, memory and the seconds left allow, and if they train more rows a second."""
        weights = sum(each.numel() for each in self.bench.model.parameters()) if self.bench.threads > 1 else 0
        most = psutil.virtual_memory().available // (_PROCESS + _WEIGHT * weights)
        count = int(min(self.bench.threads, loky.cpu_count(), most, _MOST))  # CPUs of a container, too
        if count < 2 or left < _WORTH or multiprocessing.current_process().daemon:  # daemons may have no children
            return
        threads = self.bench.threads // count
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self._pool = loky.ProcessPoolExecutor(count, timeout=_IDLE, env=dict.fromkeys(names, str(threads)))
        try:
            together = [self._pool.submit(self.bench.seconds_with, threads) for _ in range(count)]
            seconds = count / sum(1 / each.result() for each in together)
        except BrokenProcessPool:
            seconds = math.inf
        if seconds / count < self.bench.seconds / _FASTER:
            self.count, self.slower = count, seconds / self.bench.seconds
        else:
            self.stop()

    def stop(self) -> None:
        """End all processes but this one."""
        if self._pool is not None:
            self._pool.shutdown(kill_workers=True)
        self.count, self.slower, self._pool = 1, 1.0, None

    def out_of_fold(self, jobs: Sequence[Job], tick: Callable[[], None]) -> Iterator[tuple[int, Logits]]:
        """Yield the number of each job and its logits when it is done; ``tick`` is called in between."""
        left = dict(enumerate(jobs))
        trainings = [number for number, job in left.items() if not job[0].is_probe]
        trainings.sort(key=lambda number: -jobs[number][0].passes)  # so that no long one is the last
        if self.count > 1 and len(trainings) > 1:
            try:
                futures: dict[Future[Any], int] = {
                    self._pool.submit(_out_of_fold, self.bench, jobs[n], os.getpid()): n for n in trainings
                }
                while futures:
                    with warnings.catch_warnings():  # a process whose memory has grown is started again
                        warnings.filterwarnings("ignore", "A worker stopped")
                        finished = wait(futures, _LOOK, FIRST_COMPLETED).done
                    for done in finished:
                        logits, seconds = done.result()
                        self.bench.observe(seconds / self.slower)
                        del left[number := futures.pop(done)]
                        yield number, logits
                    tick()
            except BrokenProcessPool:  # the system has ended a process, for its memory: this one goes on alone
                self.stop()
        for number, job in left.items():
            yield number, self.bench.out_of_fold(*job, tick)

    def longest(self, loads: Sequence[float]) -> float:
        """Return the time of the process that is done last, if trainings take these times in one process alone."""
        if len(loads) == 1:
            return loads[0]
        of_each = [0.0] * self.count
        for load in sorted(loads, reverse=True):
            of_each[of_each.index(min(of_each))] += load
        return max(of_each) * self.slower


def _out_of_fold(bench: Bench, job: Job, parent: int) -> tuple[Logits, float]:
    """Return the logits of a job, and the seconds of a row; end with the parent."""

    def tick() -> None:
        if os.getppid() != parent:
            os._exit(1)

    bench.seconds = math.nan
    return bench.out_of_fold(*job, tick), bench.seconds
