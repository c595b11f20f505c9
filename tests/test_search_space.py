"""The space of a search, its winner in a comparison, and what is refused."""
# ruff: noqa: F811 (arguments that are fixtures have the names of imported ones)

import json
import re
import sys

import pytest

from attnreg.experiments.compare import launch
from tests.commands import assert_sentence, ran
from tests.test_compare import started_by
from tests.test_compare_study import table
from tests.test_search import HEADS, SMALL, drawn, report, runs, search  # noqa: F401 (two are fixtures)

pytestmark = pytest.mark.usefixtures("undrawn")


def test_options_without_providers(search, runs):
    space = "{recipe: ad-drop, options: {learning-rate: 1e-4..1e-2 log, --q: [0.1, 0.3], p: 0.2}}"
    output = ran(search("--runs", 8, "--seeds", 2, "--space", space)).output
    assert "regularize" not in output
    for run in runs.made:
        settings = run.settings
        assert settings.recipe == "ad-drop"
        assert 1e-4 <= settings.learning_rate <= 1e-2
        assert settings.own["p"] == 0.2
    assert {run.settings.own["q"] for run in runs.made} <= {0.1, 0.3}
    assert len({run.settings.learning_rate for run in runs.made}) == 4


def test_options_with_providers(search, runs):
    space = "{options: {provider-lr: 0.01..0.1, epochs: 1..3}, providers: {ConcreteDropout: {}}}"
    ran(search("--runs", 8, "--seeds", 1, "--space", space))
    plain, other = (
        next(run for run in runs.made if run.settings.recipe == name) for name in ("finetune", "regularize")
    )
    assert plain.settings.epochs in (1, 2, 3)  # and it has no --provider-lr
    assert 0.01 <= other.settings.own["provider_lr"] <= 0.1


def test_the_default_space(search, runs, tmp_path, cli):
    ran(cli("search", *SMALL, "--runs", 40, "--seeds", 1))
    texts = " ".join(run.method.text for run in runs.made)
    for name in ("AttentionDropout", "DropKey", "DropAttention", "DropHead", "AttentionLayerDrop"):
        assert f"{name}(p=0." in texts
    # of three layers: the first is the lower half
    assert set(re.findall(r"\), (\[[-\d, ]+\])\)", texts)) == {"[0]", "[1, 2]", "[-1]"}
    assert 'placement=\\"scores\\"' in texts


def test_a_file_with_most_and_layers(search, runs, tmp_path):
    (tmp_path / "space.yaml").write_text(
        "providers:\n  DropHead: {p: 0.1..0.5}\n  DropKey: {p: 0.1..0.5, layers: all}\n"
        "  AttentionDropout:\nlayers: [[0, 2]]\nmost: 1\n"
    )
    ran(search("--runs", 20, "--seeds", 1, "--space", "space.yaml"))
    texts = {run.method.text for run in runs.made}
    assert not any(" & " in text for text in texts)
    assert 'regularize --provider "OnLayers(AttentionDropout(), [0, 2])"' in texts
    for name, form in {
        "DropHead": r"OnLayers\(DropHead\(p=[\d.]+\), \[0, 2\]\)",
        "DropKey": r"DropKey\(p=[\d.]+\)",
    }.items():
        assert any(name in text for text in texts)
        assert all(re.search(f'"{form}"', text) for text in texts if name in text)


def test_a_comparison_counts_the_search(search, runs, cli, tmp_path):
    ran(search("--runs", 20, "--seeds", 2))
    winner = json.loads((tmp_path / "found" / "winner.json").read_text())
    result = ran(cli("compare", "finetune", "best=@found", "--seeds", 2, "--no-equal-time", "--output-dir", "study"))
    text = (tmp_path / "study" / "report.md").read_text()
    options = {row["method"]: row for row in table(text, "Options")}
    assert options["finetune"]["tries"] == "1"
    assert options["best"]["tries"] == f"{winner['trials']} ({winner['runs']} runs)"
    assert options["best"]["as given"].replace("\\", "") == winner["method"].replace("\\", "")
    assert f"did not have the same number of tries: finetune (1), best ({winner['trials']})." in text
    assert f"best is the winner of the search in found: {winner['trials']} trials in {winner['runs']} runs" in text
    assert "best=@found" in text.split("```")[1]
    assert "best" in result.output
    clash = cli("compare", "finetune", "best=@found", "--first-seed", 999, "--seeds", 2, "--output-dir", "other")
    assert_sentence(clash, 2, "include some of the search's")


