"""The search of a comparison, with runs that are written down here."""

import csv

import numpy as np
import pytest

from attnreg.errors import UsageError
from tests.test_compare_study import comparison_of, reported, table, write
from tests.test_plots import keeping

pytestmark = pytest.mark.usefixtures("undrawn")


def test_a_search_comes_first_and_its_best_is_run(tmp_path):
    comparison = comparison_of(
        tmp_path, "finetune", "ad-drop --p {0.2,0.4} --q {0.1,0.3}", search_seeds=2, equal_time=False
    )
    runs = comparison.runs()
    assert [run.role for run in runs] == ["final"] * 2 + ["search"] * 8
    assert all("--validation-rows" in run.arguments for run in runs[2:])
    assert {run.seed for run in runs[2:]} == {1000, 1001}
    best = {"ad-drop --p 0.4 --q 0.1": (0.9, 0.5), "ad-drop --p 0.2 --q 0.3": (0.6, 0.7)}
    for run in runs[2:]:
        write(run, best.get(run.method.text, (0.6, 0.6))[run.seed - 1000])
    assert comparison.chosen(comparison.methods[1]).text == "ad-drop --p 0.4 --q 0.1"
    assert [run.method.text for run in comparison.runs()][-2:] == ["ad-drop --p 0.4 --q 0.1"] * 2


def search_of(tmp_path, text, scores):
    """A finished comparison in which the tries of a method scored as given."""
    comparison = comparison_of(tmp_path, "finetune", text, search_seeds=2, equal_time=False)
    method = comparison.methods[1]
    for run in comparison.search_runs(method):
        mean = scores[method.variants.index(run.method)]
        write(run, mean + (0.02 if run.seed == 1000 else -0.02))
    with keeping() as figures:
        reported(comparison)
    return comparison, figures


def test_a_search_over_two_options_is_a_heat_map(tmp_path):
    text, scores = "ad-drop --p {0.1,0.3,0.5} --method gradient --q={0.1,0.3}", [0.5, 0.6, 0.7, 0.8, 0.55, 0.65]
    comparison, figures = search_of(tmp_path, text, scores)
    (path,) = (comparison.folder / "plots").glob("search-*.png")
    map_, bar = figures[path.stem].axes
    assert np.array(map_.images[0].get_array()) == pytest.approx(np.array(scores).reshape(3, 2))
    assert [each.get_text() for each in map_.texts] == [f"{score:.3f}" for score in scores]
    for axis, label, values in ((map_.yaxis, "--p", "0.1 0.3 0.5"), (map_.xaxis, "--q", "0.1 0.3")):
        assert axis.get_label_text() == label
        assert " ".join(each.get_text() for each in axis.get_ticklabels()) == values
    (frame,) = map_.patches  # around the best: p = 0.3 in row 1, q = 0.3 in column 1
    center = frame.get_x() + frame.get_width() / 2, frame.get_y() + frame.get_height() / 2
    assert center == pytest.approx((1, 1))
    assert bar.get_ylabel() == "accuracy\non held-out rows\n(mean over 2 seeds)"
    assert f"](plots/{path.name})" in (comparison.folder / "report.md").read_text()
    page = (comparison.folder / "report.html").read_text()
    assert f'alt="Search of {text}: ' in page
    assert "the mean score of each try. The framed one was chosen." in page


@pytest.mark.parametrize("text", ["ad-drop --q {0.1,0.3}", "ad-drop --p {0.1,0.3} --q {0.1,0.3} --every {1,2}"])
def test_another_search_has_no_heat_map(tmp_path, text):
    _, figures = search_of(tmp_path, text, [0.5] * 8)
    assert not [name for name in figures if name.startswith("search")]


def test_seeds_begin_where_they_are_told_to_and_never_meet_those_of_a_search(tmp_path):
    comparison = comparison_of(tmp_path, "finetune", "attention-dropout", first_seed=30)
    comparison.check()
    assert [run.seed for run in comparison.runs()] == [30, 31, 30, 31]
    report = reported(comparison, lambda run: 0.5)
    assert "--seeds 2 --first-seed 30" in report
    assert "seeds, from 30" in report
    comparison_of(tmp_path / "none", "finetune", "ad-drop", first_seed=999).check()  # nothing is searched
    for first in (999, 1000, 1001):
        searched = comparison_of(
            tmp_path / "some", "finetune", "ad-drop --q {0.1,0.3}", search_seeds=2, first_seed=first
        )
        with pytest.raises(UsageError, match="would be tested on the runs that chose them"):
            searched.check()
    comparison_of(tmp_path / "some", "finetune", "ad-drop --q {0.1,0.3}", search_seeds=2, first_seed=1002).check()


def test_the_baseline_is_searched_like_any_other(tmp_path):
    methods = ("finetune --learning-rate {1e-4,2e-4}", "ad-drop --q {0.1,0.3}", "attention-layerdrop")
    comparison = comparison_of(tmp_path, *methods, options={"epochs": 10})
    for run in comparison.runs():
        further = {"mismatched_accuracy": 0.5} if run.role == "final" else {}  # a search scores on less
        score = 0.6 if "2e-4" in run.method.text else 0.5
        write(run, score, dev={"accuracy": score, "loss": 0.5, "calibration_error": 0.1, **further})
    for run in comparison.runs():
        if not run.finished:
            write(run, 0.5, 20.0 if "ad-drop" in run.method.text else 10.0)
    comparison.folder.mkdir(exist_ok=True)
    with comparison.begun():
        longer = [run for run in comparison.runs() if run.role == "equal time"]
        assert {run.method.text for run in longer} == {"finetune --learning-rate 2e-4 --epochs 20"}
        report = reported(comparison)
    assert (
        "did not have the same number of tries: finetune --learning-rate {1e-4,2e-4} (2), ad-drop --q {0.1,0.3} (2), "
        "attention-layerdrop (1)." in report
    )
    assert "10 epochs" in report  # common to all
    assert "learning rate 0.0002" not in report  # the baseline's is not that of the others
    assert "The methods differ in learning rate: see the options below." in report
    told = [row["options"].split(" --")[0] for row in table(report, "Options")]
    assert told == ["--learning-rate 0.0002", "--learning-rate 0.002", "--learning-rate 0.002"]
    with (tmp_path / "study" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["role"] for row in rows} == {"final", "search", "equal time"}
    assert [row["dev_mismatched_accuracy"] for row in rows].count("0.5") == 2  # of attention-layerdrop's two
