"""What a comparison must not hide or make up: losses at the same time, seeds that are missing, options, scales."""

import json
import re
import signal
import time

import pytest

from attnreg.errors import InputError, StoppedError
from attnreg.experiments.compare import make
from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.compare.scoring import Scoring, score_further
from attnreg.experiments.compare.study import change, read_study
from attnreg.experiments.runs import run as runs
from tests.helpers.cases import sample
from tests.helpers.commands import ran
from tests.helpers.comparisons import comparison_of, file_of, reported, reported_study, table, write, written
from tests.helpers.task_data import write_rows

pytestmark = pytest.mark.usefixtures("undrawn")
TRIVIAL = {"predictor": "majority class", "dev": {"accuracy": 0.55}}
TIMES = {"finetune": 10.0, "ad-drop": 20.0, "sam": 20.0}


def decided(comparison, *left_out):
    """The comparison, whose methods have run for the times above, but for some runs, by name and seed."""
    with comparison.begun():
        for run in comparison.runs():
            if (run.method.name, run.seed) not in left_out:
                noise = 0.01 * ((run.seed * 7 + len(run.method.name)) % 3)
                write(run, {"finetune": 0.5}.get(run.method.name, 0.7) + noise, TIMES[run.method.name])
        comparison.decide()
    return comparison


@pytest.mark.parametrize(
    ("longer", "says"),
    [
        (lambda run, score: 0.9 + 0.01 * (run.seed % 2), r"ad-drop scores 0\.19\d+ below it\."),
        (lambda run, score: 0.7 + 0.01 * (run.seed % 2), "ad-drop shows no significant gain"),
        (lambda run, score: score + 0.1, r"ad-drop scores 0\.1000 below it\."),  # with every seed, without a test
    ],
)
def test_a_gain_that_the_same_time_loses_is_told(tmp_path, longer, says):
    comparison = decided(comparison_of(tmp_path, "finetune", "ad-drop", options={"epochs": 10}, seeds=5))
    scores = {run.seed: run.score for run in comparison.runs() if run.method.name == "ad-drop"}
    report = reported(comparison, lambda run: longer(run, scores[run.seed]))
    assert re.search(r"ad-drop scores 0\.\d+ above finetune", report)
    assert re.search(f"Given the same training time, {says}", report)


@pytest.mark.parametrize(("longer", "is_told"), [(0.72, True), (0.5, False)])
def test_a_longer_baseline_that_scores_more_is_told_where_no_method_does(tmp_path, longer, is_told):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", options={"epochs": 10}, seeds=3)
    with comparison.begun():
        for run in comparison.runs():
            write(run, 0.6 + 0.02 * run.seed * (-1) ** len(run.method.name), TIMES[run.method.name])
        comparison.decide()
    report = reported(comparison, lambda run: longer + 0.01 * run.seed)
    says = r"More epochs may help: finetune --epochs 20 scores \+0\.1\d+ \(\[\+0\.\d+, \+0\.\d+\]\) against finetune\."
    assert ("More epochs may help" in report) == bool(re.search(says, report)) == is_told
    assert "To use finetune, train" in report


def test_no_fold_is_the_best(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", options={"folds": 3}, seeds=3, equal_time=False)
    says = "To use finetune, train it once more, with --validation-rows or a validation split instead of --folds"
    assert says in reported(comparison, lambda run: 0.7 - 0.01 * run.seed)


@pytest.mark.parametrize(
    ("others", "left_out", "says"),
    [
        (["ad-drop"], [("finetune", 1), ("ad-drop", 0), ("ad-drop", 1)], "Incomplete: 1 of 4 runs"),
        (["ad-drop", "mixout"], [("finetune", 0), ("finetune", 1)], "finetune: 0 of 2 seeds"),
    ],
)
def test_where_a_method_has_no_run_there_is_no_verdict(tmp_path, others, left_out, says):
    comparison = comparison_of(tmp_path, "finetune", *others, seeds=2, equal_time=False)
    with comparison.begun():
        for run in comparison.runs():
            if (run.method.name, run.seed) not in left_out:
                write(run, 0.5 if run.method.name == "finetune" else 0.9, trivial=TRIVIAL)
    said = " ".join(map(str, write_report(comparison)))
    assert says in (comparison.folder / "report.md").read_text()
    assert "No method learned" not in said
    assert "To use" not in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"train the model of its best seed, 1: `attnreg recipe finetune --seed 1`"),
        ({"validation_rows": 9}, "train a model, such as of seed 1: `.* --validation-rows 9 --seed 1`"),
    ],
)
def test_the_model_to_use_has_not_collapsed(tmp_path, options, says):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", options=options, seeds=3, equal_time=False)
    written(comparison, lambda run: 0.7 - 0.01 * run.seed)
    collapsed = comparison.final_runs(comparison.methods[0])[0].folder / "predictions.jsonl"
    write_rows(collapsed, [{"label": row % 2, "prediction": 1} for row in range(100)])
    assert re.search(f"To use finetune, {says}", reported(comparison))


