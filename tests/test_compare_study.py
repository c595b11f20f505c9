"""What a comparison decides and reports, with runs that are written down here."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from attnreg.errors import InputError
from attnreg.experiments.compare.make import commands
from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.folder.run_folder import locked
from tests.helpers.commands import read_csv, read_lines
from tests.helpers.comparisons import comparison_of, reported, table, write, written
from tests.helpers.task_data import write_rows

pytestmark = pytest.mark.usefixtures("undrawn")


def test_every_number_of_the_report(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", "attention-layerdrop --drop-rate 0", seeds=3)
    names = [method.text for method in comparison.methods]
    scores = dict(zip(names, ((0.70, 0.72, 0.77), (0.75, 0.76, 0.85), (0.7, 0.7, 0.7)), strict=True))
    rates = {"encoder.0": 0.1, "encoder.1": 0.3, "encoder.2": 0.0}
    measured = {
        "finetune": {},
        "ad-drop": {"seconds": 15.0, "peak_memory_bytes": 150, "active_steps": 10, "drop_rates": rates},
        names[2]: {"active_steps": 20, "drop_rates": {"encoder.0": 0.0, "encoder.1": 0.0}},
    }  # fmt: skip
    written(comparison, lambda run: scores[run.method.text][run.seed], lambda run: measured[run.method.text]).decide()
    report = reported(comparison, lambda run: 0.71 + 0.01 * run.seed, seconds=14.0)  # the baseline with the same time
    mine, plain = scores["ad-drop"], scores["finetune"]
    cells = ["ad-drop", f"{np.mean(mine):.4f}", f"{np.std(mine, ddof=1):.4f}", "0.750  0.760  0.850"]
    assert [*table(report, "Scores")[1].values()] == cells
    ad_drop, layerdrop = table(report, "Differences to finetune")
    tests = [stats.ttest_rel(scores[name], plain) for name in names[1:]]
    dev, gap = np.mean(mine), np.mean(mine) - np.mean(plain)
    low, high = tests[0].confidence_interval()
    assert ad_drop.items() >= {"difference": f"{gap:+.4f}", "95 % over seeds": f"[{low:+.4f}, {high:+.4f}]"}.items()
    assert ad_drop["p"] == f"{tests[0].pvalue:.4f}"
    assert float(ad_drop["p (Holm)"]) == pytest.approx(2 * tests[0].pvalue, abs=1e-3)
    assert layerdrop["p (Holm)"] == layerdrop["p"] == f"{tests[1].pvalue:.4f}"
    deviation = np.std(np.subtract(mine, plain), ddof=1)
    assert float(ad_drop["detectable"]) == pytest.approx(3.26 * deviation, rel=0.02)  # for three seeds: a table of t
    fit = {"train": "0.9000", "dev": f"{dev:.4f}", "gap": f"{0.9 - dev:+.4f}"}
    fit |= {"train loss": "0.250", "dev loss": f"{1 - dev:.3f}", "calibration error": "0.100"}
    assert table(report, "Fit")[1].items() >= fit.items()
    cost = {"time ratio": "1.50", "memory ratio": "1.50"}
    cost |= {"active steps": "50%", "layers": "2 of 3", "drop rate": "0.200"}
    nothing = {"active steps": "100%", "layers": "0 of 2", "drop rate": "0.000"}  # which does not look like none
    for row, expected in zip(table(report, "Cost")[1:], (cost, nothing), strict=True):
        assert row.items() >= expected.items()
    (equal,) = table(report, "Differences to finetune with the same training time")
    expected = {"method": "ad-drop", "baseline mean": "0.7200", "baseline time (s)": "14", "time ratio": "0.93"}
    expected |= {"difference": f"{dev - 0.72:+.4f}", "p": f"{stats.ttest_rel(mine, (0.71, 0.72, 0.73)).pvalue:.4f}"}
    assert equal.items() >= expected.items()
    told = {row["method"]: row["options"] for row in table(report, "Options")}
    assert told["attention-layerdrop --drop-rate 0"] == "--drop-rate 0.0"  # a zero is told as well
    assert "Environment: device cpu; threads 1." in report


GAME = "attendout --reward-data half-dev"
TOLD = [
    ("ad-drop", lambda run: {"environment": {"threads": run.seed}}, "Warning: the environments of the runs differ: threads 0 | threads 1."),
    (GAME, lambda run: {"events": {"winner: attacker": 3 + run.seed, "winner: defender": 1}}, "The game had 4.5 rounds on average: the Attacker won 3.5, the Defender 1.0."),
    (GAME, lambda run: {}, "took its rewards from the dev rows, so its dev scores are biased"),
    ("sam", lambda run: {"held_out": {"rows": 5, "epochs": 2}}, "In its first 2 epochs, sam held out 5 training rows for its reward"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "changes", "says"), TOLD)
def test_what_may_bias_is_told(tmp_path, method, changes, says):
    assert says in reported(comparison_of(tmp_path, "finetune", method, equal_time=False), of_run=changes)


def test_on_a_cpu_times_are_cpu_times_and_elsewhere_the_clocks(tmp_path):
    for device, ratio in {"cpu": "2.00", "H200": "9.00"}.items():
        comparison = comparison_of(tmp_path / device, "finetune", "attention-dropout", options={"epochs": 10})
        for run in comparison.runs():
            seconds, cpu = (10.0, 5.0) if run.method.text == "finetune" else (90.0, 10.0)
            write(run, 0.5, seconds, training_cpu_seconds=cpu, environment={"device": device, "threads": 1})
        rows = table(reported(comparison), "Cost")
        assert [row["time ratio"] for row in rows] == ["1.00", ratio]
        with comparison.begun():
            longer = comparison.equal_time_methods().values()
        assert [method.text for method in longer] == [f"finetune --epochs {10 * float(ratio):.0f}"]


@pytest.mark.parametrize(
    ("option", "rows"),
    [("folds", "its seed's part of train, one of 2"), ("validation_rows", "2 rows held out of train, drawn by the seed")],
)  # fmt: skip
def test_with_rows_of_train_each_seed_has_its_own(tmp_path, option, rows):
    comparison = comparison_of(tmp_path, "finetune", "attention-dropout", options={option: 2})
    for run in written(comparison).runs():
        path = run.folder / "predictions.jsonl"
        own = [
            {**row, "label": row["label"] if number > run.seed else 1} for number, row in enumerate(read_lines(path))
        ]
        write_rows(path, own)
    report = reported(comparison)
    assert f"Each method is scored on {rows}, instead of dev, after the last epoch" in report
    assert report.startswith("# finetune, attention-dropout on agreement: accuracy on held-out rows")
    assert "seeds of --folds share training rows, so p may be too low" in report
    assert {"held-out", "held-out loss"} <= table(report, "Fit")[0].keys()
    searched = comparison_of(tmp_path / "searched", "finetune", "ad-drop --q {0.1,0.3}", options={option: 2})
    report_of_choice = reported(written(searched))
    assert "some may have taken part in this choice, which would bias scores upward" in report_of_choice
    assert "Dev was not used" not in report_of_choice
    write_rows(path, own[:-1])  # of the last run
    with pytest.raises(InputError, match="has other dev labels"):
        write_report(comparison)


def test_early_stopping_is_told_and_ends_the_same_time(tmp_path):
    options = {"epochs": 20, "patience": 3}
    comparison = comparison_of(tmp_path, "finetune", "ad-drop --stop-on dev", options=options)
    with comparison.begun():
        pass
    for run in comparison.runs():
        on_dev = run.settings.stop_on == "dev"
        end = {"rows": None if on_dev else 40, "score": 0.5, "last_epoch": 6 + run.seed, "returned_epoch": 3}
        write(run, 0.5 + 0.1 * run.seed, seconds=100.0 if on_dev else 10.0, stopping=end)
    comparison.decide()
    assert all(run.role == "final" for run in comparison.runs())  # patience decides how long the baseline trains
    report = reported(comparison)
    assert "on 40 rows held out of train, finetune trained until epoch 6.5 of 20 and returned the network of" in report
    assert "Warning: ad-drop --stop-on dev chose its epoch by the dev scores, so they are biased upward." in report
    assert "with the same training time" not in report
    assert "Each method is scored on dev at the end of training" in report
    assert "The methods differ in stop on: see the options below." in report
    rows = read_csv(comparison.folder / "results.csv")
    assert [row["stopping_last_epoch"] for row in rows] == ["6", "7"] * 2


def test_runs_made_anew_decide_again_how_long_the_baseline_trains(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("from attnreg.experiments import recipe\n\n\n@recipe('mine')\ndef run(run):\n    'Mine.'\n")
    found = []
    for epochs, file, seconds in ((10, "", 20.0), (10, "# other", 40.0), (4, "# other", 40.0)):
        recipe.write_text(recipe.read_text() + file)
        comparison = comparison_of(tmp_path, "finetune", str(recipe), options={"epochs": epochs})
        for run in comparison.runs():
            shutil.rmtree(run.folder, ignore_errors=True)  # as docs/comparing.md says
        with comparison.begun():
            assert len(comparison.runs()) == 4  # nothing is known of these
            for run in comparison.runs():
                write(run, 0.5, 10.0 if run.method == comparison.baseline else seconds)
            comparison.decide()
        found += [method.text for method in comparison.equal_time_methods().values()]
    assert found == ["finetune --epochs 20", "finetune --epochs 40", "finetune --epochs 16"]


def test_runs_from_before_an_option_count_as_with_its_default(tmp_path):
    comparison = written(comparison_of(tmp_path, "finetune", "ad-drop", equal_time=False))
    old = comparison.runs()[0].folder / "config.json"
    config = json.loads(old.read_text())
    for name in ("schedule", "patience", "stop_on", "stopping_rows"):
        del config[name]
    old.write_text(json.dumps(config))
    comparison.folder.joinpath("study.json").write_text('{"equal_time_epochs": {}}')
    comparison.check_methods()
    report = reported(comparison)
    assert "The methods differ" not in report
    assert "Incomplete" not in report


def test_one_comparison_at_a_time_works_on_a_folder(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop")
    busy = pytest.raises(InputError, match=r"Another comparison is writing to .*: wait for it")
    with comparison.begun(), busy, comparison.begun():
        pass
    comparison.check_methods()
    with comparison.begun():  # let go again
        pass


def test_data_that_has_changed_is_noticed(tmp_path):
    comparison = written(comparison_of(tmp_path, "finetune", "ad-drop", equal_time=False))
    path = comparison.runs()[-1].folder / "predictions.jsonl"
    first, *lines = read_lines(path)
    write_rows(path, [*lines, first])
    with comparison.begun(), pytest.raises(InputError, match=r"ad-drop/seed1 has other dev labels than "):
        write_report(comparison)


def test_a_finished_run_is_tidied_once(tmp_path):
    kept, other = written(comparison_of(tmp_path, "finetune", keep_models=True)).runs()
    for run in (kept, other):
        for name in ("checkpoints", "model", "provider"):
            (run.folder / name).mkdir()
    kept.prepare()  # a finished run is not cleared away
    assert kept.finished
    kept.tidy()
    assert {path.name for path in kept.folder.iterdir() if path.is_dir()} == {"model", "provider"}
    for run in comparison_of(tmp_path, "finetune").runs():  # without --keep-models
        run.tidy()
    assert (kept.folder / "model").is_dir()
    assert not [path for path in other.folder.iterdir() if path.is_dir()]


def test_the_baseline_gets_the_same_time(tmp_path):
    times = {"finetune": (10.0, 12.0), "attendout": (24.0, 26.0), "ad-drop": (12.0, 12.3), "sam": (11.9, 12.1)}
    comparison = comparison_of(tmp_path, *times, options={"epochs": 10})
    longer = lambda: [run for run in comparison.runs() if run.role == "equal time"]  # noqa: E731
    with comparison.begun():
        pass
    written(comparison, 0.5, lambda run: {"seconds": times[run.method.text][run.seed]})
    assert not longer()
    comparison.decide()
    planned = ["finetune --epochs 23"] * 2 + ["finetune --epochs 11"] * 2  # 10 * 25 / 11; 10 * 12.15 / 11; not sam's
    assert [run.method.text for run in longer()] == planned
    assert longer()[0].settings.epochs == 23
    assert "--no-baseline" in next(run for run in comparison.runs() if run.method.text == "attendout").arguments
    for run in comparison.final_runs(Method("attendout")):  # times that come out otherwise do not change the plan
        result = json.loads((run.folder / "result.json").read_text()) | {"training_seconds": 99.0}
        (run.folder / "result.json").write_text(json.dumps(result))
    comparison.decide()
    assert [run.method.text for run in longer()] == planned


def test_methods_that_come_to_the_same_runs_share_them(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop --q 0.3", "ad-drop --q {0.1,0.3}", equal_time=False)
    runs = written(comparison, lambda run: 0.9 if "0.3" in run.method.text else 0.1).runs()
    assert len(runs) == len({run.folder for run in runs}) == 2 + 2 + 2
    chosen = comparison.chosen(comparison.methods[2])
    assert comparison.final_runs(chosen) == comparison.final_runs(comparison.methods[1])


def test_a_run_that_somebody_is_at_is_left_alone(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", equal_time=False)
    busy, stale = comparison.runs()
    for run in (busy, stale):
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text(json.dumps(run.settings.to_dict()))
    printed = []
    with locked(busy.folder, "busy"):
        assert busy.reader.running
        assert commands(comparison.runs(), 3, printed.append) == 1
    assert "seed1" in printed[0]
    assert printed[0].startswith(f"cd {Path.cwd()} && OMP_NUM_THREADS=3 attnreg recipe finetune ")
    assert (busy.folder / "config.json").is_file()
    assert not stale.folder.exists()
    assert not busy.reader.running


@pytest.mark.parametrize("text", ["ad-drop --p 0.3 --q 0.3", "ad-drop --layers 0,1 --p " + "0.3" * 100, "mine/r.py"])
def test_folders_have_names_that_any_system_takes(text):
    assert re.fullmatch(r"[\w.=,-]{1,90}", Method(text).slug)
    assert Method(text).slug != Method(text + "0").slug
