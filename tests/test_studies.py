"""Built-in studies, and what options beside a study file change."""

import numpy as np
import pytest
from scipy import stats

from attnreg.errors import InputError
from attnreg.experiments.compare.report.study import write_study_report
from attnreg.experiments.compare.study import change, read_study
from attnreg.experiments.options.catalogue import study_files
from tests.test_compare_study import table, write
from tests.test_study_file import file_of

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("name", study_files())
def test_each_built_in_study_can_be_planned(name, tmp_path):
    assert name == "ladder" or read_study(study_files()[name]).published  # the others are of the papers
    options = {"data_dir": str(tmp_path)} if name == "ladder" else {}
    for task in ("sst2_sentences", "cr", "subj", "trec"):
        (tmp_path / task).mkdir()
    for comparison in read_study(study_files()[name], tmp_path / "out", options, small=True).comparisons.values():
        comparison.check()
        assert len(comparison.runs()) <= 5 * len(comparison.methods)


CONTENT = {
    "methods": {"plain": "finetune", "high": "ad-drop --p {0.1,0.3,0.5} --layers 0,1"},
    "tasks": [
        {"task": "cola", "name": "cola-a", "model": "a", "epochs": 9, "published": {"plain": {"dev": 50}}},
        {"task": "cola", "name": "cola-b", "model": "b", "epochs": 9},
        {"task": "ptb-pos", "model": "b"},
    ],
    "options": {"batch-size": 8},
    "score_on": [{"task": "hans"}],
    "report_on": "hans",
    "seeds": 5,
}


def test_small_changes_sizes_and_leaves_the_file_alone():
    whole, notes = change(CONTENT, {"epochs": 3}, small=True)
    assert whole["methods"] == ["plain=finetune", "high=ad-drop --p {0.1,0.5} --layers 0,1"]
    assert whole["seeds"] == 1
    assert [entry.get("epochs", whole["options"]["epochs"]) for entry in whole["tasks"]] == [3, 3, 3]
    assert (whole["options"]["train_size"], whole["options"]["batch_size"]) == (128, 16)
    assert "nothing else: one seed, --train-size 128" in notes[0]
    assert notes[1] == "Changed from the study file: --epochs 3."
    assert CONTENT["tasks"][0]["epochs"] == 9
    assert change(CONTENT, {}, small=False) == (CONTENT, [])


def test_other_text_to_score_on_is_not_the_further_data_of_a_task():
    content = {**CONTENT, "tasks": [{"task": "cola", "score_on": [{"split": "test"}]}]}
    whole, _ = change(content, {"score_on": "text.txt"}, small=False)
    assert (whole["tasks"], whole["options"]["score_on"]) == (content["tasks"], "text.txt")


def test_a_task_is_chosen_or_replaces_all():
    for task, names in (("cola", ["cola-a", "cola-b"]), ("cola-b", ["cola-b"]), ("agreement", [None])):
        whole, _ = change(CONTENT, {"task": task}, small=False)
        assert [entry.get("name") for entry in whole["tasks"]] == names
    content = {**CONTENT, "tasks": [{"task": "cola", "score_on": [{"split": "test"}]}]}  # not other text to score on
    whole, _ = change(content, {"score_on": "text.txt"}, small=False)
    assert (whole["tasks"], whole["options"]["score_on"]) == (content["tasks"], "text.txt")


def test_each_task_has_its_folder_and_one_model(tmp_path):
    (tmp_path / "ptb_pos").mkdir()
    whole, notes = change(CONTENT, {"data_dir": str(tmp_path), "model": "m"}, small=False)
    assert whole["tasks"] == [{"task": "ptb-pos", "model": "m", "data_dir": str(tmp_path / "ptb_pos")}]
    assert [note.partition(", because")[0] for note in notes[1:3]] == ["Left out", "Left out"]
    assert notes[1].endswith("cola.")
    assert notes[3] == "The report is on dev, since there is no hans for all tasks."
    (tmp_path / "cola").mkdir()
    whole, _ = change(CONTENT, {"data_dir": str(tmp_path), "model": "m"}, small=False)
    assert [entry.get("name") for entry in whole["tasks"]] == ["cola-a", None]
    own = {"score_on": [], "report_on": None, "tasks": [{"task": "custom", "name": name} for name in ("cola", "subj")]}
    whole, notes = change({**CONTENT, **own}, {"data_dir": str(tmp_path)}, small=False)
    assert whole["tasks"] == [{"task": "custom", "name": "cola", "data_dir": str(tmp_path / "cola")}]
    assert any(note.endswith("subj.") for note in notes)
    with pytest.raises(InputError, match=r"no folder for any task of the study \(cola, ptb-pos\)"):
        change(CONTENT, {"data_dir": str(tmp_path / "other")}, small=False)


