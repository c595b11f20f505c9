"""Comparisons through the command line: their runs, what is repeated and what is not, their report."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from sklearn.metrics import matthews_corrcoef

from attnreg.experiments.compare import make as launch
from attnreg.experiments.compare.method import Method
from tests.helpers.commands import invoke, ran, read_csv, read_lines
from tests.helpers.comparisons import started_by
from tests.helpers.light import DEV_ROWS

SMALL = ["--epochs", 1, "--train-size", 64, "--batch-size", 32, "--device", "cpu"]
LATE = "late=regularize --provider CrossTuning(DropHead(0.5))"  # plain in its first epoch, to the last bit
METHODS = ["finetune", LATE, "attention-layerdrop --drop-rate {0.1,0.9}"]
COMPARE = ["compare", *METHODS, *SMALL, "--seeds", 2, "--search-rows", 50, "--no-equal-time", "--output-dir", "study"]


def results(folder):
    """What every run measured, without what the clock and the memory say."""
    rows = read_csv(folder / "results.csv")
    return [{name: value for name, value in row.items() if not re.search("seconds|memory", name)} for row in rows]


@pytest.fixture(scope="module", autouse=True)
def warm_runs(warm):
    """In this process, that is; what ``spawn`` starts is not spared them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", started_by(warm))
        yield


@pytest.fixture(scope="module")
def finished(warm_runs, tmp_path_factory):
    """The folder of a finished comparison."""
    home = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        ran(invoke(*COMPARE))
    return home / "study"


@pytest.fixture
def study(finished, tmp_path):
    """A copy of it, for more runs."""
    return shutil.copytree(finished, tmp_path / "study")


def test_each_run_has_its_folder(finished):
    rows = results(finished)
    assert [(row["method"], row["role"], row["seed"]) for row in rows] == [
        *(("finetune", "final", seed) for seed in "01"),
        *(("late", "final", seed) for seed in "01"),
        ("attention-layerdrop --drop-rate 0.1", "search", "1000"),
        ("attention-layerdrop --drop-rate 0.9", "search", "1000"),
        *((row["method"], "final", seed) for row, seed in zip(rows[-2:], "01", strict=True)),
    ]
    for row in rows:
        folder = finished / row["folder"]
        assert json.loads((folder / "config.json").read_text())["seed"] == int(row["seed"])
        environment = json.loads((folder / "result.json").read_text())["environment"]
        assert {"cpu", "kernels", "threads", "torch", "transformers"} <= environment.keys()
        assert environment.items() <= {**row, "processes": 1, "threads": int(row["threads"])}.items()
        assert not (folder / "checkpoints").exists()
        assert not (folder / "model").exists()
    assert {row["scored_on"] for row in rows if row["role"] == "search"} == {"held-out"}


def test_methods_of_one_seed_share_data_order_head_and_evaluation(finished):
    logits = []
    for seed in (0, 1):
        paths = (finished / name / f"seed{seed}" / "predictions.jsonl" for name in ("finetune", "late"))
        plain, other = ([(row["label"], row["logits"]) for row in read_lines(path)] for path in paths)
        assert plain == other
        logits.append([row for _, row in plain])
    assert np.abs(np.subtract(*logits)).max() > 1e-2


def test_scores_are_those_of_the_predictions(finished):
    for row in results(finished):
        lines = read_lines(finished / row["folder"] / "predictions.jsonl")
        predicted = [int(np.argmax(line["logits"])) for line in lines]
        score = matthews_corrcoef([line["label"] for line in lines], predicted)
        assert float(row["score"]) == pytest.approx(score)
        assert len(lines) == (50 if row["role"] == "search" else DEV_ROWS)


def test_the_report_has_what_it_needs(finished):
    report = (finished / "report.md").read_text()
    mean = np.mean([float(row["score"]) for row in results(finished) if row["method"] == "finetune"])
    assert re.search(rf"\| finetune \| {mean:.4f} \|", report)
    assert "| attention-layerdrop --drop-rate {0.1,0.9} | --drop-rate 0." in report
    assert report.count("chosen |") == 1
    opening = "Warning: late never acted, so its scores say nothing about it. CrossTuning"
    assert report.split("\n\n")[1].startswith(opening)
    assert opening in (finished / "report.html").read_text()
    assert re.search(r"\| late \| never acted \| never acted \|", report)
    assert not re.search(r'(src|srcset|href)="(?!data:|#)', (finished / "report.html").read_text())
    assert f"2 seeds; 64 training rows, {DEV_ROWS} dev rows; 1 epoch;" in report
    assert shlex.split(report.split("```")[1])[:5] == ["attnreg", "compare", *METHODS]


def test_what_is_finished_is_not_run_again(finished, study, undrawn, cli):
    shutil.rmtree(study / "finetune" / "seed1")
    for made in ([("finetune", "1")], []):
        assert re.findall(r"^(.*), seed (\d+): ", ran(cli(*COMPARE)).output, re.M) == made
        assert results(study) == results(finished)


