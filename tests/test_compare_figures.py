"""The figures of a comparison: they show what the runs wrote down, on the screen and for print."""

import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.results.plots.comparison import plot_confusion, plot_forest, plot_search, plot_seeds
from attnreg.experiments.tasks.metrics import METRICS
from tests.test_compare_study import LABELS, comparison_of, reported, table, write
from tests.test_plots import keeping

SEEDS = 3
NAMES = ["finetune", "ad-drop", "attention-dropout"]


def logits_of(number, seed):
    """Made-up logits of a hundred dev rows, over two classes."""
    return np.random.default_rng([number, seed]).normal(size=(100, 2)).round(3)


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
    """A finished comparison, its figures, its report as Markdown and as HTML."""
    comparison = comparison_of(tmp_path_factory.mktemp("compared"), *NAMES, seeds=SEEDS, equal_time=False)
    for run in comparison.runs():
        number = NAMES.index(run.method.text)
        score = 0.7 + 0.02 * run.seed * number
        best = {"network": "model", "epoch": 3, "accuracy": score}
        write(run, score, classes=["no", "yes"], best_epoch=best)
        pairs = zip(LABELS, logits_of(number, run.seed), strict=True)
        rows = [{"label": label, "prediction": int(row.argmax()), "logits": row.tolist()} for label, row in pairs]
        files = {
            "predictions": rows,
            "metrics": metrics_of(number, run.seed),
            "telemetry": telemetry_of(number, run.seed),
        }
        for name, lines in files.items():
            (run.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with keeping() as figures:
        write_report(comparison)
    return (
        comparison,
        figures,
        (comparison.folder / "report.md").read_text(),
        (comparison.folder / "report.html").read_text(),
    )


def test_each_figure_has_its_files(compared):
    comparison, _, report, page = compared
    names = ["differences", "seeds", "learning", "confusion", "reliability"]
    assert re.findall(r"\]\(plots/(\w+)\.png\)", report) == names  # the differences come first
    for name in names:
        begins = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
        for suffix, start in begins.items():
            assert (comparison.folder / "plots" / f"{name}{suffix}").read_bytes().startswith(start)
    assert page.count('src="data:image/png;base64,') == page.count("<img ") == len(names)
    assert re.search(r"@media \(prefers-color-scheme: dark\) \{[^@]*img \{ filter: invert", page)


def test_contents_lead_to_the_headings(compared):
    _, _, report, page = compared
    headings = re.findall(r"^## (.*)$", report, re.M)
    assert headings[:3] == ["Differences to finetune", "Scores", "Learning curves"]
    assert re.findall(r"^- \[(.*)\]\(#", report, re.M) == headings
    links = re.findall(r'<a href="#([^"]+)">', page)
    assert links == re.findall(r'<h2 id="([^"]+)">', page)
    assert len(links) == len(headings) == len(set(links))


def test_lines_of_the_page_do_not_end_within_an_option(tmp_path, undrawn):
    comparison = comparison_of(tmp_path, "finetune", "ad-drop --p 0.3 --first-pass train", equal_time=False)
    reported(comparison)
    page = (comparison.folder / "report.html").read_text()
    name = '<span class="word">ad-drop</span> <span class="word">--p</span> 0.3 <span class="word">--first-pass</span>'
    assert f'<td class="text">{name} train</td>' in page
    assert re.search(r'<td class="text long">.*<span class="word">--first-pass</span> train', page)
    assert f"<h1>finetune, {name} train on agreement: " in page
    assert "pre { background: var(--code); padding: .6rem; white-space: pre-wrap; }" in page


def test_the_forest_has_the_differences_of_the_table(compared):
    _, figures, report, _ = compared
    (axes,) = figures["differences"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES[1:]
    bars = [line for line in axes.lines if line.get_linestyle() == "-" and len(set(line.get_ydata())) == 1]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    rows = table(report, "Differences to finetune")
    for row, bar, point in zip(rows, bars, points, strict=True):
        low, high = (float(end) for end in row["95 % over seeds"].strip("[]").split(","))
        assert bar.get_xdata() == pytest.approx((low, high), abs=1e-4)
        assert point.get_xdata() == pytest.approx([float(row["difference"])], abs=1e-4)
    low, high = axes.get_xlim()
    assert low == -high


def test_curves_are_means_over_seeds_of_the_returned_network(compared):
    _, figures, _, _ = compared
    score, training, loss = figures["learning"].axes
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
    assert [text.get_text() for text in figures["learning"].legends[0].get_texts()] == NAMES


def test_confusion_is_that_of_the_predictions(compared):
    _, figures, report, _ = compared
    found = table(report, "Classes")
    for number, axes in enumerate(figures["confusion"].axes):
        predicted = [logits_of(number, seed).argmax(1) for seed in range(SEEDS)]
        counts = sum(confusion_matrix(LABELS, each) for each in predicted)
        shares = counts / counts.sum(1, keepdims=True)
        assert np.array(axes.images[0].get_array()) == pytest.approx(shares)
        assert [text.get_text() for text in axes.texts] == [f"{share:.2f}" for share in shares.ravel()]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["no", "yes"]
        each = np.mean([precision_recall_fscore_support(LABELS, one)[:3] for one in predicted], axis=0)
        for name, scores in zip(["no", "yes"], each.T, strict=True):
            row = next(row for row in found if (row["method"], row["class"]) == (NAMES[number], name))
            assert [row[key] for key in ("precision", "recall", "F1")] == [f"{score:.3f}" for score in scores]
            assert row["dev rows"] == "50"


def test_reliability_is_that_of_the_logits(compared):
    _, figures, _, _ = compared
    (axes,) = figures["reliability"].axes
    for number, line in enumerate(axes.lines[1:]):
        logits = np.concatenate([logits_of(number, seed) for seed in range(SEEDS)])
        confidence = np.exp(logits).max(1) / np.exp(logits).sum(1)
        right = logits.argmax(1) == LABELS * SEEDS
        expected = [
            (confidence[inside].mean(), right[inside].mean())
            for low in range(15)
            if (inside := (confidence > low / 15) & (confidence <= (low + 1) / 15)).any()
        ]
        assert np.transpose(line.get_data()) == pytest.approx(np.array(expected))


def test_intervals_end_where_the_metric_does(tmp_path, undrawn):
    scores = {"a": [0.5, 0.99], "b": [-0.9, 0.9]}
    for metric in ("accuracy", "matthews_correlation"):
        low, high = METRICS[metric].bounds
        with keeping() as figures:
            plot_seeds(scores, metric, tmp_path / "seeds.png", bounds=(low, high))
            plot_forest({"a": (0.1, -9.0, 9.0)}, "b", metric, tmp_path / "forest.png", largest=high - low)
        bars = figures["seeds"].axes[0].collections
        ends = [tuple(bar.get_segments()[0][:, 0]) for bar in bars]
        half = [stats.sem(each) * stats.t.ppf(0.975, 1) for each in scores.values()]
        assert ends[0] == pytest.approx((max(low, 0.745 - half[0]), high))
        assert ends[1] == pytest.approx((max(low, -half[1]), min(high, half[1])))
        bar = next(line for line in figures["forest"].axes[0].lines if list(line.get_ydata()) == [0, 0])
        assert list(bar.get_xdata()) == [low - high, high - low]
    assert METRICS["accuracy"].bounds == (0, 1)
    assert METRICS["matthews_correlation"].bounds == METRICS["pearson"].bounds == (-1, 1)


def test_nothing_is_cut_off(tmp_path, monkeypatch):
    cut = []

    def drawn(figure, path, **options):
        figure.draw_without_rendering()
        texts = [text for one in figure.axes for text in (one.title, one.xaxis.label, one.yaxis.label)]
        texts += [
            text for one in figure.axes if one.images for text in (*one.get_xticklabels(), *one.get_yticklabels())
        ]
        boxes = {text.get_text(): text.get_window_extent() for text in texts if text.get_text()}
        cut.append([text for text, box in boxes.items() if min(box.min) < 0 or (box.max > figure.bbox.max).any()])
        path.touch()

    monkeypatch.setattr(Figure, "savefig", drawn)
    plot_confusion({name: np.ones((2, 2), int) for name in NAMES}, ["unacceptable", "acceptable"], tmp_path / "a.png")
    plot_search({"--p": ["0.1", "0.3"], "--q": ["0.1", "0.3"]}, [0.0, 0.1, 0.2, 0.3], 1, "matthews_correlation", 3, tmp_path / "b.png")  # fmt: skip
    names = {"agreement-train_size=200": (0.1, 0.0, 0.2), "attention-dropout --drop-rate 0.1 --placement weights": (0.1, 0.0, 0.2)}  # fmt: skip
    plot_forest(names, "finetune --learning-rate 1e-4 --epochs 20", "matthews correlation or accuracy", tmp_path / "c.png")  # fmt: skip
    assert cut == [[]] * 9


def test_a_task_without_classes_has_no_figures_of_classes(tmp_path, undrawn):
    comparison = comparison_of(tmp_path, *NAMES[:2], equal_time=False)
    for run in comparison.runs():
        write(run, 0.5 + 0.1 * run.seed, dev={"accuracy": 0.5, "loss": 0.5, "calibration_error": None})
        rows = [{"label": float(n), "prediction": n + 0.5} for n in range(9)]
        (run.folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = reported(comparison)
    assert re.findall(r"\]\(plots/(\w+)\.png\)", report) == ["differences", "seeds"]
    assert "There are no learning curves: dev was scored in a single epoch" in report
