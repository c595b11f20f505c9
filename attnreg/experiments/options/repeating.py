"""The command that repeats a run."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from pathlib import Path

from attnreg.experiments.options.settings import NOT_COMPARED, Settings, as_typed


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
    if settings.recipe_file is None:
        return True
    spec = importlib.util.find_spec("attnreg.recipes")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return Path(settings.recipe_file).resolve().parent in [Path(folder).resolve() for folder in folders]
