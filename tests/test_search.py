"""Searches through the command line, with runs that are written down here: their draws, space, budget and winner."""

import functools
import json
import re
import shlex
import shutil
import sys
from types import SimpleNamespace

import optuna
import pytest

from attnreg.errors import InputError
from attnreg.experiments.compare import make as launch
from attnreg.experiments.compare.method import typed_words
from attnreg.experiments.compare.search import trials
from attnreg.experiments.compare.search.space import Choice, Range, read_space, read_values
from attnreg.experiments.compare.search.trials import Trials
from attnreg.experiments.folder.run_folder import locked
from attnreg.experiments.options.option import as_typed
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.comparisons import started_by, table, write
from tests.helpers.task_data import tiny_bert, write_rows

pytestmark = pytest.mark.usefixtures("undrawn")
SMALL = ["--epochs", 2, "--device", "cpu", "--search-rows", 50, "--jobs", 2, "--output-dir", "found"]
HEADS = "providers: {DropHead: {p: 0.1..0.5}, DropKey: {p: 0.1..0.5}}"


def rate(text):
    """A score that is best for DropHead(p=0.3), and worse with DropKey."""
    found = re.search(r"DropHead\(p=([\d.]+)", text)
    return round(0.8 - (abs(float(found[1]) - 0.3) if found else 0.25) - 0.2 * ("DropKey" in text), 2)


class Runs:
    """Stands for the launcher: runs are written down, not made."""

    def __init__(self):
        self.score = lambda text, seed: rate(text) + 0.01 * (seed % 3)  # a text is the reason why the run fails
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
                    run.log.write_text(f"epoch 1\n{score}\n")
                else:
                    write(run, score, seconds=60.0, training_cpu_seconds=30.0)
                self.made.append(run)
                watcher.ended(run)

        return start


@pytest.fixture
def runs(monkeypatch):
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
    output = ran(search("--runs", 10, "--seeds", 3)).output
    assert len(runs.made) == 9  # a fourth trial would not be complete
    assert "; 9 of 9 runs done" in output
    assert {run.seed for run in runs.made} == {1000, 1001, 1002}
    assert all(run.arguments[run.arguments.index("--validation-rows") + 1] == "50" for run in runs.made)
    assert drawn(output)[0] == runs.made[0].method.text == "finetune"  # is there anything to gain?
    assert runs.made[0].folder.as_posix() == "found/search/trial-0/seed1000"


TWO = "{providers: {DropHead: {p: 0.01..0.09 log}, DropAttention: {p: 0.1..0.5, window: [2, 3]}}, layers: [all, first]}"


def test_first_come_plain_fine_tuning_and_each_provider_alone(search, runs):
    output = ran(search("--space", TWO, "--runs", 6, "--seeds", 1)).output
    plain, *alone = drawn(output)[:3]
    assert plain == "finetune"
    assert ["DropHead" in text for text in alone] == [True, False]
    assert ["DropAttention" in text for text in alone] == [False, True]
    assert len({*drawn(output)}) == 6
    space = "{options: {batch-size: 2..4}, providers: {DropHead: {p: 0.1..0.5}}, layers: [all]}"
    plain, alone = drawn(ran(search("--space", space, "--runs", 2, "--seeds", 1, "--output-dir", "options")).output)
    assert re.fullmatch(r"finetune --batch-size \d", plain)
    assert alone.startswith('regularize --provider "DropHead(')


