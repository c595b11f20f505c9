"""The report of a comparison: its figures, its search, its names, and what it says of nothing learned and of missing runs."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef

from attnreg.errors import UsageError
from attnreg.experiments.compare import make as launch
from attnreg.experiments.compare.planned import Trial, best
from attnreg.experiments.compare.report import tables
from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.tasks import get_task
from attnreg.experiments.tasks.kinds import kind_class
from tests.helpers.commands import ran, read_csv, read_lines
from tests.helpers.comparisons import LABELS, comparison_of, reported, started_by, table, write, written
from tests.helpers.runs import keeping
from tests.helpers.task_data import write_rows

pytestmark = pytest.mark.usefixtures("undrawn")
SEEDS = 3
NAMES = ["finetune", "ad-drop", "attention-dropout"]
HIGH, TRIED = "high=ad-drop --p 0.3", "tried=attention-dropout --drop-rate {0.1,0.2}"
TRIVIAL = {"predictor": "majority class", "dev": {"accuracy": 0.55}, "train": {"accuracy": 0.6}}


def metrics_of(number, seed):
    """Made-up evaluations after three epochs; AttendOut's other network is among them."""
    records = []
    for epoch in (1, 2, 3):
        scores = {"accuracy": 0.5 + 0.05 * epoch + 0.01 * seed * number, "loss": 1 / epoch + number + 0.1 * seed}
        records.append({"network": "model", "epoch": epoch, "step": epoch * 10, **scores})
    return [*records, {**records[-1], "network": "other", "accuracy": 0.0}]


