"""Comparisons and studies whose runs are written down, and their reports."""

import json
import re
import subprocess
from types import SimpleNamespace

import yaml

from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.compare.report.study import write_study_report
from tests.helpers.task_data import write_rows


def started_by(warm):
    """What stands for ``subprocess`` where the runs of a comparison are to be spared their imports."""
    return SimpleNamespace(Popen=warm.popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)


def comparison_of(tmp_path, *methods, **options):
    options = {"options": {}, "seeds": 2, "folder": tmp_path / "study", "search_rows": 10, **options}
    chosen = [Method.parse(text) for text in methods]
    return Comparison(chosen, chosen[0], **options)


LABELS = [0, 1] * 50


def write(run, score, seconds=10.0, **changes):
    """A finished run whose accuracy on a hundred dev rows is the score."""
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(run.settings.to_dict()))
    result = {
        "metric": "accuracy", "scored_on": "dev", "best_epoch": {"epoch": 1, "accuracy": score},
        "dev": {"accuracy": score, "loss": 1 - score, "calibration_error": 0.1},
        "train": {"accuracy": 0.9, "loss": 0.25}, "train_rows_scored": 40, "rows": 40, "steps": 20,
        "seconds": seconds, "training_seconds": seconds, "peak_memory_bytes": 100,
        "drop_rates": {}, "active_steps": 0,
        "held_out": None, "environment": {"device": "cpu", "threads": 1},
    }  # fmt: skip
    (run.folder / "result.json").write_text(json.dumps({**result, **changes}))
    wrong = round(100 * (1 - score))
    rows = [{"label": label, "prediction": label ^ (n < wrong)} for n, label in enumerate(LABELS)]
    write_rows(run.folder / "predictions.jsonl", rows)


def written(comparison, score=lambda run: 0.5 + 0.1 * run.seed, of_run=lambda run: {}, **changes):
    """A comparison whose missing runs are written down with these scores and changes, of all or of each."""
    for run in comparison.runs():
        if not run.finished:
            write(run, score(run) if callable(score) else score, **changes, **of_run(run))
    return comparison


def reported(comparison, *given, **changes):
    """The report of a comparison, whose missing runs are written down."""
    write_report(written(comparison, *given, **changes))
    return (comparison.folder / "report.md").read_text()


def table(report, heading):
    """The first table below a heading, as dicts by column."""
    lines = re.search(r"(?:^\|.*\n)+", report[report.index(f"## {heading}") :], re.M)[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


STUDY = {
    "methods": {"plain": "finetune", "high": "ad-drop --p 0.3", "random": "ad-drop --p 0.3 --method random"},
    "baseline": "plain",
    "tasks": [{"task": "agreement", "train-size": [64, 96]}, {"name": "few", "train_size": 32, "learning_rate": 1e-3}],
    "options": {"epochs": 2, "device": "cpu"},
    "seeds": 3,
    "first_seed": 7,
    "primary": ["high", "random"],
}


def file_of(tmp_path, **changes):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return path


def reported_study(study):
    write_study_report(study)
    return (study.folder / "report.md").read_text()