def test_the_winner_is_the_best_complete_trial_and_the_report_has_what_it_needs(search, runs, tmp_path):
    output = ran(search("--runs", 30, "--seeds", 2)).output
    winner = json.loads((tmp_path / "found" / "winner.json").read_text())
    means = {}
    for run in runs.made:
        means[run.method.text] = means.get(run.method.text, 0) + run.score / 2
    assert winner["method"] == max(means, key=means.get)
    assert pytest.approx(max(means.values())) == winner["score"] > means["finetune"]
    assert (winner["trials"], winner["runs"]) == (len(means), len(runs.made)) == (15, 30)
    text, compare = report(tmp_path), "attnreg compare finetune best=@found --epochs 2 --device cpu --task agreement"
    assert f"\n{compare}\n" in output
    assert f"```\n{winner['method']}\n```" in text
    assert f"```\n{compare}\n```" in text
    every = table(text, "All trials")
    assert [float(row["mean"]) for row in every] == sorted((float(row["mean"]) for row in every), reverse=True)
    assert {row["trial"] for row in every} == {str(number) for number in range(len(every))}
    assert f"{len(every)} trials ({[row['state'] for row in every].count('complete')} complete" in text
    assert f"in {len(runs.made)} runs of at most 30. The runs took {len(runs.made)}.0 min, one after another." in text
    command = shlex.split(text.split("```")[1].strip())
    assert command[:2] == ["attnreg", "search"]
    assert command[command.index("--space") + 1] == HEADS


def test_a_run_that_fails_fails_its_trial(search, runs, tmp_path):
    runs.score = lambda text, seed: "Error: No such thing." if "DropKey" in text else rate(text)
    output = ran(search("--runs", 12, "--seeds", 2)).output
    failed = [run for run in runs.made if not run.finished]
    assert 2 * len({run.method for run in failed}) == len(failed) > 0
    assert len(runs.made) == 12
    says = r"^trial-\d+ failed: Error: No such thing. \(see found/search/trial-\d+/seed1000.log\)$"
    assert re.search(says, output, re.M)
    assert f", {len(failed) // 2} failed) in {len(runs.made)} runs" in report(tmp_path)
    assert "failed: Error: No such thing." in report(tmp_path)
    assert not drawn(ran(search("--runs", 12, "--seeds", 2)).output)


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_that_was_killed_is_made_once_more(search, runs, times):
    killed = []

    def score(text, seed):
        killed.append(text)
        return "epoch 2" if "DropKey" in text and killed.count(text) <= times else rate(text)

    runs.score = score
    output = ran(search("--runs", 4, "--seeds", 1)).output
    assert [*map(killed.count, killed)].count(2) == 2 * sum("DropKey" in text for text in drawn(output)) > 0
    says = r"^trial-\d+ failed: stopped without an error, as if it was killed \(see "
    assert bool(re.search(says, output, re.M)) == (times == 2)


def test_a_search_of_failures_says_why(search, runs):
    runs.score = lambda text, seed: "Error: No such thing."
    result = search("--runs", 4, "--seeds", 2)
    assert result.exit_code == 1
    assert result.output.endswith("Error: No trial has finished. trial-0 failed: Error: No such thing.\n")


