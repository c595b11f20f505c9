"""Options of recipes: each has a help text and a group, and agrees with the argument that it sets; presets of them."""

import inspect
import json
import pkgutil

import click
import pytest

from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.method import Method
from attnreg.experiments.options.files import recipe_files, summary
from attnreg.experiments.options.settings import Settings
from attnreg.experiments.runs.command import load_command
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.recipe_cases import SOURCES

OTHER_ON_PURPOSE = {
    *(("attention-dropout", "placement"), ("ad-drop", "layers")),
    *(("attendout", name) for name in ("credit", "generator", "provider", "provider_lr", "rewards")),
}


def signature_of(source):
    module, _, name = source.rpartition(".")
    return inspect.signature(pkgutil.resolve_name(f"{module}:{name}")).parameters


@pytest.mark.parametrize("recipe", recipe_files())
def test_options_have_help_and_groups_and_recipes_a_short_summary(recipe):
    assert len(summary(recipe_files()[recipe])) <= 90
    for parameter in load_command(recipe).params:
        assert parameter.help, parameter
        assert parameter.help[-1] == ".", parameter
        assert parameter.group in ("Method", "Task and data", "Training", "Output", "Other")


RANGES = {
    "Probability": click.FloatRange(0, 1),
    "ProbabilityBelowOne": click.FloatRange(0, 1, max_open=True),
    "InnerProbability": click.FloatRange(0, 1, min_open=True, max_open=True),
    "NotNegative": click.FloatRange(min=0),
    "Count": click.IntRange(min=1),
    "Index": click.IntRange(min=0),
}


def test_defaults_and_ranges_are_those_of_the_class():
    defaults = ranges = 0
    shared = {*Settings.__dataclass_fields__}
    for recipe, sources in SOURCES.items():
        arguments = {name: argument for source in sources for name, argument in signature_of(source).items()}
        for parameter in load_command(recipe).params:
            if parameter.name in arguments.keys() - shared and (recipe, parameter.name) not in OTHER_ON_PURPOSE:
                argument = arguments[parameter.name]
                assert parameter.default == argument.default, (recipe, parameter.name)
                defaults += 1
                if argument.annotation in RANGES:
                    assert str(parameter.type) == str(RANGES[argument.annotation]), (recipe, parameter.name)
                    ranges += 1
    assert defaults > 20
    assert ranges > 10


@pytest.mark.parametrize("command", [["recipe", "ad-drop"], ["compare"], ["search"]])
def test_help_names_the_options_of_every_run_and_help_all_describes_them(cli, command):
    short, whole = (cli(*command, flag).output for flag in ("--help", "--help-all"))
    assert "--gradient-accumulation" in short.replace("-\n", "-")
    assert "Split a batch" not in short
    assert "Split a batch" in whole
    assert "More options" not in whole
    assert len(short.splitlines()) < 0.7 * len(whole.splitlines())


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("attnreg recipe finetune --task agr", ["agreement", "agreement-words", "agreement-completion"]),
        ("attnreg compare att", ["attendout", "attention-layerdrop"]),
    ],
)
def test_a_shell_completes_names(typed, found):
    from click.shell_completion import ShellComplete

    from attnreg.experiments.cli.main import main

    *words, last = typed.split()[1:]
    completed = ShellComplete(main, {}, "attnreg", "_ATTNREG_COMPLETE").get_completions(words, last)
    assert {*found} <= {each.value for each in completed}
    assert all(each.value.startswith(last) for each in completed)


@pytest.mark.parametrize("data", ["reviews", "../reviews/", "reviews.csv", "reviews.jsonl.gz"])
def test_results_of_a_custom_task_are_named_after_its_data(data):
    args = ["--task", "custom", "--text-columns", "text", "--data-dir", data]
    assert str(load_command("finetune").settings(args).output_dir) == "runs/finetune-reviews-seed0"


PAPER = {"batch_size": 16, "epochs": 50, "learning_rate": 1e-5, "schedule": "constant", "max_grad_norm": 0.0}
PAPER |= {"patience": 5, "stop_on": "dev", "select": "best", "method": "gradient", "first_pass": "train"}


