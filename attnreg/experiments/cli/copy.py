"""``attnreg copy NAME FILE``."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from attnreg.errors import InputError, UsageError
from attnreg.experiments.runs.catalogue import find_recipe


@click.command("copy", epilog="Example: attnreg copy attendout mine.py && attnreg recipe mine.py --epochs 5")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
def copy(name: str, file: Path) -> None:
    """Copy the recipe NAME to FILE, to edit it; `attnreg recipe FILE` runs it."""
    source = find_recipe(name)
    if file.suffix != ".py":
        raise UsageError(f"Expected FILE to end in .py, got {file}.")
    if file.exists():
        raise InputError(f"Expected FILE to be new, got {file}, which exists: choose another name.")
    if not file.parent.is_dir():
        raise InputError(f"Expected FILE in an existing folder, got {file}: no folder {file.parent}.")
    shutil.copyfile(source, file)
    click.echo(f"Copied {name} to {file}; run it with `attnreg recipe {file}`.")