def test_the_same_seed_draws_the_same(search, runs):
    first, again, other = (
        drawn(ran(search("--runs", 10, "--seeds", 1, "--output-dir", name, "--sampler-seed", seed)).output)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == again
    assert set(first) & set(other) == {"finetune"}, "only what comes first in every search"


@pytest.fixture
def assert_ends_as_ever(search, runs, tmp_path):
    """Repeated, a search that was broken off makes the runs, each once, and the report of an unbroken one."""
    ran(search("--runs", 12, "--seeds", 2))
    unbroken, runs.made = [(run.folder, run.method.text) for run in runs.made], []
    expected = report(tmp_path)
    shutil.rmtree(tmp_path / "found")

    def repeat():
        ran(search("--runs", 12, "--seeds", 2))
        assert [(run.folder, run.method.text) for run in runs.made] == unbroken
        assert report(tmp_path) == expected

    return repeat


@pytest.mark.parametrize("last", [0, pytest.param(1, marks=pytest.mark.slow), 6])
def test_stopped_and_started_again(assert_ends_as_ever, search, runs, last):
    runs.last = last
    assert_sentence(search("--runs", 12, "--seeds", 2), 130, "Stopped. Repeat the command to continue.")
    runs.last = None
    assert_ends_as_ever()


@pytest.mark.parametrize(
    ("owner", "place", "call"),
    [
        *((Trials, "tell", 4), (optuna.Study, "tell", 2), (Trials, "_draw", 2), (Trials, "_keep", 3)),
        *(pytest.param(Trials, *each, marks=pytest.mark.slow) for each in (("tell", 1), ("_draw", 4))),
    ],
)
def test_killed_anywhere_and_started_again(assert_ends_as_ever, search, tmp_path, monkeypatch, owner, place, call):
    calls, usual = [], getattr(owner, place)

    def killed(*args, **options):
        calls.append(args)
        if len(calls) == call:
            raise SystemExit(9)
        return usual(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, killed)
        assert search("--runs", 12, "--seeds", 2).exit_code == 9
    assert_ends_as_ever()


def test_another_search_goes_to_another_folder(search, runs, tmp_path):
    def refused(says, *args):
        assert_sentence(search("--runs", 8, "--seeds", 2, "--train-size", 100, *args), 1, says)

    ran(search("--runs", 4, "--seeds", 2, "--train-size", 100, "--stratified"))
    ran(search("--runs", 6, "--seeds", 2, "--stratified", "--train-size", 100))  # the same search
    assert len(runs.made) == len({run.folder for run in runs.made}) == 6  # with a larger budget
    assert all("--stratified" in run.arguments for run in runs.made)
    fewer = ran(search("--runs", 2, "--seeds", 1, "--train-size", 100))
    assert "found holds a search with other --seeds, --stratified: saving to found-2.\n" in fewer.output
    assert "Report saved to found-2/report.md" in fewer.output
    space = ["--space", "providers: {DropHead: {p: 0.1..0.4}}"]
    other = ran(search("--runs", 2, "--seeds", 1, "--train-size", 100, *space))
    assert "found holds a search with other --space, --seeds, --stratified: saving to found-3.\n" in other.output
    again = ran(search("--runs", 3, "--seeds", 1, "--train-size", 100))
    assert "saving to found-2." in again.output  # it goes on there
    assert len([*(tmp_path / "found-2").glob("search/*/seed*/config.json")]) == 3
    assert not (tmp_path / "found-4").exists()
    config = runs.made[0].folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attnreg": "0.0.1"}))
    refused("attnreg's version changed: remove this folder, or choose another --output-dir", "--stratified")
    with locked(runs.made[0].folder.parents[2], "busy"):
        refused("Another search is writing to found: wait for", "--stratified")


def test_data_of_ones_own(search, runs, tmp_path):
    tiny_bert(tmp_path / "bert")
    write_rows(tmp_path / "data" / "train.jsonl", [{"text": "red", "label": f"c{number % 3}"} for number in range(60)])
    own = ["--task", "custom", "--text-columns", "text", "--data-dir", "data", "--model", "bert", "--max-length", 16]
    ran(search("--runs", 2, "--seeds", 1, *own))
    assert len(runs.made) == 2
    refused = search("--runs", 2, "--seeds", 1, *own, "--search-rows", 60, "--output-dir", "other")
    assert_sentence(refused, 1, "Holding out 60 rows needs at least 61 training rows, got 60")


def test_a_space_that_is_exhausted(search, runs, monkeypatch):
    starts, usual = [], trials.TPESampler
    kept = lambda **options: starts.append(options["n_startup_trials"]) or usual(**options)  # noqa: E731
    monkeypatch.setattr(trials, "TPESampler", kept)
    space = "providers: {DropHead: {p: 0.2, layers: [all, last]}}"
    output = ran(search("--runs", 30, "--seeds", 1, "--space", space)).output
    assert "The search space has nothing left to try." in output
    plain, *others = (run.method.text for run in runs.made)
    assert plain == "finetune"
    expressions = ("DropHead(p=0.2)", "OnLayers(DropHead(p=0.2), [-1])")
    assert sorted(others) == [f'regularize --provider "{text}"' for text in expressions]
    assert starts[-100:] == [trials.RANDOM_TRIALS] * 50 + [sys.maxsize] * 50  # TPE may insist on the best one


def test_options_without_providers(search, runs):
    space = "{recipe: ad-drop, options: {learning-rate: 1e-4..1e-2 log, --q: [0.1, 0.3], p: 0.2}}"
    ran(search("--runs", 8, "--seeds", 2, "--space", space))
    made = [run.settings for run in runs.made]
    assert {(each.recipe, each.own["p"]) for each in made} == {("ad-drop", 0.2)}
    assert {each.own["q"] for each in made} <= {0.1, 0.3}
    assert len({each.learning_rate for each in made}) == 4
    assert all(1e-4 <= each.learning_rate <= 1e-2 for each in made)


def test_options_with_providers(search, runs):
    space = "{options: {provider-lr: 0.01..0.1, batch-size: 2..4}, providers: {ConcreteDropout: {}}}"
    ran(search("--runs", 8, "--seeds", 1, "--space", space))
    recipes = {run.settings.recipe: run for run in runs.made}
    plain, other = recipes["finetune"], recipes["regularize"]
    assert plain.settings.batch_size in (2, 3, 4)  # and it has no --provider-lr
    assert 0.01 <= other.settings.own["provider_lr"] <= 0.1


def test_an_option_is_not_fixed_and_varied(search):
    says = "--epochs is in the search space: remove it from the command line, or from --space"
    assert_sentence(search("--space", "{options: {epochs: 1..3}}"), 2, says)
    assert_sentence(search("--space", "{options: {task: [cola]}}"), 2, "--task cannot be in the search space")


def test_plain_fine_tuning_as_the_winner_is_told(search, runs, tmp_path):
    runs.score = lambda text, seed: 0.5 if text == "finetune" else 0.4
    output = ran(search("--runs", 6, "--seeds", 1)).output
    assert "The best trial is plain fine-tuning itself." in output
    assert "Compare the winner" not in output + report(tmp_path)


@pytest.mark.parametrize("of_majority", [0.3, 0.6])
def test_a_winner_that_has_not_learned_is_told(of_majority, search, runs, tmp_path, monkeypatch):
    trivial = {"predictor": "majority class", "dev": {"accuracy": of_majority}}
    monkeypatch.setitem(globals(), "write", functools.partial(write, trivial=trivial))
    runs.score = lambda text, seed: 0.5
    output = ran(search("--runs", 3, "--seeds", 1)).output
    assert all(("No method learned the task" in text) == (of_majority > 0.5) for text in (output, report(tmp_path)))


def test_the_default_space(search, runs, tmp_path, cli):
    ran(cli("search", *SMALL, "--runs", 40, "--seeds", 1))
    texts = " ".join(run.method.text for run in runs.made)
    names = {"AttentionDropout", "DropKey", "DropAttention", "DropHead", "AttentionLayerDrop"}
    assert {*re.findall(r"(\w+)\(p=0\.", texts)} == names
    # of three layers: the first is the lower half
    assert set(re.findall(r"\), (\[[-\d, ]+\])\)", texts)) == {"[0]", "[1, 2]", "[-1]"}
    assert 'placement=\\"scores\\"' in texts


def test_a_file_with_most_and_layers(search, runs, tmp_path):
    heads = "{DropHead: {p: 0.1..0.5}, DropKey: {p: 0.1..0.5, layers: all}, mine.py:Own: }"
    (tmp_path / "mine.py").write_text("import attnreg\nclass Own(attnreg.DropHead): pass\n")
    (tmp_path / "space.yaml").write_text(f"providers: {heads}\nlayers: [[0, 2]]\nmost: 1\n")
    ran(search("--runs", 20, "--seeds", 1, "--space", "space.yaml"))
    texts = {run.method.text for run in runs.made}
    assert not any(" & " in text for text in texts)
    assert 'regularize --provider "OnLayers(mine.py:Own(), [0, 2])"' in texts
    forms = {"DropHead": r"OnLayers\(DropHead\(p=[\d.]+\), \[0, 2\]\)", "DropKey": r"DropKey\(p=[\d.]+\)"}
    for name, form in forms.items():
        assert {bool(re.search(f'"{form}"', text)) for text in texts if name in text} == {True}


def test_a_comparison_counts_the_search(search, runs, cli, tmp_path):
    ran(search("--runs", 20, "--seeds", 2))
    winner = json.loads((tmp_path / "found" / "winner.json").read_text())
    ran(cli("compare", "finetune", "best=@found", "--seeds", 2, "--no-equal-time", "--output-dir", "study"))
    text = (tmp_path / "study" / "report.md").read_text()
    options = {row["method"]: row for row in table(text, "Options")}
    assert options["finetune"]["tries"] == "1"
    assert options["best"]["tries"] == f"{winner['trials']} ({winner['runs']} runs)"
    assert options["best"]["as given"].replace("\\", "") == winner["method"].replace("\\", "")
    assert f"did not have the same number of tries: finetune (1), best ({winner['trials']})." in text
    assert f"best is the winner of the search in found: {winner['trials']} trials in {winner['runs']} runs" in text
    assert "best=@found" in text.split("```")[1]
    clash = cli("compare", "finetune", "best=@found", "--first-seed", 999, "--seeds", 2, "--output-dir", "other")
    assert_sentence(clash, 2, "include seeds of the search")


def test_what_is_no_winner(cli, tmp_path):
    (tmp_path / "winner.json").write_text("{}")
    assert_sentence(cli("compare", "finetune", "best=@."), 1, "Cannot read the winner of a search from winner.json")


def test_without_optuna(search, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "attnreg.experiments.compare.search.trials")
    assert_sentence(search(), 1, r"attnreg search needs optuna: pip install optuna.")
    assert not list(tmp_path.iterdir())


def test_with_runs_that_are_made(cli, warm, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "subprocess", started_by(warm))
    small = ["--epochs", 1, "--train-size", 32, "--batch-size", 32]
    output = ran(cli("search", *SMALL, *small, "--runs", 2, "--seeds", 1, "--space", HEADS)).output
    assert "2 of 2 runs done" in output
    assert report(tmp_path).startswith("# Search on agreement: matthews correlation on held-out rows\n")
    for number in (0, 1):
        folder = tmp_path / "found" / "search" / f"trial-{number}" / "seed1000"
        assert json.loads((folder / "result.json").read_text())["scored_on"] == "held-out"
        assert not (folder / "checkpoints").exists()


def test_values_of_a_space_and_options_as_typed():
    assert read_values("1e-5..1e-3 log", "--learning-rate") == Range(1e-5, 1e-3, log=True)
    assert read_values("1..8", "--epochs") == Range(1, 8, log=False)
    assert read_values([0.5, "1e-3"], "--p") == Choice([0.5, 1e-3])
    assert read_space("{recipe: attendout, options: {no-baseline: true}}").options == {"--no-baseline": Choice([True])}
    options = {"train_size": 500, "model": None, "stratified": True, "keep_models": False, "report_to": ("a", "b")}
    assert typed_words(options) == ["--train-size", "500", "--stratified", "--report-to", "a", "--report-to", "b"]
    assert as_typed("--layers", [0, 1]) == "--layers 0,1"
    assert as_typed("--provider", "A('x') & B()") == "--provider \"A('x') & B()\""
    assert as_typed("words", ["a", "b c"]) == "a 'b c'"
    assert [as_typed("--plot/--no-plot", value) for value in (True, False, None)] == ["--plot", "--no-plot", ""]
    assert as_typed("--resume", False) == ""


@pytest.mark.parametrize(("most", "says"), [(1, "in 3 runs. The"), (4, "in 3 runs of at most 4. The")])
def test_a_search_that_goes_on_with_fewer_runs_names_no_limit_below_them(most, says):
    made, search = SimpleNamespace(all=[SimpleNamespace(state="complete")]), SimpleNamespace(runs=most)
    assert says in trials._summary(search, made, [SimpleNamespace(seconds=60.0, finished=True)] * 3)


@pytest.mark.parametrize("unused", ["layers: [first]", "most: 2"])
def test_what_a_space_without_providers_does_not_use_is_refused(unused):
    with pytest.raises(InputError, match=f"`{unused[:4]}.*` of the search space is of `providers`, which it lacks"):
        read_space(f"{unused}\noptions: {{epochs: 1..2}}")