def test_a_run_that_fails_costs_no_other_method_its_same_time(tmp_path):
    comparison = comparison_of(tmp_path, *TIMES, options={"epochs": 10}, seeds=3)
    decided(comparison, *(("sam", seed) for seed in range(3)), ("ad-drop", 3))
    assert [method.name for method in comparison.equal_time_methods()] == ["ad-drop"]
    assert {run.settings.epochs for run in comparison.runs() if run.role == "equal time"} == {20}


def test_scores_stand_under_their_seeds(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", "sam", seeds=3, equal_time=False)
    decided(comparison, ("finetune", 0), ("ad-drop", 1))
    write_report(comparison)
    report = (comparison.folder / "report.md").read_text()
    rows = {row["method"]: row["seeds, from 0"].split() for row in table(report, "Scores")}
    assert [rows["finetune"][0], rows["ad-drop"][1]] == ["none", "none"]
    assert all(len(each) == 3 and (each.count("none") == (name != "sam")) for name, each in rows.items())
    assert "The methods differ in" not in report


def test_only_options_that_exist_are_told(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "short=ad-drop --max-length 16", equal_time=False)
    for run in comparison.runs():
        write(run, 0.5)
        made = {"default_max_length": 32 if run.method.name == "finetune" else 16, "parameters": {"all": run.seed}}
        path = run.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | made))
    report = reported(comparison)
    assert "The methods differ in max length: see the options below." in report
    plain, short = (row["options"] for row in table(report, "Options"))
    assert plain == "none"
    assert "--max-length 16" in short
    assert "parameters" not in short
    assert "default" not in short


def test_the_mean_over_tasks_is_of_scores_of_one_scale(tmp_path):
    study = read_study(file_of(tmp_path), tmp_path / "out")
    gains = dict(zip(study.comparisons, (-0.1, -0.06, 1.0), strict=True))
    for name, comparison in study.comparisons.items():
        for run in comparison.runs():
            gain = gains[name] * (run.method.name == "high")
            write(run, 0.5 + gain if abs(gain) < 1 else 0.5)
            if gain == 1.0 or name == [*gains][-1]:  # of 100
                path = run.folder / "result.json"
                result = json.loads(path.read_text())
                bleu = {"bleu": 30.0 + gain, "loss": 0.5, "calibration_error": None}
                path.write_text(json.dumps({**result, "metric": "bleu", "dev": bleu, "train": bleu}))
    over = {row["method"]: row["mean difference"] for row in table(reported_study(study), "Over tasks")}
    assert over["high"] == f"{(-0.1 - 0.06 + 0.01) / 3:+.4f}"


def test_the_same_difference_with_every_seed_is_no_missing_one(tmp_path):
    study = read_study(file_of(tmp_path, tasks=[{"task": "cola"}]), tmp_path / "out")
    (comparison,) = study.comparisons.values()
    written(comparison, lambda run: 0.5 + 0.05 * (run.method.name == "high"))
    report = reported_study(study)
    assert "is +0.0500 with every seed, without a test." in report
    assert "Not significant" not in report


def test_held_out_rows_are_not_called_dev(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", options={"folds": 3}, equal_time=False)
    assert "no learning curves: held-out rows were scored in a single epoch" in reported(comparison)


def test_models_that_are_gone_and_scores_that_fail_are_counted_once(tmp_path, capsys, monkeypatch):
    study = read_study(file_of(tmp_path, tasks=[{"task": "cola"}]), tmp_path / "out")
    (comparison,) = study.comparisons.values()
    written(comparison, lambda run: 0.5 + 0.01 * run.seed)
    monkeypatch.setattr(Scoring, "score", lambda self, run, device: f"{run.seed}: no model")
    (told,) = score_further(comparison, [Scoring("test", split="test")])
    assert re.fullmatch(r"9 scores are missing. The first: \d+: no model", told)
    object.__setattr__(comparison, "keep_models", True)
    make.make(study, "local", 1, 1, of_file=False)
    assert "9 finished runs kept no model: to repeat one, remove its folder." in capsys.readouterr().err
    for run in comparison.runs()[1:]:
        (run.folder / "model").mkdir()
    make.make(study, "local", 1, 1, of_file=False)
    assert "1 finished run kept no model: to repeat one, remove its folder." in capsys.readouterr().err


@pytest.mark.parametrize("at_once", [False, True])
def test_stopped_while_scoring_it_ends_as_stopped(tmp_path, monkeypatch, at_once):
    entry = {"task": "cola", "score_on": [{"split": "test"}]}
    study, scored = read_study(file_of(tmp_path, tasks=[entry, {**entry, "task": "rte"}]), tmp_path / "out"), []
    for comparison in study.comparisons.values():
        written(comparison)

    def score(self, run, device):
        scored.append(run)
        if len(scored) == 2:
            if at_once:
                raise KeyboardInterrupt  # as the second Ctrl-C does
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Scoring, "score", score)
    with pytest.raises(StoppedError, match=r"Stopped\. Repeat") as stopped:
        make.make(study, "local", 1, 1, of_file=True)
    assert (len(scored), stopped.value.exit_code) == (2, 130)


