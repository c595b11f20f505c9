"""Searches through the command line, with runs that are written down here."""

import json
import os
import re
import shlex
import sys

import numpy as np
import optuna
import pytest

from attnreg.experiments.compare import launch
from attnreg.experiments.compare.method import Method
from attnreg.experiments.compare.search import trials
from attnreg.experiments.compare.search.trials import Trials
from attnreg.experiments.folder.lock import locked
from tests.commands import assert_sentence, ran
from tests.task_data import tiny_bert, write_rows
from tests.test_compare_study import table, write
from tests.test_plots import keeping

pytestmark = pytest.mark.usefixtures("undrawn")
SMALL = ["--epochs", 2, "--device", "cpu", "--search-rows", 50, "--jobs", 2, "--output-dir", "found"]
HEADS = "providers: {DropHead: {p: 0.1..0.5}, DropKey: {p: 0.1..0.5}}"


def rate(text):
    """A score that is best for DropHead(p=0.3), and worse with DropKey."""
    found = re.search(r"DropHead\(p=([\d.]+)", text)
    return round(0.8 - (abs(float(found[1]) - 0.3) if found else 0.25) - 0.2 * ("DropKey" in text), 2)


class Runs:
    """Stands for the launcher: runs are written down, not made.

    Args:
        score: the score of a run, by the text of its method and its seed; a text is the reason why it fails.
    """

    def __init__(self):
        self.score = lambda text, seed: rate(text) + 0.01 * (seed % 3)
        self.made = []
        self.last = None  # number of runs after which it is interrupted

    def local(self, jobs, threads):
        def start(runs, watcher):
            for run in runs:
                if len(self.made) == self.last:
                    raise KeyboardInterrupt
                watcher.started(run)
                run.prepare()
                score = self.score(run.method.text, run.seed)
                if isinstance(score, str):
                    run.log.write_text(f"epoch 1\nError: {score}\n")
                else:
                    write(run, score, seconds=60.0, training_cpu_seconds=30.0)
                self.made.append(run)
                watcher.ended(run)

        return start


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # of optuna's journal, after each line
    found = Runs()
    monkeypatch.setattr(launch, "local", found.local)
    return found


@pytest.fixture
def search(cli, runs):
    """Search over two providers, unless told otherwise."""
    return lambda *args: cli("search", *SMALL, *(() if "--space" in args else ("--space", HEADS)), *args)


def report(tmp_path):
    return (tmp_path / "found" / "report.md").read_text()


def drawn(output):
    """The methods of the trials, in their order."""
    return re.findall(r"^trial-\d+: ((?:finetune|regularize).*)$", output, re.M)


def test_the_budget_counts_runs(search, runs, tmp_path):
    output = ran(search("--runs", 10, "--seeds", 3, "--prune-p", 0)).output
    assert len(runs.made) == 9  # a fourth trial would not be complete
    assert "; 9 of 10 runs done" in output
    assert {run.seed for run in runs.made} == {1000, 1001, 1002}
    assert all(run.arguments[run.arguments.index("--validation-rows") + 1] == "50" for run in runs.made)
    assert drawn(output)[0] == runs.made[0].method.text == "finetune"  # is there anything to gain?
    assert runs.made[0].folder.as_posix() == "found/search/trial-0/seed1000"


ALONE = [
    "finetune",
    'regularize --provider "DropHead(p=0.03)"',
    'regularize --provider "DropAttention(p=0.3, window=2)"',
]
TWO = "{providers: {DropHead: {p: 0.01..0.09 log}, DropAttention: {p: 0.1..0.5, window: [2, 3]}}, layers: [all, first]}"


def test_first_come_plain_fine_tuning_and_each_provider_alone(search, runs):
    output = ran(search("--space", TWO, "--runs", 6, "--seeds", 1)).output
    assert drawn(output)[:3] == ALONE
    assert len({*drawn(output)}) == 6
    space = "{options: {epochs: 1..3}, providers: {DropHead: {p: 0.1..0.5}}, layers: [all]}"
    output = ran(search("--space", space, "--runs", 2, "--seeds", 1, "--output-dir", "options")).output
    assert drawn(output) == ["finetune --epochs 2", 'regularize --provider "DropHead(p=0.3)" --epochs 2']


