"""Comparisons through the command line: their runs, what is repeated and what is not, their report."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import matthews_corrcoef

from attnreg._files import exclusive
from attnreg.compare.launch import commands
from attnreg.compare.method import Method
from attnreg.compare.report import write_report
from attnreg.compare.study import Study

SMALL = ["--epochs", 1, "--train-size", 64, "--batch-size", 32, "--device", "cpu"]
METHODS = ["finetune", "ad-drop --q 0.5", "attention-layerdrop --drop-rate {0.1,0.9}"]
COMPARE = ["compare", *METHODS, *SMALL, "--seeds", 2, "--search-rows", 50, "--no-equal-time", "--output-dir", "study"]


def results(folder):
    """What every run measured, without what the clock and the memory say."""
    measured = ("seconds", "memory")
    with (folder / "results.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    return [{name: value for name, value in row.items() if not any(word in name for word in measured)} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished comparison in its folder, and what was printed."""
    from click.testing import CliRunner

    from attnreg.cli.main import main

    home = tmp_path_factory.mktemp("comparison")
    before = Path.cwd()
    os.chdir(home)
    try:
        result = CliRunner().invoke(main, [str(arg) for arg in COMPARE])
    finally:
        os.chdir(before)
    assert result.exit_code == 0, result.output
    return home, result.output


def test_each_run_has_its_folder(finished):
    rows = results(finished[0] / "study")
    assert [(row["method"], row["role"], row["seed"]) for row in rows] == [
        *(("finetune", "final", seed) for seed in "01"),
        *(("ad-drop --q 0.5", "final", seed) for seed in "01"),
        ("attention-layerdrop --drop-rate 0.1", "search", "1000"),
        ("attention-layerdrop --drop-rate 0.9", "search", "1000"),
        *((row["method"], "final", seed) for row, seed in zip(rows[-2:], "01", strict=True)),
    ]
    for row in rows:
        folder = finished[0] / "study" / row["folder"]
        assert json.loads((folder / "config.json").read_text())["seed"] == int(row["seed"])
        assert not (folder / "checkpoints").exists()
        assert not (folder / "model").exists()
    assert {row["scored_on"] for row in rows if row["role"] == "search"} == {"held-out"}


def test_methods_of_one_seed_share_data_order_head_and_evaluation(finished):
    """The first epoch of AD-DROP is a plain one: the same as fine-tuning, to the last bit."""
    lines = {}
    for name in ("finetune", "ad-drop--q0.5"):
        for seed in (0, 1):
            with (finished[0] / "study" / name / f"seed{seed}" / "predictions.jsonl").open() as file:
                lines[name, seed] = [json.loads(line) for line in file]
    for seed in (0, 1):
        plain, other = lines["finetune", seed], lines["ad-drop--q0.5", seed]
        assert [row["label"] for row in plain] == [row["label"] for row in other]
        logits = [np.array([row["logits"] for row in rows]) for rows in (plain, other)]
        assert (logits[0] == logits[1]).all()
    first, second = ([row["logits"] for row in lines["finetune", seed]] for seed in (0, 1))
    assert np.abs(np.array(first) - np.array(second)).max() > 1e-2


def test_scores_are_those_of_the_predictions(finished):
    for row in results(finished[0] / "study"):
        with (finished[0] / "study" / row["folder"] / "predictions.jsonl").open() as file:
            lines = [json.loads(line) for line in file]
        predicted = [int(np.argmax(line["logits"])) for line in lines]
        score = matthews_corrcoef([line["label"] for line in lines], predicted)
        assert float(row["score"]) == pytest.approx(score)
        assert len(lines) == (50 if row["role"] == "search" else 1000)


def test_the_report_has_what_it_needs(finished):
    study = finished[0] / "study"
    report, page = (study / "report.md").read_text(), (study / "report.html").read_text()
    rows = [row for row in results(study) if row["method"] == "finetune"]
    mean = np.mean([float(row["score"]) for row in rows])
    assert re.search(rf"\| finetune \| {mean:.4f} \|", report)
    for heading in ("Scores", "Differences to finetune", "Fit", "Cost", "Options"):
        assert f"## {heading}" in report
        assert f"<h2>{heading}</h2>" in page
    assert "| attention-layerdrop --drop-rate {0.1,0.9} | p = 0." in report
    assert "not given the same number of tries: finetune 1, ad-drop --q 0.5 1, attention-layerdrop" in report
    assert report.count("chosen |") == 1
    assert "data:image/png;base64," in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "2 seeds; 64 training rows, 1000 dev rows; 1 epochs" in report
    command = shlex.split(report.split("```")[1].strip())
    assert command[:5] == ["attnreg", "compare", *METHODS]


