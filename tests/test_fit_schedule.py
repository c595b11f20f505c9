"""Schedules fitted to the drop rates of runs: a known one comes back from its own run's rates."""

import json
import re
import runpy

import numpy as np
import pytest

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.folder.run_folder import RunReader
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.repository import ROOT

fit_schedule = runpy.run_path(str(ROOT / "docs/results/attendout/schedule.py"))["fit_schedule"]
KNOWN = [[(0, 0.6), (1, 0.55)], [(0, 0.6), (0.5, 0.2), (1, 0.9)], [(0, 0)]]
STEPS = 400


def rates_at(schedule, progress):
    return [np.interp(progress, *zip(*line, strict=True)) for line in schedule]


def write(folder, schedule, begin=1, ends=(), label="encoder.{}", epoch=8, steps=STEPS):
    """A run of 8 epochs that drops at the rates of a schedule from a step on; a line for every 10 steps, and at ends."""
    lines, before = [], 0
    for end in sorted({*range(10, steps + 1, 10), *ends, steps}):
        each = [rates_at(schedule, (step - 1) / STEPS) for step in range(max(before + 1, begin), end + 1)]
        means = np.mean(each, axis=0) if each else []
        lines.append({"step": end, "loss": 0.0, "drop_rate": {label.format(n): float(p) for n, p in enumerate(means)}})
        before = end
    files = {"telemetry": lines, "metrics": [{"network": "model", "epoch": epoch, "step": steps}]}
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, record in (("config", {"recipe": "attendout", "epochs": 8}), ("result", {})):
        (folder / f"{name}.json").write_text(json.dumps(record))
    return RunReader(folder)


def differences(text, schedule, progress):
    """The largest difference in rates between an expression and a schedule at some progress."""
    provider = attnreg.parse_provider(text, total_steps=STEPS)
    for step in range(STEPS + 1):
        if step / STEPS in progress:
            yield np.abs(provider.rates.numpy() - rates_at(schedule, step / STEPS)).max()
        provider.step()


@pytest.mark.parametrize(
    "options", [{}, {"ends": (37, 41, 200, 333)}, {"epoch": 6, "steps": 300}], ids=["", "rounds", "stopped"]
)
def test_a_known_schedule_is_recovered(tmp_path, options):
    run = write(tmp_path, KNOWN, **options)
    seen = options.get("steps", STEPS) / STEPS
    text = fit_schedule(run, pieces=2 if seen == 1 else 3)
    assert max(differences(text, KNOWN, {0.0, 0.25, 0.5, 0.75 * seen, seen})) < 0.01
    assert text.startswith("BernoulliScheduleProvider([[(0, 0.600), (0.")
    assert text.endswith(", [(0, 0)]])")


def test_steps_without_masks_do_not_count(tmp_path):
    text = fit_schedule(write(tmp_path, KNOWN, begin=41), pieces=1)
    masked = np.linspace(0.1, 1, 1000)
    slope, constant = np.polyfit(masked, rates_at(KNOWN, masked)[1], 1)
    knots = re.findall(r"\(([\d.]+), ([\d.]+)\)", text)[2:4]
    assert [tuple(map(float, knot)) for knot in knots] == [
        (0.1, pytest.approx(constant + 0.1 * slope, abs=0.01)), (1, pytest.approx(constant + slope, abs=0.01))
    ]  # fmt: skip


def test_more_pieces_than_logged_rates_are_refused(tmp_path):
    with pytest.raises(InputError, match="3 pieces take more than 2 logged drop rates of a layer: give fewer pieces"):
        fit_schedule(write(tmp_path, KNOWN, steps=20), pieces=3)


def test_slopes_stop_at_0_and_1_and_exclude_an_end(cli, tmp_path):
    recipe = ["recipe", "scheduled-bernoulli", "--epochs", 1, "--train-size", 64, "--start", 0.6]
    ran(cli(*recipe, "--slopes", "0,0.8,-0.9", "--output-dir", "out"))
    saved = attnreg.Regularizer.from_pretrained(tmp_path / "out" / "provider")
    ends = [[1, 0.6], [pytest.approx(0.5), 1], [pytest.approx(2 / 3), 0]]
    assert saved.schedule == [[[0, 0.6], end] for end in ends]
    assert_sentence(cli(*recipe, "--slopes", "0,0,0", "--end", 0.1), 2, "--slopes and --end both say how the rate")
    assert_sentence(cli(*recipe, "--slopes", "0,0"), 1, r"or one per layer \(3\), got 2")
