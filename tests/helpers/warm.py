"""Processes of their own that begin where importing has ended.

Starting Python and importing torch, transformers and datasets takes ten times as long as most runs of these tests. So
Python's fork server imports them, by importing this module, and each command runs in a fork of it: with memory, files,
signals and limits of its own, and with an end of its own. What must be seen to start from nothing is started by
``subprocess`` all the same.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import connection, forkserver
from pathlib import Path

import pytest

from tests.helpers.light import lighten, with_few_dev_rows

ROOT = Path(__file__).parents[2]
IN_THE_SERVER = "ATTNREG_FORK_SERVER"


class Warm:
    """Starts what ``python -m MODULE``, ``python -c CODE`` and ``python FILE`` would, in forks of a server.

    In what has been started so, ``"fork"`` as method starts forks of that process itself.
    """

    def __init__(self, method="forkserver"):
        self._context = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload([__name__])
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(ROOT)
                patch.setenv(IN_THE_SERVER, "1")
                patch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")  # a thread
                # What tests of this process have found out of the network is not known to others.
                patch.delenv("HF_HUB_OFFLINE", raising=False)
                forkserver.ensure_running()

    def popen(self, command, *, stdin=None, stdout=None, stderr=None, env=None, cwd=None):
        """As ``subprocess.Popen``, for a command of ``sys.executable`` whose errors go where its output goes."""
        assert (command[0], stderr) == (sys.executable, subprocess.STDOUT)
        if env is not None and env.get("OMP_NUM_THREADS") != os.environ["OMP_NUM_THREADS"]:  # it is read at the start
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd)
        return Process(self._context, command[1:], stdin, stdout, env, cwd)

    def run(self, *words, cwd, timeout, processes=1):
        """Run to its end, perhaps as so many processes that train together; gives its exit code and what it printed."""
        with Process(self._context, words, cwd=cwd, processes=processes) as process:
            output, _ = process.communicate(timeout)
        return process.returncode, output


class Process:
    """As much of ``subprocess.Popen`` as is used here; without ``stdout``, what is printed is kept in a file."""

    _lock = threading.Lock()  # to start one process asks for the ends of all others, and one thread alone may ask

    def __init__(self, context, words, stdin=None, stdout=None, env=None, cwd=None, processes=1):
        self.returncode = None
        self.stdin = None
        self._kept = tempfile.TemporaryFile() if stdout is None else None  # noqa: SIM115
        if stdin == subprocess.PIPE:
            source, writing = os.pipe()
            self.stdin = os.fdopen(writing, "wb")
            os.register_at_fork(after_in_child=self.stdin.close)  # or no process would see the end of its input
        else:
            source = os.open(os.devnull, os.O_RDONLY)
        output = os.dup((self._kept or stdout).fileno())
        words = [str(word) for word in words]
        # As connections, files find their way through the server.
        with connection.Connection(source) as source, connection.Connection(output) as output, self._lock:
            given = (source, output, dict(os.environ if env is None else env), os.fspath(cwd or Path.cwd()))
            self._process = context.Process(target=be, args=(words, processes, *given))
            self._process.start()
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        self.wait()
        for file in (self._kept, self.stdin):
            if file is not None:
                file.close()

    def poll(self):
        """Its exit code, if it has ended by now: minus the signal where one has ended it."""
        with self._lock:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout=None):
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.poll()

    def communicate(self, timeout=None):
        self.wait(timeout)
        self._kept.seek(0)
        return self._kept.read().decode(), None

    def terminate(self, number=signal.SIGTERM):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.terminate(signal.SIGKILL)


def be(words, processes, source, output, environment, folder):
    """Be what Python would be with these arguments, or several of it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, numbers in ((source, [0]), (output, [1, 2])):
        for number in numbers:
            os.dup2(file.fileno(), number)
        file.close()
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another one there
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if processes == 1:
        return begin(words)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        1, 1, processes, run_id="tests", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        start_method="fork",
    )  # fmt: skip
    return elastic_launch(config, begin)(words)  # as ``torchrun``, but for forks of this process


def begin(words):
    """Run a module, code or a file."""
    first, *others = words
    if first == "-c":
        sys.argv, sys.path[0] = [first, *others[1:]], ""
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv, sys.path[0] = others, str(Path.cwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *others], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def warm_up():
    """Import what is slow to import and make what is made once. It must start no threads: forks would lack them."""
    import transformers

    with_few_dev_rows()
    lighten()

    inner = ("cli.main", "compare.make", "compare.study", "results.plots.run", "runs.run", "tasks.metrics")
    for name in ("integrations", *(f"experiments.{each}" for each in inner)):
        importlib.import_module(f"attnreg.{name}")
    for name in ("AutoTokenizer", "BertForSequenceClassification", "Trainer", "get_linear_schedule_with_warmup"):
        getattr(transformers, name)
    from attnreg.experiments.tasks import get_task, load_data, load_model

    load_data(get_task("agreement"))
    with tempfile.TemporaryDirectory() as folder:
        load_model(get_task("agreement"))[0].save_pretrained(folder)


if os.environ.get(IN_THE_SERVER):
    gc.disable()
    warm_up()
    gc.freeze()  # or looking for garbage would copy all of it
    gc.enable()