def test_what_is_finished_is_not_run_again(finished, cli, tmp_path):
    shutil.copytree(finished[0] / "study", tmp_path / "study")
    before = results(tmp_path / "study")
    shutil.rmtree(tmp_path / "study" / "finetune" / "seed1")
    again = cli(*COMPARE)
    assert again.exit_code == 0, again.output
    assert re.findall(r"^(.*), seed (\d+): ", again.output, re.M) == [("finetune", "1")]
    assert results(tmp_path / "study") == before
    once_more = cli(*COMPARE)
    assert ", seed" not in once_more.output
    assert results(tmp_path / "study") == before


def test_another_seed_uses_what_is_there(finished, cli, tmp_path):
    shutil.copytree(finished[0] / "study", tmp_path / "study")
    printed = cli(
        *["finetune --epochs 2" if word == METHODS[2] else word for word in COMPARE],
        "--seeds",
        3,
        "--launcher",
        "commands",
    )
    lines = printed.stdout.splitlines()
    assert len(lines) == 2 + 3  # one more seed of what is there, three of what is new
    assert all(line.startswith("OMP_NUM_THREADS=1 attnreg recipe ") for line in lines)
    assert "5 runs to make, 0 running" in printed.stderr
    line = next(line for line in lines if "seed2" in line and "finetune" in line)
    made = cli(*shlex.split(line)[2:])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "study" / "finetune" / "seed2" / "result.json").is_file()


def test_killed_and_started_again(finished, cli, spawn, tmp_path):
    process = spawn(*COMPARE)
    study = tmp_path / "study"
    deadline = time.time() + 120
    while len(list(study.rglob("result.json"))) < 2 and time.time() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)
    done = {path: path.stat().st_mtime_ns for path in study.rglob("result.json")}
    time.sleep(1.0)
    assert set(study.rglob("result.json")) == set(done)  # the runs ended with it
    assert 2 <= len(done) < 8
    again = cli(*COMPARE)
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert results(study) == results(finished[0] / "study")


def test_stopped_by_hand(finished, spawn, tmp_path):
    process = spawn(*COMPARE)
    deadline = time.time() + 60
    while not list(tmp_path.rglob("config.json")) and time.time() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Stopped; the same command goes on where it was." in output
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("report.md"))


def test_ray_that_is_not_installed(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = cli(*COMPARE, "--launcher", "ray")
    assert result.exit_code == 1
    assert "Expected Ray for --launcher ray, found none: pip install 'attnreg[ray]'." in " ".join(result.output.split())


@pytest.mark.slow
def test_on_a_ray_cluster(finished, spawn, tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install ray")
    process = spawn(*COMPARE, "--launcher", "ray")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert results(tmp_path / "study") == results(finished[0] / "study")


def test_a_run_that_fails_is_named(cli, tmp_path):
    result = cli("compare", "finetune", "finetune --train-size 5000", *SMALL, "--seeds", 1, "--output-dir", "study")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "Expected all runs to finish, got 1 that did not" in result.output
    assert "Expected --train-size of at most 2000, got 5000" in result.output.replace("\n", " ")
    assert (tmp_path / "study" / "finetune" / "seed0" / "result.json").is_file()


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (["nothing"], "Expected a recipe among", 2),
        ([""], "Expected a recipe with its options, got an empty text", 2),
        (["finetune 'a"], "No closing quotation", 2),
        (["finetune", "finetune"], "Expected each method once", 2),
        (["ad-drop --q 0.3", "ad-drop  --q 0.3"], "Expected each method once", 2),
        (["finetune", "ad-drop --q 2"], "Invalid value for '--q'", 2),
        (["finetune", "ad-drop --q {0.1,x}"], "Invalid value for '--q'", 2),
        (
            ["finetune", "ad-drop --seed 3"],
            "Expected --seed for all methods alike, got it within 'ad-drop --seed 3'",
            2,
        ),
        (["finetune", "ad-drop --validation-rows=3"], "Expected --validation-rows for all methods alike", 2),
        (["finetune", "ad-drop --task cola"], "Expected --task for all methods alike", 2),
        (
            ["finetune", "ad-drop --layers {0,1} --search p=0.1,0.2"],
            "Expected values in braces or --search, got both",
            2,
        ),
        (["finetune", "--launcher", "commands", "--jobs", 2], "Expected --jobs with --launcher local alone", 2),
        (["finetune", "--baseline", "ad-drop"], "Expected --baseline to be one of the methods, got 'ad-drop'", 2),
        (["finetune --epochs {1,2}", "ad-drop"], "Expected a baseline without values to search", 2),
        (["finetune", "--seeds", 0], "Invalid value for '--seeds'", 2),
        (["finetune", "--task", "nothing"], "Expected a task among", 2),
        (["finetune", "--output-dir", "full"], "Expected --output-dir to be new, empty or a comparison's", 1),
        ([], "Missing argument 'METHOD...'", 2),
    ],
)
def test_bad_input(cli, tmp_path, args, message, code):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    result = cli("compare", *args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert message in " ".join(result.output.split())
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "thesis.tex"]


