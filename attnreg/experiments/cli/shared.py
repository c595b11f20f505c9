"""What the commands that make many runs have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from attnreg.errors import UsageError


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, and the task; a recipe may have other defaults."""
    source = click.get_current_context().get_parameter_source
    default = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if name == "task" or source(name) is not default}


def without_rows(instead: str) -> Callable[[Any], Any]:
    """Make a hidden option that refuses ``--validation-rows``, and says what to do instead."""

    def refuse(context: click.Context, parameter: click.Parameter, value: int | None) -> None:
        if value is not None:
            raise UsageError(f"--validation-rows is only for `attnreg recipe`: {instead}.")

    return click.option("--validation-rows", type=int, hidden=True, expose_value=False, callback=refuse)
