"""Runs that end before their time: asked to, diverged, unable to write, or because the score no longer rises."""

import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import attnreg
from attnreg.experiments.compare import make as launch
from attnreg.experiments.folder.history import Selection, best_of
from attnreg.experiments.runs.run import Run
from attnreg.experiments.runs.stopping import read_state
from attnreg.training import StepResult
from tests.helpers.commands import invoke, ran, read_lines, result_of
from tests.helpers.runs import assert_goes_on, at_step, make, texts, trained_on

SMALL = ["--epochs", 2, "--train-size", 64, "--batch-size", 16, "--validation-rows", 32]
SMALL += ["--keep-checkpoints", "--output-dir", "out"]
RECIPES = {"finetune": [], "attendout": ["--round-steps", 2, "--no-baseline"]}


@pytest.fixture(autouse=True)
def listen_to_ctrl_c():
    """Whatever started the tests: what a shell runs in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
        ran(invoke("recipe", recipe, *SMALL[:-1], folder / recipe, *options))
    return folder


# Both signals have one handler, whatever the recipe; AD-DROP is stopped in tests/test_task_runs.py.
@pytest.mark.parametrize(("name", "recipe"), [("SIGINT", "attendout"), ("SIGTERM", "finetune")])
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
    for name in ("metrics.jsonl", "telemetry.jsonl"):
        assert [record["step"] for record in read_lines(tmp_path / "out" / name)] == [4, 8]


def test_stopped_before_it_begins_it_exits_as_a_run_does(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "__init__", lambda *_: signal.raise_signal(signal.SIGINT))
    stopped = cli("recipe", "finetune", *SMALL)
    assert_stopped(stopped, 128 + signal.SIGINT, r"Stopped by SIGINT before the run began\.")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_diverging_run_says_at_which_step_and_keeps_its_last_good_checkpoint(cli, tmp_path, recipe):
    result = cli("recipe", recipe, *SMALL, "--learning-rate", 1e25, "--save-steps", 1, *RECIPES[recipe])
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
    process = spawn("recipe", "finetune", "--epochs", 50, "--save-steps", 1, "--output-dir", "out")
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


LONG = ["--epochs", 8, "--train-size", 128, "--batch-size", 32, "--device", "cpu", "--metric", "accuracy", "--keep-checkpoints"]  # fmt: skip
EARLY = {
    "finetune": ["--patience", 2],
    "attendout": ["--patience", 1, "--round-steps", 2, "--game", 0.5, "--no-baseline"],
}


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """One run of each recipe that stops early by held-out rows; and fine-tuning by dev, and without patience."""
    folder = tmp_path_factory.mktemp("early")
    outputs = {}
    for recipe, options in EARLY.items():
        outputs[recipe] = ran(invoke("recipe", recipe, *LONG, *options, "--output-dir", folder / recipe)).output
    dev = [*EARLY["finetune"], "--stop-on", "dev"]
    for name, options in {"dev": dev, "plain": []}.items():
        outputs[name] = ran(invoke("recipe", "finetune", *LONG, *options, "--output-dir", folder / name)).output
    return folder, outputs


def expected_end(scores, patience):
    """The epochs, from 1, at which a run stops and to which it returns: counted one by one."""
    best, returned = -math.inf, 0
    for epoch, score in enumerate(scores, 1):
        if score > best:
            best, returned = score, epoch
        if epoch - returned == patience:
            return epoch, returned
    return len(scores), returned


def test_a_selection_counts_as_one_by_one():
    draw = random.Random(0)
    for _ in range(200):
        scores = [draw.choice([0.1, 0.2, 0.3, 0.4, math.nan]) for _ in range(draw.randint(1, 12))]
        scores[0] = 0.2
        patience = draw.randint(1, 4)
        selection = Selection("x", patience)
        records = [{"x": score} for score in scores]
        seen = next((n for n in range(1, len(records)) if selection.is_over(records[:n])), len(records))
        assert (seen, records.index(best_of(records[:seen], selection.key)) + 1) == expected_end(scores, patience)


def test_by_dev_it_is_the_plain_run_until_it_stops(early):
    folder, outputs = early
    every, stopped = (read_lines(folder / name / "metrics.jsonl") for name in ("plain", "dev"))
    end, best = expected_end([record["accuracy"] for record in every], 2)
    assert 1 < end < 8, "choose other rows: this run does not stop early"
    assert stopped == every[:end]
    got = result_of(folder / "dev")
    assert got["dev"]["accuracy"] == every[best - 1]["accuracy"]
    assert got["dev"]["loss"] == every[best - 1]["loss"]
    assert got["stopping"] == {"rows": None, "score": got["dev"]["accuracy"], "last_epoch": end, "returned_epoch": best}
    assert result_of(folder / "plain")["stopping"] is None
    says = f"Stopped after epoch {end} of 8: no better score on dev rows in 2 evaluations. The network of epoch {best}"
    report = (folder / "dev" / "report.md").read_text()
    for text in (outputs["dev"], report):
        assert says in text
        assert "Warning: --stop-on dev chooses the epoch by its dev score, so this score is biased upward." in text
    assert "returned epoch" not in outputs["plain"]
    assert f" {every[best - 1]['loss']:.4f} |" in report
    assert f" {every[end - 1]['loss']:.4f} |" not in report


@pytest.mark.parametrize("recipe", EARLY)
def test_by_held_out_rows_dev_decides_nothing(early, recipe):
    folder, outputs = early
    network = "attacker" if recipe == "attendout" else "model"
    records = [record for record in read_lines(folder / recipe / "metrics.jsonl") if record["network"] == network]
    end, best = expected_end([record["stopping_accuracy"] for record in records] + [0] * 8, EARLY[recipe][1])
    assert len(records) == end < 8
    got = result_of(folder / recipe)
    assert (got["stopping"]["last_epoch"], got["stopping"]["returned_epoch"]) == (end, best)
    assert got["dev"]["loss"] == records[best - 1]["loss"]
    assert got["rows"] + got["stopping"]["rows"] == 128
    assert got["stopping"]["rows"] == 12  # a tenth
    assert "no better score on 12 rows held out of train in" in outputs[recipe]
    assert "Warning: --stop-on" not in outputs[recipe]
    saved = load_file(folder / recipe / "model" / "model.safetensors")
    best_weights = read_state(folder / recipe / "checkpoints")["best"]
    assert all(torch.equal(saved[name], best_weights[name]) for name in saved)


@pytest.mark.parametrize(
    ("recipe", "when"),
    [
        pytest.param("finetune", "before the end", marks=pytest.mark.slow),
        ("finetune", "at the end"),
        pytest.param("attendout", "before the end", marks=pytest.mark.slow),
    ],
)
def test_stopped_by_hand_it_goes_on_to_the_same_end(early, cli, tmp_path, monkeypatch, recipe, when):
    folder = early[0] / recipe
    steps = read_lines(folder / "metrics.jsonl")[-1]["step"]
    args = ["recipe", recipe, *LONG, *EARLY[recipe], "--output-dir", "out"]
    assert_goes_on(cli, monkeypatch, args, steps - 2 if when == "before the end" else steps, folder)
    assert read_state(tmp_path / "out/checkpoints")["best"]
    ran(cli(*args, "--resume"))  # a finished run does not go on
    assert read_lines(tmp_path / "out" / "metrics.jsonl") == read_lines(folder / "metrics.jsonl")
    assert result_of(tmp_path / "out")["dev"] == result_of(folder)["dev"]


def test_rows_to_stop_on_are_held_out_of_everything_else(tmp_path, few_rows):
    plain = make(tmp_path, train_size=None)
    run = make(tmp_path, train_size=None, validation_rows=300, patience=1, stop_on="held-out", stopping_rows=70)
    everything = texts(plain.train_rows)
    held = [
        tuple(ids[seen.bool()].tolist())
        for batch in run.stopping.batches
        for ids, seen in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts(run.dev_rows) == everything[-300:]
    assert held == [everything[-370 + row] for row in run.stopping.order]
    assert len(run.stopping.references) == 70
    reward = sum(len(batch["labels"]) for batch in run.rows_in_order(run.hold_out_rows(40, epochs=2)))
    assert texts(run.train_rows) == everything[:-370]
    assert [trained_on(run, epoch) for epoch in range(4)] == [len(everything) - 370 - n for n in (reward, reward, 0, 0)]
    assert make(tmp_path, patience=1, stop_on="dev").stopping is None
    assert len(make(tmp_path, train_size=None, patience=1, stop_on="held-out").stopping.references) == min(
        256, len(everything) // 10
    )


@pytest.mark.slow
def test_two_processes_stop_at_the_same_epoch(warm, tmp_path):
    args = ["-m", "attnreg", "recipe", "finetune", *LONG, *EARLY["finetune"], "--output-dir"]
    for processes in (1, 2):
        code, output = warm.run(*args, f"out{processes}", cwd=tmp_path, timeout=200, processes=processes)
        assert code == 0, output
        assert output.count("Stopped after epoch") == 1
    one, two = (result_of(tmp_path / f"out{processes}")["stopping"] for processes in (1, 2))
    assert one["rows"] == two["rows"]
    records = read_lines(tmp_path / "out2" / "metrics.jsonl")
    end, best = expected_end([record["stopping_accuracy"] for record in records] + [0] * 8, 2)
    assert (two["last_epoch"], two["returned_epoch"]) == (end, best)


def test_an_evaluation_that_is_not_finite_stops_the_run(cli, monkeypatch):
    from attnreg.experiments.runs import loop

    found, losses = loop.evaluate_all, iter([0.5, math.nan])
    monkeypatch.setattr(loop, "evaluate_all", lambda *args: {**found(*args), "loss": next(losses)})
    says = (
        r"Training diverged: the loss is nan at step 8\..* The last good checkpoint \(step 4\) is in out/checkpoints\."
    )
    assert_stopped(cli("recipe", "finetune", *SMALL), 1, says)
