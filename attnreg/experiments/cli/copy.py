"""``attnreg copy NAME FILE``."""

from __future__ import annotations

from pathlib import Path

import click

from attnreg.errors import UsageError
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
        raise UsageError(f"{file} is there already: choose another FILE, or remove it.")
    file.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    click.echo(f"Copied {name} to {file}. Run it with `attnreg recipe {file}`.")
