"""Tries of a fit side by side: the same logits as alone, and no process where it is of no use."""

import copy
import pickle
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pickle import PicklingError
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnreg.experiments.fit import race as of_race
from attnreg.experiments.fit import side_by_side
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.race import Race
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.fit.side_by_side import Processes
from attnreg.experiments.fit.tries import Try
from tests.helpers.bench import MadeUp


class Pool:
    """Runs what is submitted at once, here, on a copy of what it is given, as another process would have."""

    def __init__(self, count, **options):
        self.given, self.fails_at, self.fault = [], None, None

    def submit(self, function, *given):
        self.given.append(function)
        future = Future()
        if len(self.given) == self.fails_at:
            future.set_exception(self.fault)
        else:
            function, given = pickle.loads(pickle.dumps((function, given)))
            future.set_result(function(*given))
        return future

    def shutdown(self, kill_workers):
        assert kill_workers


@pytest.fixture
def bench(bench, monkeypatch):
    monkeypatch.setattr(side_by_side.loky, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(side_by_side.loky, "cpu_count", lambda: 2)
    monkeypatch.setattr(side_by_side.os, "getppid", side_by_side.os.getpid)
    monkeypatch.setattr(side_by_side.psutil, "virtual_memory", lambda: SimpleNamespace(available=1e11))
    bench.threads, bench.seconds = 2, 0.05
    return bench


@pytest.fixture(scope="module")
def jobs():
    (train, held), other = np.split(np.arange(48), [32]), np.arange(32)
    tries = [Try(1, 1e-3), Try(penalty=0.1), Try(2, 1e-3), Try(1, 1e-3, fits_head=True)]
    return [(which, train if number % 2 else other, held, number) for number, which in enumerate(tries)]


@pytest.fixture(scope="module")
def alone(made_bench, jobs):
    """The logits of jobs that are done in this process."""
    bench = copy.deepcopy(made_bench)
    return [bench.out_of_fold(*job, lambda: None) for job in jobs]


def started(bench, left=1000.0):
    processes = Processes(bench)
    processes.start(left)
    return processes


def assert_as_alone(found, alone):
    assert sorted(found) == [0, 1, 2, 3]
    for number, logits in enumerate(alone):
        np.testing.assert_allclose(found[number], logits, atol=1e-6)


def test_logits_are_those_of_one_process(bench, jobs, alone):
    processes = started(bench)
    found = dict(processes.out_of_fold(jobs, lambda: None))
    assert processes.count == 2
    assert len(processes._pool.given) == 2 + 3  # two measure, three train; the probe is fitted here
    assert_as_alone(found, alone)


@pytest.mark.parametrize("fault", [BrokenProcessPool("killed"), RuntimeError("not enough memory"), PicklingError()])
def test_jobs_of_a_process_with_a_fault_are_done_alone(fault, bench, jobs, alone):
    processes = started(bench)
    processes._pool.fails_at, processes._pool.fault = 4, fault
    assert_as_alone(dict(processes.out_of_fold(jobs, lambda: None)), alone)
    assert processes.count == processes.slower == 1


def test_a_bench_is_sent_without_its_texts(bench, jobs, alone):
    sent = pickle.loads(pickle.dumps(bench))
    np.testing.assert_allclose(sent.out_of_fold(*jobs[0], lambda: None), alone[0], atol=1e-6)


def test_few_trainings_are_done_one_after_the_other_where_processes_are_slow(bench, jobs, alone):
    processes = started(bench)
    processes.count, processes.slower = 8, 5.0
    assert_as_alone(dict(processes.out_of_fold(jobs, lambda: None)), alone)
    assert len(processes._pool.given) == 2  # those that measured


@pytest.mark.parametrize("seconds", [0.1, 1e-9])
def test_processes_are_kept_if_they_are_faster(seconds, bench):
    bench.seconds = seconds
    assert started(bench).count == (2 if seconds > 1e-3 else 1)


@pytest.mark.parametrize(
    ("threads", "left", "memory"), [(1, 1000.0, 1e11), (2, 100.0, 1e11), (2, 1000.0, 1.5e9)], ids=str
)
def test_no_process_is_started_without_cores_time_and_memory(threads, left, memory, bench, monkeypatch):
    bench.threads = threads
    monkeypatch.setattr(side_by_side.psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
    assert started(bench, left)._pool is None


def test_the_longest_process_is_that_of_the_longest_jobs():
    processes = Processes(None)
    assert processes.longest([3.0, 2.0]) == 5
    processes.count, processes.slower = 2, 1.5
    assert processes.longest([3.0, 2.0, 2.0]) == 1.5 * 4
    assert processes.longest([3.0]) == 3  # alone, with all threads
    processes.count, processes.slower = 8, 5.0
    assert processes.longest([3.0, 2.0]) == 5  # one after the other
    assert processes.longest([1.0] * 8) == 5


@pytest.mark.parametrize("budget", [60.0, 400.0])
def test_a_race_of_many_processes_does_more_and_keeps_its_budget(budget, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: now[0]))
    cores = 1

    class Simulated(Processes):
        def start(self, left):
            self.count, self.slower = cores, 1.5 if cores > 1 else 1.0

        def out_of_fold(self, jobs, tick):
            times = [
                which.passes * len(train) * self.bench.seconds for which, train, _, _ in jobs if not which.is_probe
            ]
            now[0] += self.longest(times) if times else 0.0
            for number, job in enumerate(jobs):
                yield number, self.bench.out_of_fold(*job, tick)

    monkeypatch.setattr(of_race, "Processes", Simulated)
    trainings = []
    for many in (1, 2, 6):
        now[0], cores = 0.0, many
        rows = Rows.checked([f"text {number}" for number in range(200)], [number % 2 for number in range(200)])
        found = Race(
            MadeUp(rows, [0.0], lambda which: 0.6 if which.is_probe else 0.9),
            rows,
            Clock(budget, lambda text: None),
            0,
            None,
        ).run()
        assert now[0] + found.best.passes * len(rows) * 0.01 <= budget
        assert not found.best.is_probe
        trainings.append(found.trainings)
    assert trainings == sorted(trainings)
    assert trainings[-1] > trainings[0]


@pytest.mark.slow
def test_processes_train_as_this_one_does(bench, jobs, alone, monkeypatch):
    monkeypatch.undo()
    processes = started(bench)
    assert processes.count == 2
    found = dict(processes.out_of_fold(jobs, lambda: None))
    processes.stop()
    torch.set_num_threads(1)
    assert_as_alone(found, alone)
