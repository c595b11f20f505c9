"""Runs that end before their time: asked to, diverged, or unable to write. Nothing is lost, nothing half-written."""

import hashlib
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import attnreg
from attnreg.experiments.compare import launch
from attnreg.experiments.runs.checkpoint import read_state
from attnreg.experiments.runs.loop import Progress
from attnreg.training import StepResult
from tests.commands import invoke, ran, read_lines

SMALL = ["--epochs", 2, "--train-size", 64, "--batch-size", 16, "--validation-rows", 32]
SMALL += ["--keep-checkpoints", "--output-dir", "out"]
RECIPES = {"finetune": [], "ad-drop": [], "attendout": ["--round-steps", 2, "--no-baseline"]}


@pytest.fixture(autouse=True)
def listen_to_ctrl_c():
    """Whatever started the tests: what a shell runs in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def contents(tensor):
    """Two tensors are the same to the bit where this is."""
    return [str(tensor.dtype), *tensor.shape, hashlib.sha256(tensor.numpy().tobytes()).hexdigest()]


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
    for key in ("best", "method"):
        assert json.dumps(mine[key], default=contents) == json.dumps(theirs[key], default=contents)
    return stopped


def assert_stopped(result, code, says):
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    error = re.search(r"^Error: (.*)$", result.stderr, re.M)
    assert error, result.output
    assert re.fullmatch(says, error[1]), error[1]
    assert "Traceback" not in result.output


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run of each recipe that was not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    for recipe, options in RECIPES.items():
        args = ["recipe", recipe, *SMALL[:-1], folder / recipe, *options]
        ran(invoke(*args))
    return folder


# Both signals have one handler, whatever the recipe.
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("SIGINT", "attendout"),
        ("SIGTERM", "finetune"),
        *(pytest.param("SIGINT", recipe, marks=pytest.mark.slow) for recipe in RECIPES if recipe != "attendout"),
    ],
)
def test_stopped_by_a_signal_it_goes_on_to_the_same_end(whole, cli, monkeypatch, recipe, name):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    args = ["recipe", recipe, *SMALL, *RECIPES[recipe]]
    stopped = assert_goes_on(cli, monkeypatch, args, 3, whole / recipe, getattr(signal, name))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    says = rf"Stopped by {name} after step 3\. The run is saved in out\."
    assert_stopped(stopped, 128 + getattr(signal, name), says)


def test_a_second_signal_ends_it_at_once_and_without_a_checkpoint_it_starts_anew(cli, tmp_path, monkeypatch):
    args = ["recipe", "finetune", *SMALL]
    with monkeypatch.context() as patched:
        at_step(patched, 3, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
        result = cli(*args)
    assert result.exit_code == 1
    assert "Aborted!" in result.output  # click's word for KeyboardInterrupt
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert cli(*args, "--resume").exit_code == 0
    assert [record["step"] for record in read_lines(tmp_path / "out" / "metrics.jsonl")] == [4, 8]
    assert [record["step"] for record in read_lines(tmp_path / "out" / "telemetry.jsonl")] == [4, 8]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_diverging_run_says_at_which_step_and_keeps_its_last_good_checkpoint(cli, tmp_path, recipe):
    args = ["--learning-rate", 1e25, "--save-steps", 1]
    result = cli("recipe", recipe, *SMALL, *args, *RECIPES[recipe])
    says = r"Training diverged: .* at step (\d+)\. Start again with a lower --learning-rate\. "
    says += r"(The run has no checkpoint yet\.|The last good checkpoint \(step (\d+)\) is in out/checkpoints\.)"
    assert_stopped(result, 1, says)
    assert "To continue" not in result.output
    if "no checkpoint" not in result.stderr:
        checkpoint = read_state(tmp_path / "out" / "checkpoints")
        weights = checkpoint["method"].get("attacker", checkpoint["method"])["model"].values()
        assert all(bool(weight.isfinite().all()) for weight in weights)


def test_a_loss_that_is_not_finite_is_told_with_its_step(cli, monkeypatch):
    from attnreg.training.fine_tuning import FineTuning

    step, losses = FineTuning.step, iter([1.0] * 5 + [math.nan] + [1.0] * 9)
    monkeypatch.setattr(FineTuning, "step", lambda self, batch: StepResult(step(self, batch).loss * next(losses)))
    says = (
        r"Training diverged: the loss is nan at step 6\. .* The last good checkpoint \(step 4\) is in out/checkpoints\."
    )
    assert_stopped(cli("recipe", "finetune", *SMALL), 1, says)


def test_a_full_disk_ends_it_with_a_sentence_and_the_last_good_checkpoint(spawn, tmp_path):
    args = ["recipe", "finetune", "--epochs", 50, "--save-steps", 1, "--output-dir", "out"]
    process = spawn(*args)
    checkpoints = tmp_path / "out" / "checkpoints"
    while not any(checkpoints.glob("step-*")) and process.poll() is None:
        time.sleep(0.01)
    # No file may grow beyond this: what writing to a full disk is like, without one.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert re.search(r"Error: Cannot write the run's files: .*File too large", output), output
    assert "Traceback" not in output
    step = re.search(r"The last good checkpoint \(step (\d+)\) is in out/checkpoints\.", output)[1]
    assert [path.name for path in checkpoints.iterdir()] == [f"step-{int(step):07d}"]
    assert read_state(checkpoints)["history"]["step"] == int(step)
    assert "To continue: attnreg recipe finetune" in output


def test_a_folder_that_cannot_be_written_to_is_told_before_training(cli, tmp_path):
    (tmp_path / "file").write_text("x")
    result = cli("recipe", "finetune", "--output-dir", "file/out")
    assert_stopped(result, 1, "Cannot write to --output-dir: .*")
    assert (tmp_path / "file").read_text() == "x"


def test_a_checkpoint_that_was_being_replaced_when_its_writer_died(cli, tmp_path):
    args = ["recipe", "finetune", *SMALL]
    assert cli(*args).exit_code == 0
    (path,) = (tmp_path / "out" / "checkpoints").iterdir()
    path.rename(path.with_name(f".{path.name}.old"))
    (tmp_path / ".mine.old").mkdir()  # not a run's, and left alone
    (tmp_path / "out" / ".mine.old").mkdir()
    ran(cli(*args, "--resume"))
    assert path.is_dir()
    attnreg.AttentionLayerDrop().save_pretrained(tmp_path / "provider")
    assert (tmp_path / ".mine.old").is_dir()
    assert (tmp_path / "out" / ".mine.old").is_dir()


def test_a_run_that_is_being_started_as_a_comparison_is_stopped(tmp_path, monkeypatch):
    started = []

    def popen(command, **options):
        time.sleep(0.3)  # the comparison waits for its runs
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # all runs that were known are told to end
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=options["stdin"]))
        return started[-1]

    def run(number):
        nothing = SimpleNamespace(prepare=lambda: None, command_line=list, tidy=lambda: None)
        return SimpleNamespace(log=tmp_path / f"{number}.log", method=number, finished=False, **vars(nothing))

    process = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(launch, "subprocess", process)
    watcher = SimpleNamespace(started=lambda run: None, ended=lambda run: None)
    with pytest.raises(KeyboardInterrupt):
        launch.local(1, 1)([run(0), run(1)], watcher)
    assert [child.returncode for child in started] == [-signal.SIGTERM]