def failed(run, why):
    """A run that has failed before it kept anything."""
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(run.settings.to_dict()))
    run.log.write_text(f"Error: {why}")


def test_values_that_diverge_lose(tmp_path):
    tried = "mixout --p 0.1 --learning-rate {1e-3,1e-4,1}"
    comparison = comparison_of(tmp_path, "finetune", tried, seeds=2, search_seeds=2, equal_time=False)
    with comparison.begun():
        for run in comparison.runs():
            if run.role == "search" and run.method.text.endswith(" 1"):
                if run.seed == 1000:
                    failed(run, "Training diverged: the loss is nan at step 6. Start again with a lower rate.")
            else:
                write(run, 0.5 + 0.2 * ("1e-4" in run.method.text))
        report = reported(comparison)
        assert comparison.chosen(comparison.methods[1]).text == "mixout --p 0.1 --learning-rate 1e-4"
        assert comparison.best_of([comparison.methods[1].name]) == comparison.methods[1].name
        assert list(comparison.missing()) == []
        assert re.search(r"\| mixout --p 0.1 --learning-rate 1 +\| none +\| none +\| diverged", report)


def test_a_search_in_which_all_values_diverge_has_no_winner_and_is_repeated(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "mixout --learning-rate {1,2}", equal_time=False)
    with comparison.begun():
        for run in comparison.runs():
            if run.role == "search":
                failed(run, "Training diverged: the loss is nan at step 6.")
            else:
                write(run, 0.5)
        assert comparison.chosen(comparison.methods[1]) is None
        assert comparison.best_of([comparison.methods[1].name]) is None
        assert sum(run.role == "search" for run in comparison.runs()) == 2
        assert any("Training diverged" in line for line in comparison.missing())
        write_report(comparison)  # of the others


def test_what_diverged_with_other_options_is_tried_again(tmp_path):
    first, other = (
        comparison_of(tmp_path, "finetune", "mixout --p {0.1,0.2}", options={"learning_rate": rate})
        for rate in (1, 1e-4)
    )
    for run in first.search_runs(first.methods[1])[:1]:
        failed(run, "Training diverged: the loss is nan at step 6.")
    assert [len(each.search_runs(each.methods[1])) for each in (first, other)] == [1, 2]


def test_a_run_that_failed_before_it_kept_anything_may_have_other_options(tmp_path):
    first, other = (
        comparison_of(tmp_path, f"finetune --learning-rate {rate}", options={"epochs": epochs})
        for rate, epochs in ((1, 2), (1, 3))
    )
    failed(first.runs()[0], "Training diverged: the loss is nan at step 6.")
    other.runs()[0].check()
    (first.runs()[0].folder / "metrics.jsonl").write_text('{"epoch": 1, "acc')  # ended within its first line
    other.runs()[0].check()
    (first.runs()[0].folder / "metrics.jsonl").write_text('{"epoch": 1, "accuracy": 0.5}\n')
    with pytest.raises(InputError, match="was started with other options"):
        other.runs()[0].check()