def test_first_trials_that_a_kill_has_cut_off_are_made(search, runs, monkeypatch):
    enqueue, calls = optuna.Study.enqueue_trial, []

    def killed(study, params):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(params)
        enqueue(study, params)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "enqueue_trial", killed)
        assert search("--space", TWO, "--runs", 3, "--seeds", 1).exit_code != 0
    assert not runs.made
    assert drawn(ran(search("--space", TWO, "--runs", 3, "--seeds", 1)).output) == ALONE


def test_the_winner_can_be_pasted(search, runs, tmp_path, cli):
    output = ran(search("--runs", 30, "--seeds", 2)).output
    winner = json.loads((tmp_path / "found" / "winner.json").read_text())
    means = {}
    for run in runs.made:
        means.setdefault(run.method.text, []).append(run.score)
    complete = {text: sum(scores) / 2 for text, scores in means.items() if len(scores) == 2}
    assert winner["method"] == max(complete, key=complete.get)
    assert winner["score"] == pytest.approx(max(complete.values()))
    assert winner["score"] > complete["finetune"]
    assert (winner["trials"], winner["runs"]) == (len(means), len(runs.made))
    line = next(line for line in output.splitlines() if line.startswith("attnreg compare finetune "))
    words = shlex.split(line)
    assert words[4:] == ["--epochs", "2", "--device", "cpu", "--task", "agreement"]  # as in the search
    method = Method.parse(words[3])
    assert (method.name, method.text) == ("best", winner["method"])
    printed = ran(cli(*words[1:], "--seeds", 1, "--launcher", "commands"))
    assert "--provider" in printed.stdout


def test_the_report_has_what_it_needs(search, runs, tmp_path):
    with keeping() as figures:
        ran(search("--runs", 30, "--seeds", 2))
    text = report(tmp_path)
    best = table(text, "The best 5 trials")
    assert len(best) == 5
    assert [float(row["mean"]) for row in best] == sorted((float(row["mean"]) for row in best), reverse=True)
    every = table(text, "All trials")
    assert [row["trial"] for row in every] == [str(number) for number in range(len(every))]
    count = [row["state"] for row in every].count
    assert f"{len(every)} trials ({count('complete')} complete" in text
    assert f"in {len(runs.made)} runs of at most 30." in text
    assert f"The runs took {len(runs.made)}.0 min, one after another (training: {len(runs.made) / 2:.1f} min" in text
    assert "](plots/progress.png)" in text
    complete, best = figures["progress"].axes[0].lines
    assert len(complete.get_ydata()) == count("complete")
    assert list(best.get_ydata()) == [*np.maximum.accumulate(complete.get_ydata()), max(complete.get_ydata())]
    assert max(best.get_xdata()) == len(runs.made)
    assert table(text, "Which parameters matter")[0]["parameter"].split()[0] in ("DropHead", "DropKey")
    assert "attnreg compare finetune best=@found --epochs 2 --device cpu --task agreement" in text
    command = shlex.split(text.split("```")[1].strip())
    assert command[:2] == ["attnreg", "search"]
    assert command[command.index("--space") + 1] == HEADS
    assert "Search on agreement" in (tmp_path / "found" / "report.html").read_text()


def test_a_trial_that_is_worse_is_stopped(search, runs, tmp_path):
    runs.score = lambda text, seed: (0.8 if text == "finetune" else 0.5) + 0.01 * (seed % 3)
    with keeping() as figures:
        output = ran(search("--runs", 12, "--seeds", 4, "--jobs", 1)).output
    seeds = {}
    for run in runs.made:
        seeds.setdefault(run.method.text, []).append(run.seed)
    assert seeds.pop("finetune") == [1000, 1001, 1002, 1003]
    assert list(seeds.values()) == [[1000, 1001]] * 3
    assert "trial-1 stopped after 2 seeds: it is worse than trial-0." in output
    assert "4 trials (1 complete, 3 stopped early) in 10 runs of at most 12" in report(tmp_path)
    assert [row["state"] for row in table(report(tmp_path), "All trials")] == ["complete", *["stopped"] * 3]
    assert list(figures["progress"].axes[0].lines[0].get_xdata()) == [6, 8, 10]


