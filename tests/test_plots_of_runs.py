"""``attnreg plot`` on runs that differ from the usual: other tasks, a single round, an untrained model."""

import json

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import attnreg
from attnreg.experiments.folder.reader import RunReader
from attnreg.experiments.results.plots.attention import plot_attention
from attnreg.experiments.results.plots.run import plot_run
from tests import task_data
from tests.commands import invoke, ran
from tests.test_plots import keeping


def lines_with_points(axes):
    """The lines of a plot that can be seen: a marker, or at least two points."""
    drawn = [line for line in axes.lines if len(line.get_xdata())]
    return [line for line in drawn if line.get_marker() not in ("None", None) or len(line.get_xdata()) > 1], drawn


def ticks(axes):
    """The ticks of the x axis within its limits."""
    low, high = axes.get_xlim()
    return [tick for tick in axes.get_xticks() if low <= tick <= high]


def test_a_run_of_multiple_choice(tmp_path):
    data = task_data.write(tmp_path / "data", train=16, validation=16, maker=task_data.endings)
    rows = [json.loads(line) for line in (data / "validation.jsonl").read_text().splitlines()]
    for row in rows:
        row["ending3"] += " far far"  # the other choices are padded
    task_data.write_rows(data / "validation.jsonl", rows)
    torch.manual_seed(0)  # a model with attributions to padding, among others
    model = task_data.tiny_bert(tmp_path / "model")
    args = ["--task", "swag", "--data-dir", data, "--model", model, "--max-length", 32, "--batch-size", 8]
    ran(invoke("recipe", "ad-drop", *args, "--epochs", 2, "--device", "cpu", "--output-dir", tmp_path / "run"))
    with keeping() as figures:
        ran(invoke("plot", tmp_path / "run"))
    panels = [axes for axes in figures["attention"].axes if axes.images and axes.get_title()]
    attention, attribution, *_ = (axes.images[0].get_array().data for axes in panels)
    tokens = [label.get_text() for label in panels[0].get_xticklabels()]
    assert tokens[-1] == "[SEP]"  # no padding
    assert attention.shape == (len(tokens), len(tokens))
    assert attention.sum(-1) == pytest.approx(1.0)
    assert np.abs(attribution).max(-1) == pytest.approx(1.0)  # only the predicted choice has attributions


@pytest.fixture(scope="module")
def one_round(tmp_path_factory):
    """The figures of a game of one round, in one epoch."""
    folder = tmp_path_factory.mktemp("one") / "run"
    args = ["--round-steps", 2, "--epochs", 1, "--train-size", 64, "--batch-size", 32, "--warmup", 0, "--game", 1]
    ran(invoke("recipe", "attendout", *args, "--no-baseline", "--device", "cpu", "--output-dir", folder))
    assert len(RunReader(folder).rounds) == 1
    with keeping() as figures:
        plot_run(folder)
    return figures


@pytest.mark.parametrize("name", ["convergence", "drop_rates", "game"])
def test_a_single_round_is_seen(one_round, name):
    for axes in one_round[name].axes:
        seen, drawn = lines_with_points(axes)
        assert drawn
        assert seen == drawn


@pytest.mark.parametrize(("name", "expected"), [("convergence", [2]), ("drop_rates", [2]), ("game", [1])])
def test_steps_and_rounds_are_whole_numbers(one_round, name, expected):
    for axes in one_round[name].axes:
        assert ticks(axes) == expected


OWN = """
import attnreg
from attnreg.experiments import recipe


class Own(attnreg.DropHead):
    pass


@recipe("own")
def own(run):
    run.report(run.train(provider=Own(0.2)))
"""


def test_a_plot_that_cannot_be_drawn_is_left_out(cli, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    ran(cli("recipe", "own.py", "--epochs", 1, "--train-size", 64, "--device", "cpu", "--output-dir", "run"))
    result = ran(cli("plot", "run"))
    assert result.stdout.split() == ["run/plots/drop_rates.png", "run/plots/convergence.png"]
    assert result.stderr == (
        "No attention.png: own.Own is a class of your own: only one given as `--provider FILE.py:CLASS` is loaded again.\n"
    )


def test_attention_of_an_untrained_model_is_not_black(tmp_path):
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertForSequenceClassification(config)
    batch = {"input_ids": torch.arange(1, 9)[None], "labels": torch.tensor([1])}
    with keeping() as figures:
        plot_attention(model, batch, list("abcdefgh"), attnreg.DropKey(0.1), tmp_path / "attention.png")
    axes = figures["attention"].axes[0]
    (image,) = axes.images
    assert image.get_array().data == pytest.approx(1 / 8, abs=0.01)
    shade = image.to_rgba(image.get_array())[..., :3].mean()
    assert 0.4 < shade < 0.9  # grey
    assert list(image.to_rgba([0.0, 1.0])[:, 0]) == [1.0, 0.0]  # the whole range of weights, in every picture
    assert axes.get_title() == "attention (square-root scale)"
