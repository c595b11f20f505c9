"""Turn a recipe, which is a function of a run, into a command with the options that all recipes share."""

from __future__ import annotations

import functools
import inspect
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from attnreg.arguments import LARGEST_WHOLE
from attnreg.errors import InputError, StoppedError, UsageError, did_you_mean
from attnreg.experiments.folder.run_folder import RunFolder, in_free_folder
from attnreg.experiments.options.files import find_recipe, load_file
from attnreg.experiments.options.option import (
    NEEDS,
    GroupedCommand,
    check_needs,
    check_pairs,
    flag_of,
    is_given,
    is_set,
    together,
)
from attnreg.experiments.options.settings import OPTIONS, Settings, data_name, shared_options, task_of
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.loading.files import folder_with_data, names_of, not_on_hub
from attnreg.experiments.tasks.models.place import check_there

# Trackers of accelerate, and their packages.
_SAME_NAMES = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
_PACKAGES = {**{name: (name,) for name in _SAME_NAMES}, "tensorboard": ("tensorboard", "tensorboardX")}  # of trackers

Excludes = Sequence[tuple[str, str] | tuple[str, str, str]]


class RecipeCommand(GroupedCommand):
    """The command of a recipe."""

    typed_name = ""  #: after `attnreg recipe`
    check: Callable[[Settings], None] | None = None  #: of the settings, besides the types of the options
    excludes: Excludes = ()  #: pairs of options of which a run takes one, and shared options that the recipe refuses

    def settings(self, args: Sequence[str]) -> Settings:
        """Return the settings of a run with these arguments, without running it."""
        with self._context(args) as context:
            return _settings(context.params)

    def typed(self, args: Sequence[str]) -> set[str]:
        """Return the names of the options that these arguments set."""
        with self._context(args) as context:
            return {name for name in context.params if is_given(name)}

    def _context(self, args: Sequence[str]) -> click.Context:
        name = f"attnreg recipe {self.typed_name}"
        if shown := {"--help", "--help-all"} & {*args}:  # which would end the program
            raise UsageError(f"Expected options of a run, got {min(shown)}: for help, use `{name} {min(shown)}`.")
        return self.make_context(name, list(args))


