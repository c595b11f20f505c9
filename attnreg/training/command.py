"""From a recipe, a function of a run, to a command with the options that all recipes share."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from attnreg.errors import UsageError
from attnreg.tasks.kinds import KINDS
from attnreg.tasks.task import TASKS, choose_task
from attnreg.training.settings import TASK_OPTIONS as TASK_OPTION_NAMES
from attnreg.training.settings import Settings

LARGEST = 2**31 - 1
_POSITIVE = click.IntRange(min=1)
TASK_OPTIONS = (
    click.option("--kind", type=click.Choice(list(KINDS)), help="Of --task custom; by default classification."),
    click.option("--text-columns", help="Of --task custom: what is read, one column or, as in a,b, two."),
    click.option("--label-column", help="Of --task custom: what is to be answered; by default label."),
    click.option("--choice-columns", help="Of --task custom of kind multiple-choice, as in a,b,c."),
    click.option("--metric", help="What chooses the best epoch; by default the task's."),
)


def _task(default: str) -> Callable[[Any], Any]:
    return click.option("--task", default=default, show_default=True, help=f"One of {', '.join(TASKS)}.")


# What the runs of a comparison have in common.
COMMON = (
    _task("agreement"),
    *TASK_OPTIONS,
    click.option("--model", help="Folder or hub name; by default the task's."),
    click.option(
        "--data-dir", help="Folder with train and validation as .jsonl[.gz], .csv, .tsv or .parquet; no network needed."
    ),
    click.option("--epochs", type=click.IntRange(1, 100_000), help="By default the task's."),
    click.option("--batch-size", type=_POSITIVE, help="By default the task's."),
    click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), help="By default the task's."),
    click.option("--max-length", type=click.IntRange(min=4), help="In tokens; by default the task's."),
    click.option("--train-size", type=_POSITIVE, help="Train on so many rows, drawn by the seed."),
    click.option(
        "--evaluate-every", type=_POSITIVE, default=1, show_default=True, help="In epochs; always after the last one."
    ),
    click.option("--device", type=click.Choice(["cpu", "cuda", "mps"]), help="By default the best there is."),
    click.option("--mixed-precision", type=click.Choice(["bf16", "fp16"]), help="By default everything is float32."),
)
_OF_ONE_RUN = (
    click.option(
        "--validation-rows",
        type=_POSITIVE,
        help="Score on so many rows held out from train, not on dev: to choose options by.",
    ),
    click.option("--seed", type=click.IntRange(0, LARGEST), default=0, show_default=True),
    click.option("--output-dir", type=click.Path(path_type=Path), help="By default runs/RECIPE-TASK-seedN."),
    click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --output-dir."),
    click.option("--save-steps", type=_POSITIVE, help="Write a checkpoint every so many steps, not only each epoch."),
    click.option(
        "--report-to", multiple=True, help="tensorboard, wandb or another tracker of accelerate's; may be repeated."
    ),
)


class RecipeCommand(click.Command):
    """The command of a recipe."""

    def settings(self, args: Sequence[str]) -> Settings:
        """What a run with these arguments would be, without running it.

        Raises:
            click.UsageError: if an argument is wrong.
        """
        with self.make_context(self.name, list(args)) as context:
            return _settings(str(self.name), dict(context.params))

    def given(self, args: Sequence[str]) -> set[str]:
        """The names of the options that are typed in these arguments."""
        with self.make_context(self.name, list(args)) as context:
            typed = click.core.ParameterSource.COMMANDLINE
            return {name for name in context.params if context.get_parameter_source(name) is typed}


def recipe(
    name: str, *own: Callable[[Any], Any], task: str = "agreement"
) -> Callable[[Callable[..., None]], RecipeCommand]:
    """Make a command of a recipe.

    Args:
        name: the recipe's name.
        own: its own options, as :func:`click.option` gives them. What the options are called, the function's
            parameters are called.
        task: the default of ``--task``.

    Returns:
        a decorator for a function that takes a :class:`attnreg.training.Run` and its own options; its docstring is
        the command's help.

    Example:
        >>> @recipe("nothing", click.option("--times", default=1))
        ... def nothing(run, times):
        ...     '''Do nothing, several times.'''
        >>> nothing.name
        'nothing'
    """

    def decorate(function: Callable[..., None]) -> RecipeCommand:
        @functools.wraps(function)
        def callback(**options: Any) -> None:
            settings = _settings(name, options)
            from attnreg.training.run import Run

            function(Run(settings), **settings.own)

        for option in reversed((*own, _task(task), *COMMON[1:], *_OF_ONE_RUN)):
            callback = option(callback)
        return click.command(name, cls=RecipeCommand)(callback)

    return decorate


def provider_option(*, required: bool = True) -> Callable[[Any], Any]:
    """``--provider``, an expression or a YAML file; the recipe is given the expression.

    Args:
        required: whether it must be given; otherwise it may be ``None``.
    """

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
        from attnreg.expression import read_expression  # late: it imports torch

        return None if text is None else read_expression(text)

    return click.option(
        "--provider",
        required=required,
        callback=read,
        metavar="EXPRESSION|FILE.yaml",
        help="Providers with literal arguments, joined by &; see `attnreg list providers`.",
    )


def _settings(name: str, options: dict[str, Any]) -> Settings:
    for parameter in click.get_current_context().command.params:
        value = options.get(str(parameter.name))
        if isinstance(value, float) and not math.isfinite(value):  # which click's ranges let through
            raise UsageError(f"Expected a finite number for {parameter.opts[0]}, got {value}.")
        if isinstance(value, int) and value > LARGEST:
            raise UsageError(f"Expected at most {LARGEST} for {parameter.opts[0]}, got {value}.")
    own = dict(options)
    shared = {f.name: own.pop(f.name) for f in dataclasses.fields(Settings) if f.name in own}
    task = choose_task(shared["task"], **{name: shared[name] for name in TASK_OPTION_NAMES})
    if task.evaluation_only:
        raise UsageError(
            f"Expected a task to train on, got {task.name!r}: train on another one, then `attnreg evaluate RUN --task "
            f"{task.name}`."
        )
    if task.name == "custom" and shared["data_dir"] is None:
        raise UsageError("Expected --data-dir with --task custom, got none.")
    for option in ("epochs", "batch_size", "learning_rate", "max_length"):
        if shared[option] is None:
            shared[option] = getattr(task, option)
    shared["output_dir"] = shared["output_dir"] or Path("runs") / f"{name}-{task.name}-seed{shared['seed']}"
    flags = {str(parameter.name): parameter.opts[0] for parameter in click.get_current_context().command.params}
    return Settings(recipe=name, own=own, flags=flags, **shared)
