"""Options of recipes: each has a help text and a group, and agrees with the argument that it sets."""

import importlib
import inspect

import click
import pytest

from attnreg.experiments.options.catalogue import recipe_files, summary
from attnreg.experiments.options.option import argument
from attnreg.experiments.options.settings import Settings
from attnreg.experiments.runs.command import load_command
from tests.recipe_cases import SOURCES

OTHER_ON_PURPOSE = {
    ("attention-dropout", "placement"),
    ("ad-drop", "layers"),
    *(("attendout", name) for name in ("credit", "generator", "provider_lr", "rewards")),
    ("probe", "q"),
    ("probe", "layers"),
}


def signature_of(source):
    package, _, path = source.partition(":")
    found = importlib.import_module(package)
    for name in path.split("."):
        found = getattr(found, name)
    return inspect.signature(found).parameters


@pytest.mark.parametrize("recipe", recipe_files())
def test_options_have_help_and_groups_and_recipes_a_short_summary(recipe):
    assert len(summary(recipe_files()[recipe])) <= 90
    for parameter in load_command(recipe).params:
        assert parameter.help, parameter
        assert parameter.help[-1] == ".", parameter
        assert parameter.group in ("Method", "Task and data", "Training", "Output")


def test_defaults_are_those_of_the_class():
    checked = 0
    for recipe, sources in SOURCES.items():
        arguments = {name: p for source in sources for name, p in signature_of(source).items()}
        shared = {*Settings.__dataclass_fields__}
        for parameter in load_command(recipe).params:
            if parameter.name in arguments.keys() - shared and (recipe, parameter.name) not in OTHER_ON_PURPOSE:
                assert parameter.default == arguments[parameter.name].default, (recipe, parameter.name)
                checked += 1
    assert checked > 25


def test_types_are_read_from_annotations():
    @click.command()
    @argument("attnreg:AttributionProvider", "region")
    @argument("attnreg:AttributionProvider", "steps")
    @argument("attnreg.training:Rounds", "winner")
    @argument("attnreg:GNetProvider", "causal")
    def command(**options):
        click.echo(repr(sorted(options.items())))

    types = {parameter.name: parameter.type for parameter in command.params}
    assert list(types["region"].choices) == ["high", "low"]
    assert (types["steps"].min, types["steps"].max) == (1, None)
    assert list(types["winner"].choices) == ["evidence", "greedy", "proportional", "none"]
    assert command.params[-1].is_flag


@pytest.mark.parametrize("command", [["recipe", "ad-drop"], ["compare"], ["search"]])
def test_help_names_the_options_of_every_run_and_help_all_describes_them(cli, command):
    short, whole = (cli(*command, flag).output for flag in ("--help", "--help-all"))
    assert "--gradient-accumulation" in short.replace("-\n", "-")
    assert "Split each batch" not in short
    assert "Split each batch" in whole
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


def test_results_of_a_custom_task_are_named_after_its_data():
    args = ["--task", "custom", "--text-columns", "text", "--data-dir", "reviews"]
    assert str(load_command("finetune").settings(args).output_dir) == "runs/finetune-reviews-seed0"