def settings(*args):
    chosen = load_command("ad-drop").settings(args).to_dict()
    return {**chosen, **chosen["own"]}


@pytest.mark.parametrize(("task", "own"), [([], {}), (["--task", "cola"], {"max_length": 47})])
def test_a_preset_changes_defaults_and_nothing_else(task, own):
    plain, chosen = settings(*task), settings(*task, "--regime", "paper")
    changed = {name for name in plain if chosen[name] != plain[name]} - {"own", "flags", "method"}  # its usual one
    assert changed == {*PAPER, *own} - {"method"}
    assert chosen.items() >= {**PAPER, **own}.items()


OF_TRAINER = {"learning_rate": 2e-5, "schedule": "linear", "lr_warmup": 0.0, "patience": None, "max_grad_norm": 1.0}


@pytest.mark.parametrize(
    ("task", "values"),  # as in the scripts of the official code; tasks of tokens train as the Trainer does
    [
        ("mrpc", {**PAPER, "method": "integrated_gradients"}),
        ("mnli", {**PAPER, "epochs": 10, "patience": 3, "max_length": 128}),
        ("qnli", {**PAPER, "epochs": 10, "patience": 3, "max_length": 128}),
        ("qqp", {**PAPER, "epochs": 10, "patience": 3, "max_length": 120}),
        ("sst2", {**PAPER, "epochs": 20, "max_length": 120}),
        ("stsb", {**PAPER, "max_length": 100}),
        ("rte", {**PAPER, "max_length": 128}),
        ("conll2003", {**OF_TRAINER, "epochs": 9, "batch_size": 32, "p": 0.8, "q": 0.1}),
        ("wmt16-en-ro", {**OF_TRAINER, "epochs": 5, "batch_size": 16, "p": 0.2, "q": 0.2}),
        ("wmt16-tr-en", {**OF_TRAINER, "epochs": 5, "batch_size": 16, "p": 0.6, "q": 0.1}),
    ],
)
def test_each_task_has_the_values_of_its_script(task, values):
    for chosen in (settings("--task", task, "--regime", "paper"), settings("--regime", "paper", "--task", task)):
        assert chosen.items() >= values.items()


@pytest.mark.parametrize(("name", "given"), [("epochs", "3"), ("schedule", "linear"), ("method", "random")])
def test_an_option_that_is_given_wins_before_and_after_it(name, given):
    words, regime = [f"--{name}", given], ["--regime", "paper"]
    for got in (settings(*regime, *words), settings(*words, *regime)):
        assert str(got[name]) == given
        assert {**got, name: PAPER[name]}.items() >= PAPER.items()
    assert str(settings(*regime, *words, "--task", "mrpc")[name]) == given  # whose method is another one by default


def test_it_trains_and_writes_the_resulting_values(cli, tmp_path):
    small = ["--epochs", 2, "--train-size", 64, "--output-dir", "out"]
    result = ran(cli("recipe", "ad-drop", "--regime", "paper", *small))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {**config, **config["own"]}.items() >= {**PAPER, "epochs": 2, "train_size": 64}.items()
    assert "Warning: --stop-on dev" in result.output
    assert json.loads((tmp_path / "out" / "result.json").read_text())["steps"] == 2 * 4
    ran(cli("recipe", "ad-drop", "--regime", "paper", *small, "--resume"))
    assert_sentence(cli("recipe", "ad-drop", *small, "--resume"), 1, "other options: repeat it with --batch-size 16")


def test_a_comparison_passes_on_only_what_was_given(cli, tmp_path):
    args = ["finetune", "ad-drop --regime paper", "--seeds", 1, "--launcher", "commands", "--output-dir", "study"]
    printed = ran(cli("compare", *args)).stdout
    assert "--schedule" not in printed
    comparison = Comparison([method := Method("ad-drop --regime paper")], method, {"epochs": 7}, tmp_path, seeds=1)
    (run,) = comparison.runs()
    assert (run.settings.schedule, run.settings.patience, run.settings.epochs) == ("constant", 5, 7)
