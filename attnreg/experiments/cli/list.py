"""``attnreg list recipes|studies|tasks|providers``."""

from __future__ import annotations

import ast

import click
import yaml

import attnreg
from attnreg._lazy import REGULARIZERS, listed_names
from attnreg.experiments.options.catalogue import recipe_files, study_files, summary
from attnreg.experiments.options.option import GroupedCommand, parsed
from attnreg.experiments.tasks.built_in import TASKS

# the base classes, and the class behind `&`
_NOT_BY_NAME = {"Regularizer", "MaskProvider", "HiddenProvider", "Compose"}


@click.command("list", cls=GroupedCommand, epilog="Example: attnreg list tasks")
@click.argument("what", type=click.Choice(["recipes", "studies", "tasks", "providers"]))
def list_(what: str) -> None:
    """List the recipes, studies, tasks or providers."""
    rows = {"recipes": _recipes, "studies": _studies, "tasks": _tasks, "providers": _providers}[what]()
    width = max(len(name) for name in rows)
    for name, text in rows.items():
        click.echo(f"{name:<{width}}  {text}")


def _recipes() -> dict[str, str]:
    return {name: summary(path) for name, path in recipe_files().items()}


def _studies() -> dict[str, str]:
    return {name: yaml.safe_load(path.read_text(encoding="utf-8"))["summary"] for name, path in study_files().items()}


def _tasks() -> dict[str, str]:
    return {name: task.summary for name, task in TASKS.items()}


def _providers() -> dict[str, str]:
    """Read names and summaries from the source files, because importing the providers would import torch."""
    rows = {}
    for name, module in listed_names(attnreg.__file__).items():
        if module.startswith(REGULARIZERS) and name[0].isupper() and name not in _NOT_BY_NAME:
            found = next(n for n in parsed(module).body if isinstance(n, ast.ClassDef) and n.name == name)
            rows[name] = (ast.get_docstring(found) or "").partition("\n")[0]
    return rows