def telemetry_of(number, seed):
    """Made-up means over a few steps each; those of the last epoch are over 7 and 3."""
    return [{"step": step, "loss": 10 / step + number + seed, "drop_rate": {}} for step in (4, 10, 20, 27, 30)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a finished comparison, its figures, its report as Markdown."""
    comparison = comparison_of(tmp_path_factory.mktemp("compared"), *NAMES, seeds=SEEDS, equal_time=False)
    for run in comparison.runs():
        number = NAMES.index(run.method.text)
        score = 0.7 + 0.02 * run.seed * number
        write(run, score, best_epoch={"network": "model", "epoch": 3, "accuracy": score})
        write_rows(run.folder / "metrics.jsonl", metrics_of(number, run.seed))
        write_rows(run.folder / "telemetry.jsonl", telemetry_of(number, run.seed))
    with keeping(draw=True) as figures:
        report = reported(comparison)
    return comparison.folder, figures, report


def test_the_report_has_its_figures_and_contents(compared):
    folder, _, report = compared
    page = (folder / "report.html").read_text()
    names = ["differences", "seeds", "learning"]
    assert re.findall(r"\]\(plots/(\w+)\.png\)", report) == names  # the differences come first
    for name in names:
        for suffix, start in {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}.items():
            assert (folder / "plots" / f"{name}{suffix}").read_bytes().startswith(start)
    assert page.count('src="data:image/png;base64,') == page.count("<img ") == len(names)
    headings, links = re.findall(r"^## (.*)$", report, re.M), re.findall(r'<a href="#([^"]+)">', page)
    assert headings[:3] == ["Differences to finetune", "Scores", "Learning curves"]
    assert re.findall(r"^- \[(.*)\]\(#", report, re.M) == headings
    assert links == re.findall(r'<h2 id="([^"]+)">', page)
    assert len(links) == len(headings) == len(set(links))


def test_the_forest_has_the_differences_of_the_table(compared):
    _, figures, report = compared
    (axes,) = figures["differences"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES[1:]
    bars = [line for line in axes.lines if line.get_linestyle() == "-" and len(set(line.get_ydata())) == 1]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    for row, bar, point in zip(table(report, "Differences to finetune"), bars, points, strict=True):
        low, high = (float(end) for end in row["95 % over seeds"].strip("[]").split(","))
        assert bar.get_xdata() == pytest.approx((low, high), abs=1e-4)
        assert point.get_xdata() == pytest.approx([float(row["difference"])], abs=1e-4)
    low, high = axes.get_xlim()
    assert low == -high


def test_curves_are_means_over_seeds_of_the_returned_network(compared):
    score, training, loss = compared[1]["learning"].axes
    for number, line in enumerate(training.lines):
        means = [(4 * 2.5 + 6 * 1.0) / 10, 0.5, (7 * 10 / 27 + 3 * 10 / 30) / 10]
        assert line.get_ydata() == pytest.approx([mean + number + (SEEDS - 1) / 2 for mean in means])
    for key, axes in (("accuracy", score), ("loss", loss)):
        for number, (line, band) in enumerate(zip(axes.lines, axes.collections, strict=True)):
            values = np.array([[record[key] for record in metrics_of(number, seed)[:3]] for seed in range(SEEDS)])
            assert list(line.get_xdata()) == [1, 2, 3]
            assert line.get_ydata() == pytest.approx(values.mean(0))
            ends = band.get_paths()[0].vertices[:, 1]
            assert (ends.min(), ends.max()) == (pytest.approx(values.min()), pytest.approx(values.max()))
    assert [text.get_text() for text in compared[1]["learning"].legends[0].get_texts()] == NAMES


def test_intervals_are_students(tmp_path):
    scores = {"finetune": [0.5, 0.6], "ad-drop": [0.5, 0.99], "sam": [0.6, 0.62]}
    with keeping(draw=True) as figures:
        comparison = comparison_of(tmp_path, *scores, equal_time=False)
        reported(comparison, lambda run: scores[run.method.text][run.seed])
    for bar, values in zip(figures["seeds"].axes[0].collections, scores.values(), strict=True):
        low, high = stats.t.interval(0.95, 1, np.mean(values), stats.sem(values))
        assert tuple(bar.get_segments()[0][:, 0]) == pytest.approx((low, high))


def test_a_report_of_a_task_without_classes(tmp_path):
    comparison = comparison_of(tmp_path, *NAMES[:2], equal_time=False)
    for run in written(comparison, dev={"accuracy": 0.5, "loss": 0.5, "calibration_error": None}).runs():
        write_rows(run.folder / "predictions.jsonl", [{"label": float(n), "prediction": n + 0.5} for n in range(9)])
    report = reported(comparison)
    assert "There are no learning curves: dev rows were scored in a single epoch" in report


def test_a_run_writes_what_the_majority_class_scores(cli, tmp_path):
    args = ["--train-size", 65, "--batch-size", 32, "--device", "cpu", "--epochs", 1, "--output-dir", "out"]
    ran(cli("recipe", "finetune", *args))
    trivial = json.loads((tmp_path / "out" / "result.json").read_text())["trivial"]
    labels = [row["label"] for row in read_lines("out/predictions.jsonl")]
    assert trivial["dev"]["matthews_correlation"] == matthews_corrcoef(labels, [0] * len(labels)) == 0.0
    assert set(trivial["train"]) == set(trivial["dev"])
    assert "| majority class | 0.0000 | none | none | 65 | 0 |" in (tmp_path / "out" / "report.md").read_text()


def test_the_trivial_answer_is_that_of_the_training_rows():
    kind, mean = (kind_class(task.kind)(task, None, 16) for task in map(get_task, ("mrpc", "stsb")))
    assert kind.trivial([1, 0, 1]) == ("majority class", 1)
    assert kind.trivial([1, 0])[1] == 0  # the first, in a tie
    assert mean.trivial([1.0, 2.0, 6.0]) == ("mean of train", 3.0)
    ones, threes = ([{"label": float(label), "prediction": answer} for label in (0, 0, 1)] for answer in (1, 3.0))
    assert kind.score(ones)["f1"] == f1_score([0, 0, 1], [1] * 3)
    assert mean.score(threes)["pearson"] == 0.0  # a constant has no correlation


def test_the_majority_class_is_a_line_of_the_scores_and_collapsed_networks_are_named(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop --q {0.1,0.3}", equal_time=False)
    for run in comparison.search_runs(comparison.methods[1]):
        write(run, 0.7 + 0.01 * run.seed)
    final = comparison.final_runs(comparison.chosen(comparison.methods[1]))
    for run in final:
        write(run, 0.5, trivial=TRIVIAL)
    write_rows(final[1].folder / "predictions.jsonl", [{"label": label, "prediction": 1} for label in LABELS])
    report = reported(comparison, trivial=TRIVIAL)
    assert "Collapsed: ad-drop --q {0.1,0.3} predicts the same class for all scored rows (seeds: 1)." in report
    assert [*table(report, "Scores")[-1].values()] == ["majority class", "0.5500", "0.0000", "0.550  0.550"]


@pytest.mark.parametrize(("seeds", "cell"), [(1, "1 seed"), (2, "all equal")])
def test_a_difference_without_an_interval_says_why(tmp_path, seeds, cell):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", seeds=seeds, equal_time=False)
    write(comparison.runs()[-1], 0.6 + 0.1 * (seeds - 1), trivial=TRIVIAL)
    report = reported(comparison, lambda run: 0.5 + 0.1 * run.seed + 0.1 * (run.method.text == "ad-drop"))
    (row,) = table(report, "Differences to finetune")
    empty = ("95 % over seeds", "p", "p (Holm)", "detectable")
    assert [row[name] for name in ("difference", *empty)] == ["+0.1000", *[cell] * 4]
    assert (table(report, "Scores")[0]["SD"] == "1 seed") == (seeds == 1)
    assert "majority class" not in report  # not all runs have measured it
    assert "collapsed" not in report  # the networks predict several classes


def test_no_cell_is_empty(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", equal_time=False)
    dev = {"accuracy": 0.5, "loss": 1.0, "calibration_error": None}
    for run in comparison.runs():
        write(run, 0.5, dev=dev, peak_memory_bytes=0, trivial=TRIVIAL)
    report = reported(comparison)
    rows = [line for line in report.splitlines() if line.startswith("|")]
    assert len(rows) > 12
    assert not [line for line in rows if any(not cell.strip() for cell in line.strip("|").split("|"))]
    assert table(report, "Cost")[0]["memory ratio"] == "not measured"
    assert np.all([row["calibration error"] == "none" for row in table(report, "Fit")])


@pytest.mark.parametrize(
    ("mine", "others", "says", "then"),
    [
        ([0.8, 0.82, 0.81], [0.7, 0.71, 0.72], r"ad-drop scores 0.1000 above finetune \(95 % interval .0.0\d+ to .*\)\.$", "To use ad-drop, .* seed, 1: `attnreg recipe ad-drop --seed 1`"),
        ([0.7, 0.76, 0.71], [0.71, 0.72, 0.73], r"^Not significant \(3 seeds can detect 0\.1\)\. 12 seeds would detect about 0\.02\d?\.$", "To use finetune, .* --seed 2`"),
        ([0.7], [0.6], "^One seed is no evidence: repeat the command with --seeds 5 or more.$", ""),
        ([0.5, 0.55], [0.55, 0.54], "^No method learned the task: train for more epochs, or on more rows.$", ""),
        ([0.65, 0.67, 0.69], [0.55, 0.57, 0.59], r"ad-drop differs by \+0\.1000 from finetune with every seed; a t-test needs differences that vary\.$", ""),
        ([0.7, 0.7], [0.7, 0.7], r"^Not significant \(all scores equal those of finetune\)\.$", "To use finetune"),
    ],
)  # fmt: skip
def test_a_report_opens_with_what_was_found(tmp_path, mine, others, says, then):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", seeds=len(mine), equal_time=False)
    scores = {"finetune": others, "ad-drop": mine}
    with comparison.begun():
        printed, last, *_ = write_report(
            written(comparison, lambda run: scores[run.method.text][run.seed], trivial=TRIVIAL)
        )
    assert re.search(says, printed), printed
    assert re.search(then, str(last)), last
    assert reported(comparison).index(printed) < reported(comparison).index("```")


def test_what_several_methods_could_have_shown_is_before_correction(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", "sam", seeds=3, equal_time=False)
    with comparison.begun():
        printed, *_ = write_report(written(comparison, lambda run: 0.7 + len(run.method.text) * run.seed / 1000))
    assert re.search(
        r"^Not significant: ad-drop, sam \(3 seeds can detect 0\.\d+, before correction\)\. 12 seeds would detect about 0\.\d+\.$",
        printed,
    ), printed


def test_a_score_that_is_no_number_has_no_deviation():
    runs = [SimpleNamespace(seed=0), SimpleNamespace(seed=1)]
    known = [SimpleNamespace(name="a", scores=[0.5, each], trivial=None, runs=runs) for each in (0.7, math.nan)]
    assert [row[1:3] for row in tables.scores(known, known[0]).rows] == [["0.6000", "0.1414"], ["nan", "nan"]]


@pytest.mark.parametrize("scores", [(math.nan, 0.4, 0.3), (0.3, math.nan, 0.4)])
def test_a_search_ranks_a_score_that_is_no_number_last(scores):
    trials = [Trial(number, None, [score], "complete") for number, score in enumerate(scores)]
    assert best(trials).mean == 0.4


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Warning: tiny.\n", "stopped without an error, as if it was killed"),
        ("Traceback (most recent call last):\nOSError: no\n", "OSError: no"),
    ],
)
def test_why_a_run_has_no_result(tmp_path, log, reason):
    (run,) = comparison_of(tmp_path, "finetune", seeds=1).runs()
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.log.write_text(log)
    assert run.failure == reason


def unfinished(tmp_path):
    """Seeds 0 to 2 of the baseline, seeds 1 and 2 of one method, nothing of the others."""
    comparison = comparison_of(tmp_path, "finetune", "ad-drop", "attention-dropout", "r-drop --alpha {1,5}", seeds=4)
    scores = {"finetune": {0: 0.5, 1: 0.6, 2: 0.55}, "ad-drop": {1: 0.65, 2: 0.61}}
    with comparison.begun():
        for run in comparison.runs():
            if (score := scores.get(run.method.text, {}).get(run.seed)) is not None:
                write(run, score)
        failed = comparison.final_runs(comparison.methods[1])[3]
        failed.log.write_text("some\nError: The loss is nan.\nmore\n")
        write_report(comparison)
    return comparison


def test_what_has_finished_is_reported_and_what_is_missing_is_named(tmp_path):
    report = (unfinished(tmp_path).folder / "report.md").read_text()
    seeds = {"finetune": 3, "ad-drop": 2, "attention-dropout": 0, "r-drop --alpha {1,5}": 0}
    for says in ("Incomplete: 5 of 14 runs have finished.", *(f"{name}: {n} of 4 seeds." for name, n in seeds.items())):
        assert says in report
    assert "No result: ad-drop, final, seed 3: Error: The loss is nan." in report
    (row,) = table(report, "Differences to finetune")
    assert (row["method"], row["difference"]) == ("ad-drop", f"{np.mean([0.65 - 0.6, 0.61 - 0.55]):+.4f}")
    assert [row["method"] for row in table(report, "Scores")] == ["finetune", "ad-drop"]


def test_without_the_baseline_there_are_scores_and_without_any_run_there_is_no_report(tmp_path):
    comparison = unfinished(tmp_path)
    shutil.rmtree(comparison.folder / "finetune")
    write_report(comparison)
    report = (comparison.folder / "report.md").read_text()
    assert "## Differences" not in report
    assert [row["method"] for row in table(report, "Scores")] == ["ad-drop"]
    shutil.rmtree(comparison.folder / "ad-drop")
    (comparison.folder / "report.md").unlink()
    assert write_report(comparison) == []
    assert not (comparison.folder / "report.md").exists()


def test_a_method_that_fails_costs_only_itself(cli, warm, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "subprocess", started_by(warm))
    small = ["--epochs", 1, "--train-size", 64, "--device", "cpu", "--seeds", 2, "--no-equal-time", "--jobs", 1]
    result = cli("compare", "bad=finetune --max-length 100", "finetune", *small, "--output-dir", "study")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    says = "Error: 1 of the runs failed. The log of the first, study/bad/seed0.log, ends with: Error: "
    assert result.stderr.startswith(says)
    report = (tmp_path / "study" / "report.md").read_text()
    assert "No result: bad, final, seed 0: Error: Expected --max-length of at most 64 for this model, got 100" in report
    assert table(report, "Scores")[0]["method"] == "finetune"
    assert not (tmp_path / "study" / "bad" / "seed1.log").exists()  # it would fail in the same way


def test_the_report_shows_names_and_tells_options(tmp_path):
    comparison = comparison_of(tmp_path, "plain=finetune", HIGH, TRIED, options={"epochs": 2})
    with comparison.begun():
        score, slow = lambda run: 0.6 + 0.05 * run.seed * ("0.2" in run.method.text), {"seconds": 20.0}
        while not all(run.finished for run in comparison.runs()):
            written(comparison, score, lambda run: slow if run.method.name == "high" else {}).decide()
    folders = {run.folder.parent.relative_to(comparison.folder).as_posix() for run in comparison.runs()}
    assert folders == {"plain", "high", "search/tried=0.1", "search/tried=0.2", "tried=0.2", "plain--epochs4"}
    with keeping(draw=True) as figures:
        (_, _, scores, differences) = write_report(comparison)
    assert [row[0] for row in scores.rows] == ["plain", "high", "tried"]
    assert [row[0] for row in differences.rows] == ["high", "tried"]
    shown = [label.get_text() for label in figures["seeds"].axes[0].get_yticklabels()]
    assert shown == ["plain", "high", "tried", "plain --epochs 4"]
    report = (comparison.folder / "report.md").read_text()
    given = {row["method"]: row["as given"] for row in table(report, "Options")}
    assert given == {"plain": "finetune", "high": "ad-drop --p 0.3", "tried": TRIED.partition("=")[2]}
    assert f"'{HIGH}' '{TRIED}'" in report  # the command
    assert "--baseline plain" in report
    assert re.findall(r"^\| (tried=\S+) ", report, re.M) == ["tried=0.1", "tried=0.2"]


def test_a_search_comes_first_and_its_best_is_run(tmp_path):
    text, means = "ad-drop --p {0.1,0.3,0.5} --method gradient --q={0.1,0.3}", [0.5, 0.6, 0.7, 0.8, 0.55, 0.65]
    comparison = comparison_of(tmp_path, "finetune", text, search_seeds=2, equal_time=False)
    runs, method = comparison.runs(), comparison.methods[1]
    assert [run.role for run in runs] == ["final"] * 2 + ["search"] * 12
    assert [(run.role, run.seed) for run in launch.in_turn(runs)] == [
        *[("search", 1000)] * 6, *[("search", 1001)] * 6, ("final", 0), ("final", 1)
    ]  # fmt: skip
    assert all("--validation-rows" in run.arguments for run in runs[2:])
    assert {run.seed for run in runs[2:]} == {1000, 1001}
    for run in runs[2:]:
        write(run, means[method.variants.index(run.method)] + (0.02 if run.seed == 1000 else -0.02))
    assert comparison.chosen(method).text == "ad-drop --p 0.3 --method gradient --q=0.3"
    assert [run.method for run in comparison.runs()][-2:] == [comparison.chosen(method)] * 2


def test_seeds_begin_where_they_are_told_to_and_never_meet_those_of_a_search(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "attention-dropout", first_seed=30)
    comparison.check_methods()
    assert [run.seed for run in comparison.runs()] == [30, 31, 30, 31]
    assert [run.seed for run in launch.in_turn(comparison.runs())] == [30, 30, 31, 31]
    assert "--seeds 2 --first-seed 30" in reported(comparison, lambda run: 0.5)
    comparison_of(tmp_path / "none", "finetune", "ad-drop", first_seed=999).check_methods()  # nothing is searched
    searched = [tmp_path / "some", "finetune", "ad-drop --q {0.1,0.3}"]
    for first in (999, 1000, 1001):
        with pytest.raises(UsageError, match="would be tested on the runs that chose them"):
            comparison_of(*searched, search_seeds=2, first_seed=first).check_methods()
    comparison_of(*searched, search_seeds=2, first_seed=1002).check_methods()


def test_the_baseline_is_searched_like_any_other(tmp_path):
    methods = ("finetune --learning-rate {1e-4,2e-4}", "ad-drop --q {0.1,0.3}", "attention-layerdrop")
    comparison = comparison_of(tmp_path, *methods, options={"epochs": 10})
    for run in comparison.runs():
        further = {"mismatched_accuracy": 0.5} if run.role == "final" else {}  # a search scores on less
        score = 0.6 if "2e-4" in run.method.text else 0.5
        write(run, score, dev={"accuracy": score, "loss": 0.5, "calibration_error": 0.1, **further})
    written(comparison, 0.5, lambda run: {"seconds": 20.0} if "ad-drop" in run.method.text else {})
    with comparison.begun():
        longer = [run for run in comparison.runs() if run.role == "equal time"]
        assert {run.method.text for run in longer} == {"finetune --learning-rate 2e-4 --epochs 20"}
        report = reported(comparison)
    assert "did not have the same number of tries: finetune --learning-rate {1e-4,2e-4} (2), ad-drop --q" in report
    assert "10 epochs" in report  # common to all
    assert "learning rate 0.0002" not in report  # the baseline's is not that of the others
    assert "The methods differ in learning rate: see the options below." in report
    told = [row["options"].split(" --")[0] for row in table(report, "Options")]
    assert told == ["--learning-rate 0.0002", "--learning-rate 0.002", "--learning-rate 0.002"]
    rows = read_csv(comparison.folder / "results.csv")
    assert {row["role"] for row in rows} == {"final", "search", "equal time"}
    assert [row["dev_mismatched_accuracy"] for row in rows].count("0.5") == 2  # of attention-layerdrop's two
