"""What the commands that make many runs have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attnreg.experiments.options.option import is_given, option
from attnreg.experiments.options.settings import OUTPUT, shared_options

RUNNING = "Running"
THREADS = option(
    "--threads", group=RUNNING, type=click.IntRange(min=1), default=1,
    help="CPU threads per run; results may differ in the last digits.",
)  # fmt: skip


def jobs_option(what: str) -> Callable[[Any], Any]:
    """Make the option for how many runs, or trials, are made at a time."""
    usual = "(default: cores / threads, at most four; one on a GPU)."
    return option("--jobs", group=RUNNING, type=click.IntRange(min=1), help=f"{what} {usual}")


def of_all_runs(command: str) -> list[Callable[[Any], Any]]:
    """Make the options of all runs, and that of the output folder."""
    folder = option(
        "--output-dir", group=OUTPUT, type=click.Path(path_type=Path),
        help=f"Folder for the results (default: runs/{command}-TASK; of a custom task, the data's name).",
    )  # fmt: skip
    return [folder, *shared_options("task", "all")]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given; a recipe may have other defaults."""
    return {name: value for name, value in options.items() if is_given(name)}