def test_how_much_worse_is_an_option(search, runs):
    runs.score = lambda text, seed: 0.8 if text == "finetune" else 0.5 + 0.01 * (seed % 4)
    ran(search("--runs", 8, "--seeds", 4, "--prune-p", 0.2, "--jobs", 1))
    assert [run.seed for run in runs.made][4:] == [1000, 1001, 1002]  # 1/8 after three seeds, 1/4 after two


def test_a_run_that_fails_fails_its_trial(search, runs, tmp_path):
    runs.score = lambda text, seed: "No such thing." if "DropKey" in text else rate(text)
    output = ran(search("--runs", 12, "--seeds", 2)).output
    failed = [run for run in runs.made if not run.finished]
    assert failed
    assert len({run.method for run in failed}) == len(failed)
    assert len(runs.made) <= 12
    assert re.search(
        r"^trial-\d+ failed: Error: No such thing. \(see found/search/trial-\d+/seed1000.log\)$", output, re.M
    )
    assert f", {len(failed)} failed) in {len(runs.made)} runs" in report(tmp_path)
    assert "failed: Error: No such thing." in report(tmp_path)
    again = ran(search("--runs", 12, "--seeds", 2))
    assert not drawn(again.output)


def test_a_search_of_failures_says_why(search, runs):
    runs.score = lambda text, seed: "No such thing."
    result = search("--runs", 4, "--seeds", 2)
    assert result.exit_code == 1
    assert result.output.endswith("Error: No trial has finished. trial-0 failed: Error: No such thing.\n")


def test_the_same_seed_draws_the_same(search, runs):
    first, again, other = (
        drawn(ran(search("--runs", 20, "--seeds", 2, "--output-dir", name, "--sampler-seed", seed)).output)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == again
    assert set(first) & set(other) == set(first[:3]), "only what comes first in every search"


@pytest.fixture
def unbroken(search, runs, tmp_path):
    ran(search("--runs", 12, "--seeds", 2))
    made, runs.made = [(run.folder, run.method.text) for run in runs.made], []
    (tmp_path / "found").rename(tmp_path / "unbroken")
    return made


@pytest.mark.parametrize("last", [0, 1, 6])
def test_stopped_and_started_again(search, runs, unbroken, tmp_path, last):
    runs.last = last
    stopped = search("--runs", 12, "--seeds", 2)
    assert_sentence(stopped, 1, "Stopped. Repeat the command to continue.")
    runs.last = None
    ran(search("--runs", 12, "--seeds", 2))
    assert [(run.folder, run.method.text) for run in runs.made] == unbroken  # none of them twice
    assert report(tmp_path) == (tmp_path / "unbroken" / "report.md").read_text()


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("report", 4),
        ("settle", 3),
        ("_end", 2),
        ("_draw", 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("report", 1), ("_draw", 4))),
    ],
)
def test_killed_anywhere_and_started_again(search, runs, unbroken, tmp_path, monkeypatch, place, call):
    calls, usual = [], getattr(Trials, place)

    def killed(*args):
        calls.append(args)
        if len(calls) == call:
            raise SystemExit(9)
        return usual(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Trials, place, killed)
        assert search("--runs", 12, "--seeds", 2).exit_code == 9
    with (tmp_path / "found" / "optuna.log").open("a") as journal:
        journal.write('{"op_code": 4, "wor')  # a line that was cut off
    (tmp_path / "found" / "optuna.log.lock").symlink_to(tmp_path / "found" / "optuna.log")  # not let go of
    ran(search("--runs", 12, "--seeds", 2))
    assert [(run.folder, run.method.text) for run in runs.made] == unbroken
    assert report(tmp_path) == (tmp_path / "unbroken" / "report.md").read_text()