def test_what_is_no_winner(cli, tmp_path):
    assert_sentence(
        cli("compare", "finetune", "best=@nowhere"), 1, "Expected the folder of a search after @, got nowhere"
    )
    assert_sentence(
        cli("compare", "finetune", "@nowhere"), 2, "Give the winner of a search a name, as in best=@nowhere."
    )
    (tmp_path / "winner.json").write_text("{}")
    assert_sentence(cli("compare", "finetune", "best=@."), 1, "Cannot read the winner of a search from winner.json")


def test_without_optuna(search, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "attnreg.experiments.compare.search.trials")
    monkeypatch.delitem(sys.modules, "attnreg.experiments.compare.search.rounds")
    assert_sentence(search(), 1, r"attnreg search needs optuna: pip install optuna.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (["--space", "nothing.yaml"], "Cannot read the search space", 1),
        (["--space", "{"], "Cannot read the search space", 1),
        (["--space", "{}"], "The search space is empty: give `options`, `providers`, or both.", 1),
        (["--space", "DropHead"], "Expected the search space to map names to values, got 'DropHead'", 1),
        (["--space", "provider: {}"], "Unknown key 'provider' in the search space. Did you mean providers", 1),
        (["--space", "providers: [DropHead]"], "Expected `providers` of the search space to map names to values", 1),
        (["--space", "providers: {DropHeads: {}}"], "got 'DropHeads'.* Did you mean DropHead", 1),
        (["--space", "providers: {DropHead: {rate: 0.1..0.5}}"], "Expected the arguments of DropHead", 1),
        (["--space", "providers: {DropHead: {p: 0.1..1.5}}"], "Expected `p` to be a probability .*, got 1.5", 1),
        (["--space", "providers: {DropHead: {p: 0.5..0.1}}"], "DropHead p in the search space as a range from low", 1),
        (["--space", "providers: {DropHead: {p: 0..0.1 log}}"], "DropHead p in the search space as a range from low", 1),
        (["--space", "providers: {DropHead: {p: 0.1..0.5 lin}}"], "DropHead p in the search space as a range", 1),
        (["--space", "providers: {DropHead: {p: []}}"], "DropHead p in the search space as a range", 1),
        (["--space", "providers: {DropHead: {layers: middle}}"], "Expected `layers` .* got 'middle'", 1),
        (["--space", "{providers: {DropHead: {}}, most: 0}"], "Expected `most` in the search space", 1),
        (["--space", "options: {learning-rate: -1..1}"], "Invalid value for '--learning-rate'", 2),
        (["--space", "options: {q: 0.1..0.5}"], "No such option", 2),
        (["--space", "options: {train-size: 10..50}"], "--train-size cannot be in the search space", 2),
        (["--space", "{recipe: nothing, options: {epochs: 1..2}}"], "Expected a recipe among", 2),
        (["--runs", 2, "--seeds", 3], r"Expected --runs of at least --seeds \(3\), got 2", 2),
        (["--output-dir", "full"], "--output-dir full holds files but no search", 1),
        (["--task", "nothing"], "Expected a task among", 2),
        (["--model", "/nowhere"], "Expected --model to be a folder", 1),
    ],
)  # fmt: skip
def test_bad_input(search, runs, tmp_path, args, message, code):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    result = search(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert re.search(message, " ".join(result.output.split())), result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "thesis.tex"]


def test_with_runs_that_are_made(cli, warm, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "subprocess", started_by(warm))
    small = ["--epochs", 1, "--train-size", 32, "--batch-size", 32]
    output = ran(cli("search", *SMALL, *small, "--runs", 2, "--seeds", 1, "--space", HEADS)).output
    assert "2 of 2 runs done" in output
    folders = [tmp_path / "found" / "search" / f"trial-{number}" / "seed1000" for number in (0, 1)]
    for folder in folders:
        assert json.loads((folder / "result.json").read_text())["scored_on"] == "held-out"
        assert not (folder / "checkpoints").exists()
        assert not (folder / "model").exists()