def test_training_rows_that_differ_are_told_as_a_range(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", equal_time=False)
    report = reported(
        comparison, of_run=lambda run: {"rows": 50, "train_rows_scored": 50} if run.method.name == "ad-drop" else {}
    )
    assert "40 to 50 training rows" in report
    assert "the score on 40 to 50 of the training rows" in report
    options = {"task": "custom", "kind": "question-answering", "data_dir": "data", "text_columns": "q,c"}
    windows = reported(comparison_of(tmp_path / "windows", "finetune", "ad-drop", options=options, equal_time=False))
    assert "; 40 training windows" in windows
    assert "the score on 40 of the training windows" in windows
    alike = reported(comparison_of(tmp_path / "other", "finetune", "ad-drop", equal_time=False))
    assert "; 40 training rows" in alike


def test_rows_held_out_for_a_search_have_the_name_that_compare_gives_them(tmp_path):
    options = {"search_rows": 10, "equal_time": False}
    written(comparison_of(tmp_path, "finetune", "ad-drop --q {0.1,0.2}", **options))
    other = comparison_of(tmp_path, "finetune", "ad-drop --q {0.1,0.2}", **{**options, "search_rows": 20})
    searched = next(run for run in other.runs() if run.role == "search")
    with pytest.raises(InputError, match=r"repeat it with --search-rows 10 \(not --search-rows 20\)"):
        searched.check()
    held = comparison_of(tmp_path / "held", "finetune", "ad-drop", options={"validation_rows": 50}, equal_time=False)
    assert re.search(
        r"attnreg compare (?!.*--validation).* # in a study file, with `validation_rows: 50`", reported(held)
    )


TASKS = [{"task": ["cola", "rte"], "train_size": 32}, {"train_size": [32, 64], "data_dir": "x"}]


@pytest.mark.parametrize(
    ("task", "left"),
    [
        ("cola", [{"task": "cola", "train_size": 32}]),
        ("sst2", [{"task": "sst2", "train_size": [32, 64], "data_dir": "x"}]),
        ("mrpc", [{"task": "mrpc"}]),
    ],
)
def test_a_chosen_task_keeps_what_its_entry_says(task, left):
    content = {"methods": ["finetune", "ad-drop"], "options": {"task": "sst2"}, "tasks": TASKS}
    assert change(content, {"task": task})[0]["tasks"] == left


def test_a_list_of_tasks_has_a_folder_for_each(tmp_path):
    (tmp_path / "cola").mkdir()
    whole, notes = change({"methods": ["finetune"], "tasks": TASKS[:1]}, {"data_dir": str(tmp_path)})
    assert whole["tasks"] == [{"task": "cola", "train_size": 32, "data_dir": str(tmp_path / "cola")}]
    assert notes[-1].endswith("rte.")


def test_tasks_that_an_option_makes_the_same_are_there_once():
    sizes = [{"task": "cola", "train_size": size} for size in (100, 200)]
    whole, _ = change({"methods": ["finetune"], "tasks": sizes}, {"train_size": 20})
    assert whole["tasks"] == [{"task": "cola", "train_size": 20}]


@pytest.mark.parametrize("recipe", sample(["linear-probe", "lp-ft"], lambda recipe: recipe == "lp-ft"))
def test_fitting_the_head_is_training_time(cli, tmp_path, monkeypatch, recipe):
    fit = runs.fit_linear_head

    def slow(*given):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return fit(*given)

    monkeypatch.setattr(runs, "fit_linear_head", slow)
    ran(cli("recipe", recipe, "--epochs", 1, "--train-size", 16, "--device", "cpu", "--output-dir", tmp_path / "run"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert min(result[name] for name in ("training_cpu_seconds", "training_seconds", "seconds")) > 0.2


@pytest.mark.parametrize("entry", [{"task": ["cola", "rte"]}, {"name": "x", "task": ["cola", "rte"]}, {}])
def test_comparisons_keep_their_names_when_an_option_is_typed(tmp_path, entry):
    path = file_of(tmp_path, tasks=[entry], options={"task": ["cola", "rte"]})
    names = [*read_study(path, tmp_path / "out").comparisons]
    assert len(names) == 2
    assert [*read_study(path, tmp_path / "out", {"device": "cpu"}).comparisons] == names


def test_what_runs_say_of_themselves_stands_first(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "sam", "mixout", seeds=3, equal_time=False)
    cut, same = (
        "{} of 300 training inputs are cut by --max-length 16.",
        "3 of 50 dev rows are also in train (same texts).",
    )

    def told(run):
        if run.method.name == "mixout":
            return {"warnings": [same, "the training loss grew."], "acted": False}
        return {"warnings": [cut.format(100 + run.seed), same], "acted": None}

    with comparison.begun():
        printed = write_report(written(comparison, lambda run: 0.7 + len(run.method.text) * run.seed / 1000, told))
    expected = [
        "Warning: mixout never acted, so its scores say nothing about it.",
        "Warning: finetune, sam: 100 of 300 training inputs are cut by --max-length 16. (6 of 9 runs)",
        f"Warning: {same}",
        "Warning: mixout: the training loss grew. (3 of 9 runs)",
    ]
    assert printed[:4] == expected
    assert printed[4].startswith("Not significant: sam (3 seeds")
    report = (comparison.folder / "report.md").read_text()
    assert report.split("\n\n")[1:5] == expected
    assert {row["method"]: row["p"] == "never acted" for row in table(report, "Differences")} == {
        "sam": False,
        "mixout": True,
    }


def test_a_model_that_is_kept_is_named(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "sam", seeds=2, equal_time=False)
    for run in written(comparison).runs():
        (run.folder / "model").mkdir()
    with comparison.begun():
        _, then, *_ = write_report(comparison)
    assert then == f"To use finetune: its best model is in {comparison.folder}/finetune/seed1/model (seed 1)."


def test_a_wrong_option_of_a_method_names_the_command_whose_help_lists_it(cli):
    result = cli("compare", "finetune", "ad-drop --p 2")
    assert result.exit_code == 2
    assert "Try 'attnreg recipe ad-drop --help' for help." in result.output