def test_a_draw_that_was_cut_off_is_finished(search, runs, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(optuna.trial.Trial, "set_user_attr", lambda *args: sys.exit(9))
        assert search("--runs", 4, "--seeds", 2).exit_code == 9
    output = ran(search("--runs", 4, "--seeds", 2)).output
    assert drawn(output)[0] == "finetune"
    assert [run.folder.parent.name for run in runs.made] == ["trial-0", "trial-1"] * 2


def test_a_larger_budget_goes_on(search, runs, cli):
    first = drawn(ran(search("--runs", 6, "--seeds", 2)).output)
    before = list(runs.made)
    more = drawn(ran(cli("search", "--space", HEADS, "--seeds", 2, "--runs", 12, *SMALL[2:], "--epochs", 2)).output)
    assert len(first) == 3
    assert more
    assert not {run.folder for run in before} & {run.folder for run in runs.made[len(before) :]}
    assert len(runs.made) <= 12


def test_another_search_needs_another_folder(search, runs):
    ran(search("--runs", 4, "--seeds", 2))
    refused = search("--runs", 4, "--seeds", 1, "--epochs", 3)
    assert_sentence(refused, 1, "The search in found has other options, seeds. Give the same, or another --output-dir")
    refused = search("--runs", 4, "--seeds", 2, "--space", "providers: {DropHead: {p: 0.1..0.4}}")
    assert_sentence(refused, 1, "The search in found has other space.")


def test_data_of_ones_own(search, runs, tmp_path):
    tiny_bert(tmp_path / "bert")
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", [{"text": "red", "label": f"c{number % 3}"} for number in range(60)])
    own = ["--task", "custom", "--text-columns", "text", "--data-dir", "data", "--model", "bert", "--max-length", 16]
    ran(search("--runs", 2, "--seeds", 1, *own))
    assert len(runs.made) == 2
    refused = search("--runs", 2, "--seeds", 1, *own, "--search-rows", 60, "--output-dir", "other")
    assert_sentence(refused, 1, "Holding out 60 rows needs at least 61 training rows, got 60")
    (tmp_path / "locked" / ".lock").mkdir(parents=True)
    refused = search("--runs", 2, "--seeds", 1, "--output-dir", "locked")
    assert_sentence(refused, 1, "Cannot write to --output-dir: .*locked/.lock")
    assert len(runs.made) == 2


def test_an_option_without_a_value(search, runs):
    ran(search("--runs", 4, "--seeds", 2, "--train-size", 100, "--stratified"))
    ran(search("--runs", 6, "--seeds", 2, "--stratified", "--train-size", 100))  # the same search
    assert len(runs.made) == 6
    assert all("--stratified" in run.arguments for run in runs.made)
    refused = search("--runs", 6, "--seeds", 2, "--train-size", 100)
    assert_sentence(refused, 1, "The search in found has other options.")


def test_one_search_at_a_time_works_on_a_folder(search, runs, tmp_path):
    (tmp_path / "found").mkdir()
    with locked(tmp_path / "found", "busy"):
        assert_sentence(search("--runs", 4, "--seeds", 2), 1, "Another search is writing to found: wait for it")
    ran(search("--runs", 4, "--seeds", 2))


def test_data_that_has_changed_is_noticed(search, runs):
    ran(search("--runs", 4, "--seeds", 2))
    config = runs.made[0].folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attnreg": "0.0.1"}))
    refused = search("--runs", 8, "--seeds", 2)
    assert_sentence(refused, 1, "changed since the search in found began, so its scores cannot be compared")


def test_a_space_that_is_exhausted(search, runs, monkeypatch):
    starts, usual = [], trials.TPESampler
    monkeypatch.setattr(
        trials, "TPESampler", lambda **options: starts.append(options["n_startup_trials"]) or usual(**options)
    )
    output = ran(
        search("--runs", 30, "--seeds", 1, "--space", "providers: {DropHead: {p: 0.2, layers: [all, last]}}")
    ).output
    assert "The search space has nothing left to try." in output
    assert {run.method.text for run in runs.made} == {
        "finetune",
        'regularize --provider "DropHead(p=0.2)"',
        'regularize --provider "OnLayers(DropHead(p=0.2), [-1])"',
    }
    assert len(runs.made) == 3
    assert starts[-100:] == [trials.RANDOM_TRIALS] * 50 + [sys.maxsize] * 50  # TPE may insist on the best one