def recipe(
    name: str,
    *own: Callable[[Any], Any],
    task: str = "agreement",
    defaults: Mapping[str, Any] | None = None,
    check: Callable[[Settings], None] | None = None,
    excludes: Excludes = (),
) -> Callable[[Callable[..., None]], RecipeCommand]:
    """Make a command of a recipe function.

    Args:
        name: name of the recipe.
        own: the options of this recipe alone, from :func:`attnreg.experiments.option`; the function receives them
            by name.
        task: default of ``--task``.
        defaults: other defaults of shared options, by name, such as ``{"epochs": 10}``.
        check: a function of the run's settings that raises an error if they make no sense together.
        excludes: rows of an option and the reason why the recipe refuses it, or of two options that cannot be
            combined, and the reason.

    Returns:
        A decorator for a function that takes a :class:`attnreg.experiments.Run` and these options. The
        function's docstring becomes the help of the command.

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
            settings = _settings(options)
            check_paths(settings)
            settings, note = in_free_folder(settings)
            if note is not None and os.environ.get("RANK", "0") == "0":
                click.echo(note, err=True)
            try:
                folder = RunFolder(settings.output_dir)
                if (report := folder.last_report(settings)) is not None:
                    click.echo(report)
                    return
                if (folder.path / "config.json").is_file():
                    folder.check(settings)  # a run with the same options has read these data
                from attnreg.experiments.setup.rows import read_data  # late: these are slow to import

                data = read_data(settings)
                folder.check(settings)
                from attnreg.experiments.runs.run import Run

                run = Run(settings, data)
            except KeyboardInterrupt as error:
                raise StoppedError("Stopped by SIGINT before the run began.", exit_code=128 + signal.SIGINT) from error
            function(run, **settings.own)

        options = together((*own, *shared_options("task", "all", "run", defaults={**(defaults or {}), "task": task})))
        command = click.command(name, cls=RecipeCommand)(options(callback))
        command.check, command.excludes = check, excludes
        return command

    return decorate


def check_paths(settings: Settings) -> None:
    """Refuse trackers, data and models that do not exist, before slow imports."""
    check_trackers(settings.report_to)
    task = settings.chosen_task()
    if settings.data_dir is not None and not kind_class(task.kind).reads_images:
        folder_with_data(Path(settings.data_dir), names_of(task))
    elif settings.data_dir is None and task.hub is None and task.embedded is None:
        raise not_on_hub(task)
    is_typed = settings.model is not None
    if (model := settings.model or task.model) is not None and (is_typed or settings.data_dir is not None):
        check_there(model, asked=is_typed)


def check_trackers(names: Sequence[str]) -> None:
    """Check, without importing them, that all trackers are installed; accelerate would skip missing ones silently."""
    available = available_trackers() if names else []
    if missing := [name for name in names if name not in available]:
        raise InputError(
            f"Expected --report-to to be an installed tracker ({', '.join(available) or 'there is none'}), got "
            f"{', '.join(missing)}. Install its package.{did_you_mean(missing[0], available)}"
        )


def available_trackers() -> list[str]:
    """Return the trackers that are installed; a folder such as ``wandb/``, which a tracker makes, is no package."""
    specs_of = {name: [*map(find_spec, packages)] for name, packages in _PACKAGES.items()}
    return sorted(name for name, specs in specs_of.items() if any(spec is not None and spec.origin for spec in specs))


def load_command(name: str) -> RecipeCommand:
    """Load the command of a built-in recipe, or of a recipe file."""
    is_own = name.endswith(".py")
    path = Path(name) if is_own else find_recipe(name)
    if not path.is_file():
        raise UsageError(f"Recipe file {name} not found.")
    return _load_command(name, path, path.resolve(), path.stat().st_mtime_ns)


@functools.cache  # a search asks for the same command hundreds of times
def _load_command(name: str, path: Path, real_path: Path, modified: int) -> RecipeCommand:
    stem = path.stem if name.endswith(".py") else f"attnreg.recipes.{path.stem}"
    module = load_file(path, stem, "recipe")
    commands = [value for value in vars(module).values() if isinstance(value, RecipeCommand)]
    if len(commands) != 1:
        raise InputError(
            f"{name} must define exactly one function under `@attnreg.experiments.recipe(...)`, got {len(commands)}."
        )
    commands[0].typed_name = name
    return commands[0]


def _settings(options: Mapping[str, Any]) -> Settings:
    """Return the settings of the current command with these options."""
    command = click.get_current_context().command
    for parameter in command.params:
        value = options.get(str(parameter.name))
        if isinstance(value, float) and not math.isfinite(value):  # click's ranges accept nan and inf
            raise UsageError(f"Expected a finite number for {parameter.opts[0]}, got {value}.")
        if isinstance(value, int) and value > LARGEST_WHOLE:
            raise UsageError(f"Expected at most {LARGEST_WHOLE} for {parameter.opts[0]}, got {value}.")
    recipe_options = dict(options)
    shared = {option.name: recipe_options.pop(option.name) for option in OPTIONS}
    task = task_of(shared)
    if task.evaluation_only:
        advice = f"run `attnreg evaluate RUN --task {task.name}`"
        raise UsageError(f"Task {task.name!r} is for evaluation only. Train on another task, then {advice}.")
    if task.name == "custom" and shared["data_dir"] is None:
        raise UsageError("--task custom needs --data-dir.")
    shared["select"] = shared["select"] or ("last" if shared["patience"] is None else "best")
    check_needs(shared, NEEDS, flag_of)
    is_stopped = shared["patience"] is not None or shared["select"] == "best"
    shared["stop_on"] = shared["stop_on"] or ("held-out" if is_stopped else None)
    if shared["schedule"] == "constant" and shared["lr_warmup"] and is_given("lr_warmup"):
        raise UsageError(
            f"--schedule constant has no warm-up, got --lr-warmup {shared['lr_warmup']:g}: use --schedule "
            "constant_with_warmup, or remove --lr-warmup."
        )
    for name in ("epochs", "batch_size", "learning_rate"):
        shared[name] = getattr(task, name) if shared[name] is None else shared[name]
    data = data_name(task.name, shared["data_dir"])
    shared["output_dir"] = shared["output_dir"] or Path("runs") / f"{command.name}-{data}-seed{shared['seed']}"
    flags = {str(param.name): "/".join((param.opts[0], *param.secondary_opts[:1])) for param in command.params}
    source = inspect.unwrap(command.callback or _settings).__code__.co_filename
    settings = Settings(recipe=str(command.name), own=recipe_options, flags=flags, recipe_file=source, **shared)
    assert isinstance(command, RecipeCommand)
    values = {**vars(settings), **recipe_options}
    for name, reason in (row for row in command.excludes if len(row) == 2):
        if is_set(name, values):
            raise UsageError(f"Recipe {command.name} {reason}: remove {settings.flag(name)}.")
    check_pairs(values, [row for row in command.excludes if len(row) == 3], settings.flag)
    if command.check is not None:
        command.check(settings)
    return settings
