"""Training of tries side by side, in processes of a few threads, where that trains more rows a second."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

import psutil
from joblib.externals import loky

if TYPE_CHECKING:
    from attnreg.experiments.fit.rows import Numbers
    from attnreg.experiments.fit.tries import Bench, Logits, Try

    Training = tuple[Try, Numbers, Numbers, int]  # rows to train on, rows held out, seed

_START, _PART = 10.0, 0.05  # seconds to start processes; share of the time left that starting and measuring may take
_MOST = 8  # processes
_FASTER = 1.1  # times, by which processes together must be faster than one
_PROCESS, _WEIGHT = 1e9, 20  # bytes of a process, and of a weight: two copies, the gradient and two moments
_LOOK = 1.0  # seconds between two looks
_FAULTS = (RuntimeError, MemoryError, PicklingError)  # a training's own fault comes again in this process
_IDLE = 60.0  # seconds after which a process without work ends; loky starts another one where needed


class Processes:
    """Processes with a copy of the bench; before they start, and after they stop, only this process trains."""

    count, slower = 1, 1.0  #: processes, and how many times as long a training takes in one of them
    _pool: Any = None

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def start(self, left: float) -> None:
        """Start processes if cores, memory and the seconds left suffice, and if they train more rows a second."""
        cores = min(self.bench.threads, loky.cpu_count())  # loky counts those of a container
        if cores < 2 or multiprocessing.current_process().daemon:  # daemons may have no children
            return
        weights = sum(weight.numel() for weight in self.bench.model.parameters())
        longer = self.bench.latest.kind.max_length / self.bench.kind.max_length
        memory = _PROCESS * longer + _WEIGHT * weights
        count = int(min(cores, _MOST, psutil.virtual_memory().available // memory))
        if count < 2:
            return
        if _START + count * self.bench.seconds * self.bench.measured_rows > _PART * left:
            return
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self._pool = loky.ProcessPoolExecutor(count, timeout=_IDLE, env=dict.fromkeys(names, str(cores // count)))
        try:
            futures = [self._pool.submit(self.bench.seconds_with, cores // count) for _ in range(count)]
            seconds = count / sum(1 / future.result() for future in futures)
        except _FAULTS:
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

    def out_of_fold(self, jobs: Sequence[Training], tick: Callable[[], None]) -> Iterator[tuple[int, Logits]]:
        """Yield number and logits of every job, in the order in which they end; ``tick`` is called in between."""
        slow = self.bench.slowness
        loads = {number: slow(way) * way.passes * len(train) for number, (way, train, _, _) in enumerate(jobs)}
        waiting = list[int]()
        # Only if that is faster than one after the other. The longest job, at the end of the list, starts first.
        if self.count > 1 and self._packed([*loads.values()]) < sum(loads.values()):
            waiting = sorted((number for number in loads if loads[number]), key=loads.__getitem__)
        futures: dict[Future[Any], int] = {}
        try:
            while waiting or futures:
                while waiting and len(futures) < self.count:
                    number = waiting.pop()
                    futures[self._pool.submit(_out_of_fold, self.bench, jobs[number], os.getpid())] = number
                for done in wait(futures, _LOOK, FIRST_COMPLETED).done:
                    logits, seconds = done.result()
                    self.bench.observe(seconds / self.slower)
                    del loads[number := futures.pop(done)]
                    yield number, logits
                tick()
        except _FAULTS:  # such as a process that the system has ended for its memory: this process goes on alone
            self.stop()
        for number in loads:
            yield number, self.bench.out_of_fold(*jobs[number], tick)

    def longest(self, loads: Sequence[float]) -> float:
        """Return the time that trainings take with all processes, if they take these times in one process alone."""
        return min(sum(loads), self._packed(loads))

    def _packed(self, loads: Sequence[float]) -> float:
        """Return the time of the process that ends last."""
        times = [0.0] * self.count
        for load in sorted(loads, reverse=True):
            times[times.index(min(times))] += load
        return max(times) * self.slower


def _out_of_fold(bench: Bench, job: Training, parent: int) -> tuple[Logits, float]:
    """Return the logits of a job, and the seconds of a row; end this process if its parent has ended."""

    def tick() -> None:
        if os.getppid() != parent:
            os._exit(1)

    bench.seconds = math.nan
    return bench.out_of_fold(*job, tick), bench.seconds
