"""``attnreg list recipes|studies|tasks|providers``."""

from __future__ import annotations

import ast

import click
import yaml

import attnreg
from attnreg._lazy import REGULARIZERS, listed_names
from attnreg.experiments.options.catalogue import recipe_files, study_files, summary
from attnreg.experiments.options.option import GroupedCommand, defined, parsed
from attnreg.experiments.tasks.built_in import TASKS

# the base classes, and the class behind `&`
_NOT_BY_NAME = {"Regularizer", "MaskProvider", "HiddenProvider", "Compose"}


@click.command("list", cls=GroupedCommand, epilog="Example: attnreg list tasks")
@click.argument("what", type=click.Choice(["recipes", "studies", "tasks", "providers"]))
def list_(what: str) -> None:
    """List the recipes, studies, tasks or providers."""
    if what == "recipes":
        rows = {name: summary(path) for name, path in recipe_files().items()}
    elif what == "studies":
        texts = {name: path.read_text(encoding="utf-8") for name, path in study_files().items()}
        rows = {name: yaml.safe_load(text)["summary"] for name, text in texts.items()}
    else:
        rows = {name: task.summary for name, task in TASKS.items()} if what == "tasks" else _providers()
    width = max(map(len, rows))
    for name, text in rows.items():
        click.echo(f"{name:<{width}}  {text}")


def _providers() -> dict[str, str]:
    """Read names and summaries from the source files, because importing the providers would import torch."""
    rows = {}
    for name, module in listed_names(attnreg.__file__).items():
        if module.startswith(REGULARIZERS) and name[0].isupper() and name not in _NOT_BY_NAME:
            found = defined(parsed(module), name, ast.ClassDef)
            rows[name] = (ast.get_docstring(found) or "").partition("\n")[0]
    return rows
