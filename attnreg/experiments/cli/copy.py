"""``attnreg copy NAME FILE``."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from attnreg.errors import InputError, UsageError
from attnreg.experiments.options.catalogue import find_recipe, recipe_files
from attnreg.experiments.options.option import GroupedCommand, names_like

EPILOG = "Example: attnreg copy attendout mine.py && attnreg recipe mine.py --epochs 5"


@click.command("copy", cls=GroupedCommand, epilog=EPILOG)
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
        raise InputError(f"{file} already exists: choose another name.")
    if not file.parent.is_dir():
        raise InputError(f"There is no folder {file.parent}: create it, or choose another name.")
    shutil.copyfile(source, file)
    click.echo(f"Copied {name} to {file}. Run it with `attnreg recipe {file}`.")
