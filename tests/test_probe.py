"""The study that probes: its numbers are those of a slow loop, and its table and picture show them."""

import json
import re

import pytest
import torch
import transformers as hf
from sklearn.metrics import accuracy_score

import attnreg
from attnreg.experiments.tasks import get_task, load_data, load_model
from tests.helpers.commands import invoke, ran
from tests.helpers.repository import ROOT
from tests.helpers.runs import keeping


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe") / "out"
    network, tokenizer = load_model(get_task("agreement"))
    torch.manual_seed(0)
    for weight in network.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)  # so that predictions differ, and masks make a difference
    for each in (network, tokenizer):
        each.save_pretrained(folder.with_name("model"))
    args = ["--epochs", 1, "--train-size", 32, "--learning-rate", 1e-6, "--metric", "accuracy"]
    args += ["--p", 0.5, "--q", "0,1", "--target", "label"]
    args += ["--model", folder.with_name("model"), "--output-dir", folder]
    with keeping() as figures:
        result = ran(invoke("recipe", ROOT / "docs/results/attribution/probe.py", *args))
    return folder, result.output, figures["probe"]


def rows_of(folder):
    """The rows of the table in the report: candidates, q, share, score."""
    report = (folder / "report.md").read_text()
    text = report[report.index("while attention is dropped, p = 0.5:") :]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_the_table_agrees_with_a_slow_loop(probed):
    folder, output, _ = probed
    rows = rows_of(folder)
    assert [row[0] for row in rows] == ["none", *["high"] * 2, *["low"] * 2, *["random"] * 2]
    plain = json.loads((folder / "result.json").read_text())["dev"]["accuracy"]
    assert all(score in output for *_, score in rows)
    assert {(share, score) for name, q, share, score in rows if q in ("none", "0")} == {("0.000", f"{plain:.4f}")}
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    _, tokenizer = load_model(get_task("agreement"))
    dev = load_data(get_task("agreement"))[1]["validation"]
    for region in ("high", "low"):
        provider = attnreg.AttributionProvider(0.5, 1.0, target="label", region=region)  # q = 1: no chance is left
        with attnreg.attach(model, provider) as handle, handle.probing():
            predicted = []
            for start in range(0, len(dev), 50):
                batch = dict(tokenizer(dev["sentence"][start : start + 50], return_tensors="pt", padding=True))
                batch["labels"] = torch.tensor(dev["label"][start : start + 50])
                provider.attribute(model, batch)
                with torch.no_grad():
                    predicted += model(**batch).logits.argmax(-1).tolist()
        assert 0.1 < sum(predicted) / len(dev) < 0.9
        (row,) = (row for row in rows if row[:2] == [region, "1"])
        assert float(row[3]) == pytest.approx(accuracy_score(dev["label"], predicted), abs=1.5 / len(dev))
        assert row[3] != f"{plain:.4f}"
        assert 0.2 < float(row[2]) < 0.6


def test_the_picture_shows_the_table(probed):
    folder, _, figure = probed
    assert (folder / "plots" / "probe.png").is_file()
    rows = rows_of(folder)
    for column, axes in ((1, figure.axes[0]), (2, figure.axes[1])):
        plain, *lines = axes.get_lines()
        assert list(plain.get_ydata()) == pytest.approx([float(rows[0][3])] * 2, abs=1e-4)
        assert [line.get_label() for line in lines] == ["high", "low", "random"]
        for line in lines:
            mine = [row for row in rows if row[0] == line.get_label()]
            assert list(line.get_xdata()) == pytest.approx([float(row[column]) for row in mine], abs=1e-3)
            assert list(line.get_ydata()) == pytest.approx([float(row[3]) for row in mine], abs=1e-4)


def test_the_kept_model_is_plain(probed):
    folder, _, _ = probed
    assert not (folder / "provider").exists()
    assert not re.search("attnreg", (folder / "model" / "config.json").read_text())
