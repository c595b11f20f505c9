"""Runs in this process: their rows, how they are stopped and go on, and their figures."""

import re
import shlex
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from attnreg.experiments import Run
from attnreg.experiments.options.settings import Settings
from attnreg.experiments.runs.loop import Progress
from attnreg.experiments.runs.stopping import read_state
from tests.helpers.commands import ran, read_lines
from tests.helpers.method_cases import same

DEFAULTS = {"recipe": "finetune", "task": "agreement", "epochs": 4, "batch_size": 32, "learning_rate": 1e-3}


def make(tmp_path, **options):
    usual = {**DEFAULTS, "max_length": 32, "train_size": 200, "device": "cpu", "output_dir": tmp_path / "run"}
    return Run(Settings(**{**usual, **options}))


def texts(rows):
    return [tuple(ids) for ids in rows["input_ids"]]


def trained_on(run, epoch):
    return sum(len(batch["labels"]) for batch in run.train_batches(epoch).epoch(epoch))


def at_step(monkeypatch, number, what):
    """Do something at the end of a step."""
    original = Progress.step

    def step(self, history, telemetry):
        if history.step == number:
            what()
        original(self, history, telemetry)

    monkeypatch.setattr(Progress, "step", step)


def assert_goes_on(cli, monkeypatch, args, step, folder, number=signal.SIGINT):
    """Stopped by a signal at a step, a run in ``out`` goes on to the end of the one in a folder, which was not stopped."""
    with monkeypatch.context() as patched:
        at_step(patched, step, lambda: signal.raise_signal(number))
        stopped = cli(*args)
    assert read_state(Path("out/checkpoints"))["history"]["step"] == step
    command = re.search(r"^To continue: (.*--resume.*)$", stopped.stderr, re.M)[1]
    ran(cli(*shlex.split(command)[1:]))
    for file in ("metrics.jsonl", "telemetry.jsonl", "predictions.jsonl"):
        assert read_lines(Path("out", file)) == read_lines(folder / file)
    mine, theirs = (read_state(run / "checkpoints") for run in (Path("out"), folder))
    assert all(same(mine[key], theirs[key]) for key in ("best", "method"))
    return stopped


@contextmanager
def keeping(*, draw=False):
    """The figures that are saved within the block, by file name; unless they are drawn, their files are stubs."""
    saved, save = {}, Figure.savefig

    def keep(self, path, **options):
        saved[path.stem] = self
        if draw:
            save(self, path, **options)
        else:
            path.write_bytes(b"\x89PNG")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        yield saved