def test_published_figures_stand_beside_the_measured_ones(tmp_path):
    figures = {"plain": {"dev": 61.25, "test": 60}, "high": {"dev": 63.5}}
    tasks = [{"published": figures}, {"name": "b", "published": {"plain": {"dev": 50}}, "measured": "loss"}]
    path = file_of(tmp_path, seeds=2, first_seed=0, published="A paper, Table 1.", tasks=tasks)
    study = read_study(path, tmp_path / "out", {"epochs": 2})
    for comparison in study.comparisons.values():
        for run in comparison.final_runs(comparison.baseline):
            write(run, 0.6 + 0.02 * run.seed)
    write_study_report(study)
    report = (study.folder / "report.md").read_text()
    rows = [tuple(row.values()) for row in table(report, "Published figures")]
    assert rows == [
        ("agreement", "plain", "dev", "61.2", "61.0", "2"),
        ("agreement", "plain", "test", "60.0", "not scored", "0"),
        ("agreement", "high", "dev", "63.5", "not run", "0"),
        ("b", "plain", "dev", "50.0", "39.0", "2"),
    ]
    assert "A paper, Table 1." in report
    assert "Changed from the study file: --epochs 2." in report


def test_others_are_compared_with_the_best_rung(tmp_path):
    values = "--learning-rate {1e-4,2e-4}"
    methods = {"low": f"finetune {values}", "high": f"few-sample {values}", "new": "sam"}
    changes = {"methods": methods, "baseline": "low", "primary": None, "rungs": ["low", "high"]}
    study = read_study(file_of(tmp_path, tasks=[{}], **changes), tmp_path / "out")
    (comparison,) = study.comparisons.values()
    low, high, new = comparison.methods
    assert comparison.best_of(study.rungs) is None
    held_out = {"low": 0.6, "high": 0.7}  # though it scores lower on dev
    for method in (low, high):
        for number, run in enumerate(comparison.search_runs(method)):
            write(run, held_out[method.name] - 0.1 * number)
    scores = {"low": [0.8, 0.9, 0.85], "high": [0.5, 0.52, 0.57], "new": [0.6, 0.67, 0.68]}
    for method in (low, high, new):
        for run, score in zip(comparison.final_runs(comparison.chosen(method)), scores[method.name], strict=True):
            write(run, score)
    write_study_report(study)
    (row,) = table((study.folder / "report.md").read_text(), "Against the best rung")
    gaps = np.subtract(scores["new"], scores["high"])
    half = stats.t.ppf(0.975, 2) * gaps.std(ddof=1) / 3**0.5
    interval = f"[{gaps.mean() - half:+.4f}, {gaps.mean() + half:+.4f}]"
    assert [*row.values()][:6] == ["agreement", "new", "high", "1.00", f"{gaps.mean():+.4f}", interval]
    assert float(row["p"]) == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue, abs=1e-4)


def test_further_data_keeps_its_name_in_another_folder(tmp_path):
    """The folder of a task with a dash in its name has an underscore; scores are still reported by the task's name."""
    for name in ("mrpc", "paws_x"):
        (tmp_path / name).mkdir()
    path = file_of(tmp_path, tasks=[{"task": "mrpc"}], score_on=[{"task": "paws-x"}], report_on="paws-x")
    study = read_study(path, None, {"data_dir": str(tmp_path)})
    ((scoring,),) = study.score_on.values()
    assert (scoring.name, scoring.data_dir, study.report_on) == ("paws-x", str(tmp_path / "paws_x"), "paws-x")
