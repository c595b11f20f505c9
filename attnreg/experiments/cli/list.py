"""``attnreg list recipes|tasks|providers``."""

from __future__ import annotations

import ast
from pathlib import Path

import click

from attnreg.experiments.runs.catalogue import recipe_files, summary
from attnreg.experiments.tasks.task import TASKS

_NOT_BY_NAME = {"MaskProvider", "Compose"}  # the base class, and the class behind `&`


@click.command("list", epilog="Example: attnreg list tasks")
@click.argument("what", type=click.Choice(["recipes", "tasks", "providers"]))
def list_(what: str) -> None:
    """List the recipes, tasks or providers."""
    rows = {"recipes": _recipes, "tasks": _tasks, "providers": _providers}[what]()
    width = max(len(name) for name in rows)
    for name, text in rows.items():
        click.echo(f"{name:<{width}}  {text}")


def _recipes() -> dict[str, str]:
    return {name: summary(path) for name, path in recipe_files().items()}


def _tasks() -> dict[str, str]:
    return {name: task.summary for name, task in TASKS.items()}


def _providers() -> dict[str, str]:
    """Read names and summaries from the source files, because importing the providers would import torch."""
    folder = Path(__file__).parent.parent / "providers"
    rows = {}
    for path in (*sorted(folder.glob("[a-z]*.py")), folder.parent / "provider.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in _NOT_BY_NAME:
                rows[node.name] = (ast.get_docstring(node) or "").partition("\n")[0]
    return rows