def test_another_seed_uses_what_is_there(study, cli, tmp_path):
    words = ["finetune --epochs 2" if word == METHODS[2] else word for word in COMPARE]
    printed = cli(*words, "--seeds", 3, "--launcher", "commands")
    lines = printed.stdout.splitlines()
    assert len(lines) == 2 + 3  # one more seed of what is there, three of what is new
    assert all(line.startswith(f"cd {tmp_path} && OMP_NUM_THREADS=1 attnreg recipe ") for line in lines)
    assert "5 runs to start, 0 running" in printed.stderr
    line = next(line for line in lines if "seed2" in line and "finetune" in line)
    ran(cli(*shlex.split(line.partition(" && ")[2])[2:]))
    assert (study / "finetune" / "seed2" / "result.json").is_file()


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_ended(process):
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


WITH_WARM_RUNS = """
import os, signal, sys
from attnreg.experiments.cli.main import main
from attnreg.experiments.compare import make as launch
from tests.helpers.comparisons import started_by
from tests.helpers.warm import Warm

launch.subprocess = started_by(Warm("fork"))
{before}
main(sys.argv[1:])
"""

NO_OTHER_RUN_AFTER_ONE = "launch.Board.ended = lambda *ended: os.kill(os.getpid(), signal.SIGSTOP)"


def test_killed_and_started_again(finished, undrawn, cli, warm, tmp_path):
    words = [word for word in COMPARE if word != METHODS[2]]
    command = [sys.executable, "-c", WITH_WARM_RUNS.format(before=NO_OTHER_RUN_AFTER_ONE), *words, "--jobs", 2]
    with warm.popen(command, cwd=tmp_path, stderr=subprocess.STDOUT) as process:
        comparison, stopped = tmp_path / "study", psutil.Process(process.pid)
        wait_for(lambda: process.poll() is not None or stopped.status() == psutil.STATUS_STOPPED)
        runs = stopped.children(recursive=True)
        process.kill()
    wait_for(lambda: all(map(has_ended, runs)))  # the runs ended with it
    done = {path: path.stat().st_mtime_ns for path in comparison.rglob("result.json")}
    assert len(done) in {1, 2}
    ran(cli(*words))
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert results(comparison) == results(finished)[:4]  # of the methods without a search


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_hand(warm, tmp_path, number):
    long = ["--epochs", 100]  # so that no run ends by itself before it is stopped
    command = [sys.executable, "-c", WITH_WARM_RUNS.format(before=""), *COMPARE, *long, "--jobs", 1]
    with warm.popen(command, cwd=tmp_path, stderr=subprocess.STDOUT) as process:
        wait_for(lambda: process.poll() is not None or list(tmp_path.rglob("config.json")))
        runs = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    wait_for(lambda: all(map(has_ended, runs)))
    assert "Stopped. Repeat the command to continue." in output
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("report.md"))


def test_what_is_a_name_and_what_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.py").touch()
    for typed, name, text, slug in (
        ("high=ad-drop --p 0.3", "high", "ad-drop --p 0.3", "high"),
        ("very-high=ad-drop --p=0.3", "very-high", "ad-drop --p=0.3", "very-high"),
        ("ad-drop --p=0.3", "ad-drop --p=0.3", "ad-drop --p=0.3", "ad-drop--p=0.3"),
        ("ad-drop --p 0.3", "ad-drop --p 0.3", "ad-drop --p 0.3", "ad-drop--p0.3"),
        ("ünï=ad-drop", "ünï", "ad-drop", "ünï"),
        ("a=b.py", "a=b.py", "a=b.py", "a=b.py"),  # a recipe of one's own
    ):
        method = Method.parse(typed)
        assert (method.name, method.text, method.slug, method.typed) == (name, text, slug, typed)


@pytest.mark.parametrize("baseline", ["plain", "finetune", "plain=finetune"])
def test_the_baseline_may_be_named(cli, tmp_path, baseline):
    args = ["--baseline", baseline, "--launcher", "commands", "--seeds", 1, "--output-dir", "study"]
    assert "study/high/seed0" in ran(cli("compare", "high=ad-drop --p 0.3", "plain=finetune", *args)).output
    assert json.loads((tmp_path / "study" / "study.json").read_text())["baseline"] == "plain=finetune"


def test_other_options_in_a_folder_that_has_runs(finished, study, cli):
    other = cli(*COMPARE, "--learning-rate", 0.5, "--dry-run").output
    assert "study holds runs with --learning-rate 0.002 (not --learning-rate 0.5): saving to study-2." in other
    assert results(study) == results(finished)


@pytest.mark.slow
def test_the_numbers_do_not_depend_on_how_many_run_at_a_time(cli, tmp_path):
    seen = []
    for jobs in (1, 3):
        words = ["--epochs", 1, "--train-size", 64, "--seeds", 2, "--threads", 2, "--no-equal-time"]
        ran(cli("compare", "finetune", "attention-dropout", *words, "--jobs", jobs, "--output-dir", f"jobs{jobs}"))
        files = sorted((tmp_path / f"jobs{jobs}").glob("*/seed*/predictions.jsonl"))
        seen.append([file.read_text() for file in files])
    assert len(seen[0]) == 4
    assert seen[0] == seen[1]
