"""Processes of their own that begin where importing has ended.

Starting Python and importing torch, transformers and datasets takes ten times as long as most runs of these tests. So
one process imports them, and each command runs in a fork of it: with memory, files, signals and limits of its own, and
with an end of its own. What must be seen to start from nothing is started by ``subprocess`` all the same.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUMBER = struct.Struct("q")


class Warm:
    """Starts what ``python -m MODULE``, ``python -c CODE`` and ``python FILE`` would."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        # What tests of this process have found out of the network is not known to others.
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                cwd=ROOT,
                env={**environment, "JE_ARROW_MALLOC_CONF": "background_thread:false"},  # a thread
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    @classmethod
    def forked(cls):
        """One that starts forks of what this process is now: for what was started by another one."""
        starter = cls.__new__(cls)
        starter._socket, theirs = socket.socketpair()
        if os.fork() == 0:
            starter._socket.close()
            start(theirs)
        theirs.close()
        return starter

    def popen(self, command, *, stdin=None, stdout=None, stderr=None, env=None, cwd=None):
        """As ``subprocess.Popen``, for a command of ``sys.executable`` whose errors go where its output goes."""
        assert (command[0], stderr) == (sys.executable, subprocess.STDOUT)
        if env is not None and env.get("OMP_NUM_THREADS") != os.environ["OMP_NUM_THREADS"]:  # it is read at the start
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd)
        return Process(self._socket, command[1:], stdin, stdout, env, cwd)

    def run(self, *words, cwd, timeout, processes=1):
        """Run to its end, perhaps as so many processes that train together; gives its exit code and what it printed."""
        with Process(self._socket, words, cwd=cwd, processes=processes) as process:
            output, _ = process.communicate(timeout)
        return process.returncode, output

    def close(self):
        """Start no more."""
        self._socket.close()  # which ends the server
        self._server.wait()


class Process:
    """As much of ``subprocess.Popen`` as is used here; without ``stdout``, what is printed is kept in a file."""

    def __init__(self, server, words, stdin=None, stdout=None, env=None, cwd=None, processes=1):
        self.returncode = None
        self.stdin = None
        self._kept = tempfile.TemporaryFile() if stdout is None else None  # noqa: SIM115
        self._channel, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            if stdin == subprocess.PIPE:
                reading, writing = os.pipe()
                self.stdin = os.fdopen(writing, "wb")
                source = stack.enter_context(os.fdopen(reading, "rb"))
            else:
                source = stack.enter_context(Path(os.devnull).open("rb"))
            output = self._kept if stdout is None else stdout
            socket.send_fds(server, [b"!"], [theirs.fileno(), source.fileno(), output.fileno()])
        request = {
            "words": [str(word) for word in words],
            "processes": processes,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._answer()

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
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout=None):
        """Its exit code, when it has ended."""
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = self._answer()
            self._channel.close()
        return self.returncode

    def communicate(self, timeout=None):
        """What it has printed, when it has ended; and ``None``, as errors are printed to the same place."""
        self.wait(timeout)
        self._kept.seek(0)
        return self._kept.read().decode(), None

    def send_signal(self, number):
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _answer(self):
        return NUMBER.unpack(self._channel.recv(NUMBER.size, socket.MSG_WAITALL))[0]


DEV_ROWS = 200


def with_few_dev_rows():
    """Make the embedded task's dev set smaller: the short runs of tests would spend most of their time on scoring it."""
    from attnreg.experiments.tasks import agreement

    agreement.SIZES["validation"] = DEV_ROWS


def without_fingerprints():
    """Let ``datasets`` not hash each table that is made. It finds cached files by the hash, of which tests have none."""
    from datasets import arrow_dataset, fingerprint

    arrow_dataset.generate_fingerprint = lambda table: fingerprint.generate_random_fingerprint()


def without_devices():
    """Let ``torch.manual_seed`` not queue, each with its stack, seeds for devices that are not there."""
    import torch

    for device in (torch.cuda, torch.mtia, torch.xpu):
        if not device.is_available():
            for module in (device, getattr(device, "random", device)):
                module._lazy_call = lambda call, **options: None


def warm_up():
    """Import what is slow to import and make what is made once. It must start no threads: forks would lack them."""
    import transformers

    with_few_dev_rows()
    without_fingerprints()
    without_devices()

    for name in (
        "integrations",
        *(f"experiments.{name}" for name in ("cli.main", "compare.launch", "compare.study", "results.plots.run")),
        *(f"experiments.{name}" for name in ("runs.run", "tasks.metrics")),
    ):
        importlib.import_module(f"attnreg.{name}")
    for name in ("AutoTokenizer", "BertForSequenceClassification", "Trainer", "get_linear_schedule_with_warmup"):
        getattr(transformers, name)
    from attnreg.experiments.tasks import get_task, load_model, load_splits

    load_splits(get_task("agreement"))
    with tempfile.TemporaryDirectory() as folder:
        load_model(get_task("agreement"))[0].save_pretrained(folder)


def serve(server):
    """Start what is asked for. Returns in what was started, with the words of its command and how often it is wanted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    while True:
        message, files, _, _ = socket.recv_fds(server, 1, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # of the keepers, those that have ended
        if not message:
            end(0)
        if os.fork() == 0:
            server.close()
            return keep(*files)
        for file in files:
            os.close(file)


def keep(channel, source, output):
    """Fork once more, tell the number of that process, and how it has ended."""
    channel = socket.socket(fileno=channel)
    with channel.makefile() as lines:
        request = json.loads(lines.readline())
    child = os.fork()
    if child:
        os.close(source)
        os.close(output)
        channel.sendall(NUMBER.pack(child))
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know
            channel.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    channel.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, number in ((source, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    os.close(source)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return request["words"], request["processes"]


def start_some(processes, words):
    """As ``torchrun``, but for forks of this process."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = {
        "run_id": "tests",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
        "start_method": "fork",
    }
    elastic_launch(LaunchConfig(1, 1, processes, **options), begin)(words)


def begin(words):
    """Be what Python would be with these arguments."""
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


def start(server):
    """Serve; in what is started, be it, and end."""
    words, processes = serve(server)
    try:
        if processes > 1:
            start_some(processes, words)
        else:
            begin(words)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            raise
        end(error.code or 0)
    end(0)


def end(code):
    """End as Python does, but leave the memory to the system: to take it apart lasts longer than most commands."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main():
    gc.disable()
    warm_up()
    gc.freeze()  # or looking for garbage would copy all of it
    gc.enable()
    start(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
