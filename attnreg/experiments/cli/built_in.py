"""What is built in: ``attnreg recipe NAME``, ``attnreg list`` and ``attnreg copy NAME FILE``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import yaml

import attnreg
from attnreg._files import write_text
from attnreg._lazy import REGULARIZERS, listed_names
from attnreg.errors import InputError, UsageError
from attnreg.experiments.options.files import find_recipe, recipe_files, study_files, summary
from attnreg.experiments.options.option import GroupedCommand, names_like
from attnreg.experiments.runs.command import load_command
from attnreg.experiments.tasks.built_in import TASKS

# `&` makes a `Compose`.
_NO_PROVIDERS = {"Regularizer", "MaskProvider", "HiddenProvider", "Compose", "parse_provider"}
_EDIT = "Example: attnreg copy attendout mine.py && attnreg recipe mine.py --epochs 5"


class _Recipes(click.Group):
    """A group whose commands are the recipe files. A recipe is imported only when it runs, not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(recipe_files())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        return load_command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Recipes"):
            formatter.write_dl([*_recipes().items()])


@click.command(
    "recipe",
    cls=_Recipes,
    options_metavar="",
    subcommand_metavar="NAME|FILE.py [OPTIONS]",
    epilog="Example: attnreg recipe attendout --task cola",
)
def recipe() -> None:
    """Run a built-in recipe or your own recipe file."""


def _recipes() -> dict[str, str]:
    return {name: summary(path) for name, path in recipe_files().items()}


def _studies() -> dict[str, str]:
    texts = {name: path.read_text(encoding="utf-8") for name, path in study_files().items()}
    return {name: yaml.safe_load(text)["summary"] for name, text in texts.items()}


def _providers() -> dict[str, str]:
    """Read names and summaries from the source files, because importing the providers would import torch."""
    modules = {name: module for name, module in listed_names(attnreg.__file__).items() if name not in _NO_PROVIDERS}
    folder = Path(attnreg.__file__).parent
    return {
        name: summary(folder.joinpath(*module.split(".")[1:]).with_suffix(".py"), name)
        for name, module in modules.items()
        if module.startswith(REGULARIZERS)
    }


_LISTS = {
    "recipes": _recipes,
    "studies": _studies,
    "tasks": lambda: {name: task.summary for name, task in TASKS.items()},
    "providers": _providers,
}


@click.command("list", cls=GroupedCommand, epilog="Example: attnreg list tasks")
@click.argument("what", type=click.Choice([*_LISTS]), required=False)
def list_(what: str | None) -> None:
    """List the recipes, studies, tasks and providers, or one of these."""
    for title, rows_of in _LISTS.items() if what is None else [(what, _LISTS[what])]:
        if what is None:
            click.echo(f"\n{title.capitalize()}:" if title != next(iter(_LISTS)) else f"{title.capitalize()}:")
        rows = rows_of()
        width = max(map(len, rows))
        for name, text in rows.items():
            click.echo(f"{name:<{width}}  {text}")


@click.command("copy", cls=GroupedCommand, epilog=_EDIT)
@click.argument("name", shell_complete=names_like(recipe_files))
@click.argument("file", type=click.Path(path_type=Path))
def copy(name: str, file: Path) -> None:
    """Copy a recipe to a file that you can edit.

    NAME is a recipe of `attnreg list recipes`, FILE a new .py file. Run it with `attnreg recipe FILE`.
    """
    source = find_recipe(name)
    if file.suffix != ".py":
        raise UsageError(f"Expected FILE to end in .py, got {file}.")
    if file.exists():
        raise UsageError(f"{file} is there already: choose another FILE, or remove it.")
    if not file.parent.is_dir():
        raise InputError(f"There is no folder {file.parent} for {file.name}: make it.")
    write_text(file, source.read_text(encoding="utf-8"))
    click.echo(f"Copied {name} to {file}. Run it with `attnreg recipe {shlex.quote(str(file))}`.")
