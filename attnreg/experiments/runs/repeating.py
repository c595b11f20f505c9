"""The command that repeats a run."""

from __future__ import annotations

import dataclasses
import shlex

from attnreg.experiments.runs.catalogue import recipe_files
from attnreg.experiments.runs.settings import NOT_COMPARED, Settings, as_typed


def command_of(settings: Settings) -> str:
    """Return the command that repeats a run: its recipe, and all options that affect the results.

    Example:
        >>> from attnreg.experiments.runs.catalogue import load_command
        >>> command_of(load_command("mixout").settings(["--p", "0.5", "--seed", "3"]))
        'attnreg recipe mixout --task agreement --max-length 32 ... --select last --seed 3 --p 0.5'
    """
    shared = [each for each in dataclasses.fields(Settings) if "option" in each.metadata]
    kept = [each for each in shared if each.name not in NOT_COMPARED and each.name != "task"]
    changed = [each.name for each in kept if getattr(settings, each.name) != each.default]
    values = {"task": settings.task, **{name: getattr(settings, name) for name in changed}, **settings.own}
    words = ["attnreg", "recipe", settings.recipe if _is_built_in(settings) else shlex.quote(str(settings.recipe_file))]
    for name, value in values.items():
        if value is False and name in settings.off_flags:
            words.append(settings.off_flags[name])
        else:
            words.append(as_typed(settings.flag(name), str(value) if name == "data_dir" else value))
    return " ".join(word for word in words if word)


def _is_built_in(settings: Settings) -> bool:
    files = recipe_files()
    return settings.recipe in files and settings.recipe_file in (None, *map(str, files.values()))
