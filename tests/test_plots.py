"""Pictures: what they show is what the run wrote down."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.results.plots.attention import plot_attention, show_tokens
from attnreg.experiments.results.plots.run import plot_run
from attnreg.experiments.results.plots.style import COLORS, styles
from attnreg.experiments.runs.run import Run
from tests.helpers import task_data
from tests.helpers.commands import assert_sentence, invoke, ran, read_lines
from tests.helpers.learning import bert
from tests.helpers.light import DRAWN
from tests.helpers.runs import keeping

SMALL = ["--epochs", 2, "--train-size", 128, "--validation-rows", 32, "--batch-size", 16, "--device", "cpu"]
RECIPES = {  # with the pictures that there are
    "finetune": ([], ["convergence"]),
    "ad-drop": (["--p", 0.5, "--q", 0.4], ["attention", "convergence", "drop_rates"]),
    "attendout": (["--round-steps", 2, "--game", 1], ["attention", "convergence", "drop_rates", "game"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plotted")
    for name, (options, _) in RECIPES.items():
        ran(invoke("recipe", name, *SMALL, *options, "--output-dir", folder / name))
    return folder


@pytest.fixture
def figures():
    with keeping() as saved:
        yield saved


@pytest.fixture(scope="module")
def drawn(runs):
    """For each run what the command printed, and its figures."""
    pictures = {}
    for name in RECIPES:
        with keeping(draw=name == "attendout") as saved:
            result = ran(invoke("plot", runs / name))
        pictures[name] = result.stdout, saved
    return pictures


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_command_draws_what_there_is(runs, drawn, recipe):
    names = RECIPES[recipe][1]
    assert sorted(line.rpartition("/")[2] for line in drawn[recipe][0].split()) == [f"{name}.png" for name in names]
    for name in names:
        picture = (runs / recipe / "plots" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert (len(picture) > 10_000) == (recipe == "attendout")


def test_drop_rates_are_those_of_the_telemetry(runs, drawn):
    (axes,) = drawn["ad-drop"][1]["drop_rates"].axes
    lines = [line for line in RunReader(runs / "ad-drop").telemetry if line["drop_rate"]]
    assert lines[0]["step"] > 8  # the first epoch drops nothing, and nothing is drawn there
    for layer, line in enumerate(axes.lines):
        assert list(line.get_xdata()) == [record["step"] for record in lines]
        assert list(line.get_ydata()) == [record["drop_rate"][f"encoder.{layer}"] for record in lines]
        assert line.get_label() == f"encoder.{layer}"


def test_the_game_is_that_of_the_rounds(runs, drawn):
    scores, rewards, wins = drawn["attendout"][1]["game"].axes
    rounds = RunReader(runs / "attendout").rounds
    assert list(scores.lines[0].get_ydata()) == [line["attacker_score"] for line in rounds]
    assert list(scores.lines[2].get_ydata()) == [line["defender_score"] for line in rounds]
    won = sum(line["winner"] == "attacker" for line in rounds)
    assert len(scores.lines[1].get_xdata()) == won
    assert len(scores.lines[3].get_xdata()) == len(rounds) - won
    ends = [float(segment[1, 1]) for segment in rewards.collections[0].get_segments()]
    assert ends == [line["reward"] for line in rounds]
    assert list(rewards.lines[-1].get_ydata()) == [line["baseline"] for line in rounds]
    assert list(wins.lines[1].get_ydata()) == [line["attacker_chance"] for line in rounds]


def test_convergence_has_both_networks_and_the_baseline(runs, drawn):
    score = drawn["attendout"][1]["convergence"].axes[2]
    metrics = RunReader(runs / "attendout").metrics
    labels = [line.get_label() for line in score.lines]
    assert labels == ["attendout: defender", "attendout: attacker", "plain fine-tuning"]
    expected = [record["matthews_correlation"] for record in metrics if record["network"] == "attacker"]
    assert list(score.lines[1].get_ydata()) == expected


def test_dropped_positions_are_in_the_region_of_the_highest_attribution(runs, cli, figures):
    assert_sentence(cli("plot", runs / "ad-drop", "--layer", 7), 2, "Expected --layer from 0 to 2")
    cli("plot", runs / "ad-drop", "--layer", 1)
    attention, attribution, region, dropped = (
        axes.images[0].get_array().data for axes in figures["attention"].axes if axes.images and axes.get_title()
    )
    assert attention.sum(-1) == pytest.approx(1.0)
    size = len(attention)
    for row in range(size):
        chosen = region[row].astype(bool)
        if chosen.any():
            assert chosen.sum() == int(np.ceil(0.5 * size))
            assert attribution[row][chosen].min() >= attribution[row][~chosen].max()
        assert not (dropped[row].astype(bool) & ~chosen).any()
    assert dropped.any()
    tokens = [label.get_text() for label in figures["attention"].axes[0].get_xticklabels()]
    assert tokens[0] == "[CLS]"
    assert len(tokens) == size


EIGHT = {"input_ids": torch.arange(1, 9)[None], "labels": torch.tensor([1])}


@pytest.mark.parametrize(
    "provider",
    [attnreg.DropAttention(0.3), attnreg.ConcreteDropout(2, 0.3)],  # factors with rows normalised; and relaxed ones
    ids=lambda provider: type(provider).__name__,
)
def test_what_counts_as_dropped_is_drawn_as_dropped(provider, tmp_path, figures):
    plot_attention(bert(), EIGHT, list("abcdefgh"), provider, tmp_path / "attention.png")
    dropped = figures["attention"].axes[1].images[0].get_array().data
    assert 0 < dropped.mean() < 1


def test_styles_differ_without_colour():
    first = [style for style, _ in zip(styles(), range(7), strict=False)]
    for part in ("linestyle", "marker", "color"):
        assert len({str(getattr(style, part)) for style in first}) == 7
    grey = [0.299 * int(c[1:3], 16) + 0.587 * int(c[3:5], 16) + 0.114 * int(c[5:], 16) for c in COLORS]
    assert grey[0] == 0
    assert len({round(g / 8) for g in grey}) >= 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "config.json").unlink(), "Expected a run folder, got run: it has no config.json"),
        (lambda run: (run / "telemetry.jsonl").write_text("{"), "Cannot read run/telemetry.jsonl as JSON"),
        (lambda run: (run / "telemetry.jsonl").unlink(), "The run in run has not trained yet"),
        (lambda run: (run / "config.json").write_text(json.dumps([])), "Expected a run folder"),
    ],
)
def test_bad_input(runs, cli, tmp_path, change, message):
    left_out = shutil.ignore_patterns("plots", "SHA256SUMS")  # checksums would tell first
    shutil.copytree(runs / "finetune", tmp_path / "run", ignore=left_out)
    change(tmp_path / "run")
    assert_sentence(cli("plot", "run"), 1, message)
    assert not (tmp_path / "run" / "plots").exists()


def test_a_run_of_multiple_choice(tmp_path):
    data = task_data.write(tmp_path / "data", train=16, validation=16, maker=task_data.endings)
    rows = read_lines(data / "validation.jsonl")
    longer = [{**row, "ending3": row["ending3"] + " far far"} for row in rows]  # the other choices are padded
    task_data.write_rows(data / "validation.jsonl", longer)
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


@pytest.mark.parametrize(("name", "expected"), [("convergence", [2]), ("drop_rates", [2]), ("game", [1])])
def test_a_single_round_is_seen_at_a_whole_number(one_round, name, expected):
    for axes in one_round[name].axes:
        lines = [line for line in axes.lines if len(line.get_xdata())]
        assert lines
        assert all(line.get_marker() not in ("None", None) or len(line.get_xdata()) > 1 for line in lines)
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == expected


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
    assert result.stderr.startswith("No attention.png: Cannot load a provider")
    assert "got 'own.Own'; pass your class" in result.stderr


def test_tokens_may_be_dollar_signs(tmp_path):
    plot_attention(bert(), EIGHT, ["$$", *"bcdefg$"], attnreg.DropKey(0.1), tmp_path / "attention.png")
    assert (tmp_path / "attention.png").is_file()


def test_attention_of_an_untrained_model_is_not_black(tmp_path, figures):
    plot_attention(bert(), EIGHT, list("abcdefgh"), attnreg.DropKey(0.1), tmp_path / "attention.png")
    axes = figures["attention"].axes[0]
    (image,) = axes.images
    assert image.get_array().data == pytest.approx(1 / 8, abs=0.01)
    shade = image.to_rgba(image.get_array())[..., :3].mean()
    assert 0.4 < shade < 0.9  # grey
    assert list(image.to_rgba([0.0, 1.0])[:, 0]) == [1.0, 0.0]  # the whole range of weights, in every picture
    assert axes.get_title() == "attention (square-root scale)"


def test_a_run_ends_with_its_pictures(cli, tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(Run, "pictures", DRAWN[0])
    output = ran(cli("recipe", "ad-drop", *SMALL, "--output-dir", "run")).output
    assert "Results saved to run/, pictures to run/plots: drop_rates.png, convergence.png, attention.png." in output
    report = (tmp_path / "run" / "report.md").read_text()
    assert re.findall(r"\]\((plots/\w+\.png)\)", report) == [
        f"plots/{name}.png" for name in ("drop_rates", "convergence", "attention")
    ]
    output = ran(cli("recipe", "finetune", *SMALL, "--output-dir", "plain", "--no-plots")).output
    assert "Results saved to plain/." in output
    assert not (tmp_path / "plain" / "plots").exists()


def test_what_is_dropped_of_the_tokens_of_a_text(runs, cli, undrawn):
    result = ran(cli("plot", runs / "ad-drop", "--tokens", "the boy <sleeps>"))
    header, *rows = [line.split() for line in result.stdout.splitlines() if line[:1] not in ("/", "M")]
    assert header == ["token", "dropped", "encoder.0", "encoder.1", "encoder.2"]
    assert [row[0] for row in rows] == ["[CLS]", "the", "boy", "[UNK]", "sleeps", "[UNK]", "[SEP]"]
    assert any(row[1] != "0%" for row in rows)
    page = (runs / "ad-drop" / "plots" / "tokens.html").read_text()
    assert re.findall(r">([^<>]+)</span>", page) == [row[0] for row in rows]
    assert_sentence(cli("plot", runs / "finetune", "--tokens", "the boy"), 1, "needs a finished run with a regularizer")


def test_the_page_of_tokens_has_the_name_of_its_folder(runs, cli, tmp_path, undrawn):
    run = shutil.copytree(runs / "ad-drop", tmp_path / "p &lt; <b>")
    ran(cli("plot", run, "--tokens", "the boy"))
    assert "<title>p &amp;lt; &lt;b&gt;</title>" in (run / "plots" / "tokens.html").read_text()


def test_texts_that_cannot_be_shown(runs, tmp_path):
    run = RunReader(shutil.copytree(runs / "ad-drop", tmp_path / "run"))
    file = run.folder / "model" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))  # no special tokens
    with pytest.raises(InputError, match="Expected --tokens to be a text, got '', which has no tokens"):
        show_tokens(run, "")
    run.config |= {"task": "custom", "kind": "seq2seq", "text_columns": "text", "label_column": "reply"}
    with pytest.raises(InputError, match="--tokens shows a single text, but custom is a seq2seq task"):
        show_tokens(run, "the boy")
