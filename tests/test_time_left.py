"""How much time is left, on a terminal and where output is piped, before the first run and while runs go on."""

import json
import re
import time

import pytest

from attnreg.experiments.compare import launch, make
from attnreg.experiments.compare.estimate import Clock
from attnreg.experiments.runs import loop
from tests.commands import ran
from tests.helpers.comparisons import comparison_of, started_by, write

SMALL = ["--train-size", 64, "--batch-size", 8, "--device", "cpu"]


def begun(run, step, steps):
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps({**run.settings.to_dict(), "steps": steps}))
    lines = (f'{{"step": {number}, "loss": 1.0}}\n' for number in range(10, step + 1, 10))
    (run.folder / "telemetry.jsonl").write_text("".join(lines))


def test_the_time_left_is_that_of_the_steps_of_running_runs(tmp_path, monkeypatch):
    clock = Clock(runs := comparison_of(tmp_path, "finetune", "sam", seeds=2).runs(), 4)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock.started(runs[0])
    assert clock.left() is None
    begun(runs[0], 30, 120)
    now += 15.0  # for a quarter: a minute each
    assert clock.left() == pytest.approx(45 + 3 * 60)
    clock.started(runs[2])
    assert clock.left() == pytest.approx((45 + 3 * 60) / 2)  # two at a time
    begun(runs[2], 20, 40)
    now += 15.0  # 30 s for a quarter, 15 s for a half of the other method's
    assert clock.left() == pytest.approx((90 + 15 + 120 + 30) / 2)


def test_runs_that_have_finished_before_are_known(tmp_path):
    runs = comparison_of(tmp_path, "finetune", seeds=3).runs()
    write(runs[0], 0.5, seconds=40.0)
    assert Clock(runs, 3).left() == pytest.approx(80)
    assert Clock(runs, 5).left() == pytest.approx(160)


@pytest.mark.slow  # waits for a line a minute
def test_where_output_is_piped_a_comparison_is_not_silent(cli, warm, monkeypatch):
    monkeypatch.setattr(launch, "QUIET", 0.05)
    monkeypatch.setattr(launch, "subprocess", started_by(warm))
    output = ran(cli("compare", "finetune", "--seeds", 2, "--jobs", 1, "--epochs", 20, *SMALL)).output
    assert re.search(r"^0 of 2 runs done, about \d+ s left; running: finetune, seed 0 \(\d+%\)$", output, re.M)
    assert re.search(r"^finetune, seed 0: .*; 1 of 2 runs done, about \d+ s left$", output, re.M)


def test_a_long_epoch_is_not_silent(cli, monkeypatch):
    monkeypatch.setattr(loop, "QUIET", 0.0)
    output = ran(cli("recipe", "finetune", "--epochs", 1, *SMALL)).output
    assert re.search(r"^finetune epoch 1/1  step 3 of 8  .*about \d+ s left$", output, re.M)


def test_a_dry_run_times_some_steps_of_each_method(cli, tmp_path):
    words = ["finetune", "ad-drop", "attendout", "lp-ft", "linear-probe"]
    output = ran(cli("compare", *words, "--seeds", 2, "--epochs", 20, *SMALL, "--dry-run")).output
    says = r"^10 runs in all, which train for about \d+ (s|min) in all, by steps that were timed\.$"
    assert re.search(says, output, re.M)
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_of_a_study_times_steps_of_each_task(cli, tmp_path, monkeypatch):
    steps, usual = [], make.timed
    monkeypatch.setattr(
        make, "timed", lambda run: steps.append((run.settings.train_size, run.method.name)) or usual(run)
    )
    tasks = "[{name: few, train_size: 64}, {name: many, train_size: 128}]"
    study = f"methods: [finetune, sam]\nseeds: 2\ntasks: {tasks}\noptions: {{device: cpu}}\n"
    (tmp_path / "both.yaml").write_text(study)
    output = ran(cli("compare", "--study", "both.yaml", "--epochs", 20, "--dry-run")).output
    assert re.search(
        r"^8 runs in all, which train for about \d+ (s|min) in all, by steps that were timed\.$", output, re.M
    )
    first, slowest = steps[:2], steps[2][1]
    assert first == [(64, "finetune"), (64, "sam")]
    assert steps[2:] == [(128, slowest)]
    seconds = {(64, "finetune"): 1.0, (64, "sam"): 3.0, (128, "sam"): 15.0}
    monkeypatch.setattr(make, "timed", lambda run: seconds[run.settings.train_size, run.method.name])
    output = ran(cli("compare", "--study", "both.yaml", "--epochs", 20, "--dry-run")).output
    assert "8 runs in all, which train for about 48 s in all" in output  # 2 * (1 + 3), and five times as long