def test_other_options_in_a_folder_that_has_runs(finished, cli, tmp_path):
    shutil.copytree(finished[0] / "study", tmp_path / "study")
    result = cli(*COMPARE, "--learning-rate", 0.5)
    assert result.exit_code == 1
    assert "--learning-rate 0.002 (not 0.5)" in result.output
    assert results(tmp_path / "study") == results(finished[0] / "study")


# What a study decides, with runs that are written down here.


def study_of(tmp_path, *methods, **options):
    options = {"options": [], "seeds": 2, "folder": tmp_path / "study", "search_rows": 10, **options}
    chosen = [Method(text) for text in methods]
    return Study(chosen, chosen[0], **options)


LABELS = [0, 1] * 50


def write(run, score, seconds=10.0, **changes):
    """A finished run whose accuracy on a hundred dev rows is the score."""
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(run.settings.to_dict()))
    result = {
        "metric": "accuracy",
        "scored_on": "dev",
        "dev": {"accuracy": score, "loss": 1 - score, "calibration_error": 0.1},
        "train": {"accuracy": 0.9, "loss": 0.25},
        "best_epoch": {"epoch": 1, "accuracy": score},
        "rows": 40,
        "steps": 20,
        "training_seconds": seconds,
        "peak_memory_bytes": 100,
        "forward_rows": 400,
        "backward_rows": 300,
        "drop_rates": {},
        "active_steps": 0,
        "search": None,
        "held_out": None,
        "environment": {"device": "cpu", "threads": 1},
    }
    (run.folder / "result.json").write_text(json.dumps({**result, **changes}))
    wrong = round(100 * (1 - score))
    rows = [{"label": label, "logits": [label ^ (n >= wrong), label ^ (n < wrong)]} for n, label in enumerate(LABELS)]
    (run.folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(report, heading):
    """The first table below a heading, as dicts by column."""
    lines = report[report.index(f"## {heading}") :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_every_number_of_the_report(tmp_path):
    study = study_of(tmp_path, "finetune", "ad-drop", "attention-layerdrop --drop-rate 0", seeds=3)
    study.begin()
    scores = {
        "finetune": (0.70, 0.72, 0.77),
        "ad-drop": (0.75, 0.76, 0.85),
        "attention-layerdrop --drop-rate 0": (0.7, 0.7, 0.7),
    }
    for run in study.runs():
        other = {}
        if run.method.text == "ad-drop":
            other = {
                "seconds": 15.0,
                "forward_rows": 600,
                "peak_memory_bytes": 150,
                "active_steps": 10,
                "drop_rates": {"encoder.0": 0.1, "encoder.1": 0.3},
            }
        write(run, scores[run.method.text][run.seed], **other)
    study.decide()
    for run in study.runs():
        if run.role == "equal time":
            write(run, 0.71 + 0.01 * run.seed, 14.0)
    write_report(study)
    report = (tmp_path / "study" / "report.md").read_text()
    first = table(report, "Scores")[1]
    assert first == {
        "method": "ad-drop",
        "mean": f"{np.mean(scores['ad-drop']):.4f}",
        "SD": f"{np.std(scores['ad-drop'], ddof=1):.4f}",
        "seeds, from 0": "0.750  0.760  0.850",
    }
    ad_drop, layerdrop = table(report, "Differences to finetune")
    tests = [stats.ttest_rel(scores[name], scores["finetune"]) for name in list(scores)[1:]]
    gap = np.mean(scores["ad-drop"]) - np.mean(scores["finetune"])
    low, high = tests[0].confidence_interval()
    assert ad_drop["difference"] == f"{gap:+.4f}"
    assert ad_drop["95 % over seeds"] == f"[{low:+.4f}, {high:+.4f}]"
    assert ad_drop["p"] == f"{tests[0].pvalue:.3f}"
    assert float(ad_drop["p (Holm)"]) == pytest.approx(2 * tests[0].pvalue, abs=1e-3)
    assert layerdrop["p (Holm)"] == layerdrop["p"] == f"{tests[1].pvalue:.3f}"
    low, high = (float(end) for end in ad_drop["95 % over dev rows"].strip("[]").split(","))
    assert 0 < low < gap < high < 0.12
    fit = table(report, "Fit")[1]
    dev = np.mean(scores["ad-drop"])
    assert (fit["train"], fit["dev"], fit["gap"]) == ("0.9000", f"{dev:.4f}", f"{0.9 - dev:+.4f}")
    assert (fit["train loss"], fit["dev loss"], fit["calibration error"]) == ("0.250", f"{1 - dev:.3f}", "0.100")
    cost = table(report, "Cost")[1]
    assert (cost["time ratio"], cost["memory ratio"], cost["forward ratio"], cost["backward ratio"]) == (
        "1.50",
        "1.50",
        "1.50",
        "1.00",
    )
    assert (cost["active steps"], cost["drop rate"]) == ("50%", "0.200")
    (equal,) = table(report, "finetune, given the same time")
    gap = dev - 0.72
    assert (equal["method"], equal["its time (s)"], equal["its mean"]) == ("ad-drop", "14", "0.7200")
    assert equal["difference"] == f"{gap:+.4f}"
    assert equal["p"] == f"{stats.ttest_rel(scores['ad-drop'], (0.71, 0.72, 0.73)).pvalue:.3f}"
    told = {row["method"]: row["options of the recipe"] for row in table(report, "Options")}
    assert told["attention-layerdrop --drop-rate 0"] == "p = 0.0"  # a zero is told as well
    assert "Made with device cpu; threads 1." in report
    assert "Nothing was searched" in report


def test_what_cannot_be_measured_is_left_blank(tmp_path):
    study = study_of(tmp_path, "finetune", "ad-drop", equal_time=False)
    for run in study.runs():
        write(run, 0.5 + 0.1 * run.seed, peak_memory_bytes=0, environment={"device": "cpu", "threads": run.seed})
    study.begin()
    write_report(study)
    report = (tmp_path / "study" / "report.md").read_text()
    assert table(report, "Cost")[1]["memory ratio"] == ""
    assert "Warning, made differently: device cpu; threads 0 | device cpu; threads 1." in report


def test_searches_of_the_recipes_own_are_told(tmp_path):
    study = study_of(
        tmp_path, "finetune", "ad-drop --search p=0.1:0.2:0.1 q=0.3", "attention-layerdrop", equal_time=False
    )
    study.begin()
    for run in study.runs():
        search = (
            {"tries": 2, "rows": 9, "chosen": {"p": 0.1 + 0.1 * run.seed, "q": 0.3}}
            if "search" in run.method.text
            else None
        )
        held_out = {"rows": 5, "epochs": 2} if "layerdrop" in run.method.text else None
        write(run, 0.5 + 0.1 * run.seed, search=search, held_out=held_out)
    write_report(study)
    report = (tmp_path / "study" / "report.md").read_text()
    row = table(report, "Options")[1]
    assert "p = 0.1  0.2 (by seed)" in row["options of the recipe"]
    assert row["tries"] == "2"
    assert (
        "not given the same number of tries: finetune 1, ad-drop --search p=0.1:0.2:0.1 q=0.3 2, attention-layerdrop 1"
        in report
    )
    assert "attention-layerdrop held out 5 of the training rows for its reward in the first 2 epochs" in report


def test_a_search_comes_first_and_its_best_is_run(tmp_path):
    study = study_of(tmp_path, "finetune", "ad-drop --p {0.2,0.4} --q {0.1,0.3}", search_seeds=2, equal_time=False)
    runs = study.runs()
    assert [run.role for run in runs] == ["final"] * 2 + ["search"] * 8
    assert all("--validation-rows" in run.arguments for run in runs[2:])
    assert {run.seed for run in runs[2:]} == {1000, 1001}
    best = {"ad-drop --p 0.4 --q 0.1": (0.9, 0.5), "ad-drop --p 0.2 --q 0.3": (0.6, 0.7)}
    for run in runs[2:]:
        write(run, best.get(run.method.text, (0.6, 0.6))[run.seed - 1000])
    assert study.chosen(study.methods[1]).text == "ad-drop --p 0.4 --q 0.1"
    assert [run.method.text for run in study.runs()][-2:] == ["ad-drop --p 0.4 --q 0.1"] * 2


def test_the_baseline_gets_the_same_time(tmp_path):
    study = study_of(tmp_path, "finetune", "attendout", "attention-layerdrop", options=["--epochs", "10"])
    study.begin()
    times = {"finetune": (10.0, 12.0), "attendout": (24.0, 26.0), "attention-layerdrop": (11.0, 11.5)}
    for run in study.runs():
        write(run, 0.5, times[run.method.text][run.seed])
    assert not [run for run in study.runs() if run.role == "equal time"]
    study.decide()
    longer = [run for run in study.runs() if run.role == "equal time"]
    assert [run.method.text for run in longer] == ["finetune --epochs 23"] * 2  # 10 * 25 / 11
    assert longer[0].settings.epochs == 23
    assert "--no-baseline" in next(run for run in study.runs() if run.method.text == "attendout").arguments
    for run in study.final_runs(Method("attendout")):  # times that come out otherwise do not change the plan
        result = json.loads((run.folder / "result.json").read_text()) | {"training_seconds": 99.0}
        (run.folder / "result.json").write_text(json.dumps(result))
    study.decide()
    assert [run.method.text for run in study.runs() if run.role == "equal time"] == ["finetune --epochs 23"] * 2


def test_methods_that_come_to_the_same_runs_share_them(tmp_path):
    study = study_of(tmp_path, "finetune", "ad-drop --q 0.3", "ad-drop --q {0.1,0.3}", equal_time=False)
    for run in study.runs():
        write(run, 0.9 if "0.3" in run.method.text else 0.1)
    runs = study.runs()
    assert len(runs) == len({run.folder for run in runs}) == 2 + 2 + 2
    assert study.final_runs(study.chosen(study.methods[2])) == study.final_runs(study.methods[1])


def test_a_run_that_somebody_is_at_is_left_alone(tmp_path):
    study = study_of(tmp_path, "finetune", equal_time=False)
    busy, stale = study.runs()
    for run in (busy, stale):
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text(json.dumps(run.settings.to_dict()))
    printed = []
    with exclusive(busy.folder / ".lock"):
        assert busy.running
        assert commands(study.runs(), 3, printed.append) == 1
    assert "seed1" in printed[0]
    assert printed[0].startswith("OMP_NUM_THREADS=3 attnreg recipe finetune ")
    assert (busy.folder / "config.json").is_file()
    assert not stale.folder.exists()
    assert not busy.running


def test_a_search_that_was_stopped_is_gone_on_with(tmp_path):
    run = study_of(tmp_path, "ad-drop --search p=0.1,0.2").runs()[0]
    (run.folder / "search" / "p=0.1").mkdir(parents=True)
    run.prepare()
    assert (run.folder / "search" / "p=0.1").is_dir()
    assert run.command_line()[-1] == "--resume"


@pytest.mark.parametrize(
    "text", ["ad-drop --search p=0.1:0.9:0.1 q=0.3", "ad-drop --layers 0,1 --p " + "0.3" * 100, "mine/r.py"]
)
def test_folders_have_names_that_any_system_takes(text):
    assert re.fullmatch(r"[\w.=,-]{1,90}", Method(text).slug)
    assert Method(text).slug != Method(text + "0").slug
