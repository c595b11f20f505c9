"""What the commands that make many runs have in common."""

from __future__ import annotations

import os
from typing import Any

import click


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, and the task; a recipe may have other defaults."""
    source = click.get_current_context().get_parameter_source
    default = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if name == "task" or source(name) is not default}


def usual_jobs(threads: int, on_cpu: bool) -> int:
    """Return the number of runs at a time: as many as fit the cores, at most four; one on a GPU."""
    import torch

    if torch.cuda.is_available() and not on_cpu:
        return 1  # parallel runs would share the GPU's memory
    return max(1, min(4, (os.cpu_count() or 1) // threads))
