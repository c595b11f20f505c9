"""Find recipes without importing them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

from attnreg.errors import InputError, UsageError, did_you_mean
from attnreg.experiments.runs.command import RecipeCommand

SUFFIX = ".py"


def recipe_files() -> dict[str, Path]:
    """Return the files of the built-in recipes, by name."""
    spec = importlib.util.find_spec("attnreg.recipes")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    return {path.stem.replace("_", "-"): path for path in sorted(folder.glob("[a-z]*.py"))}


def summary(path: Path) -> str:
    """Read the first line of a file's docstring without running the file."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def find_recipe(name: str) -> Path:
    """Return the file of a built-in recipe.

    Raises:
        UsageError: if no built-in recipe has this name.
    """
    files = recipe_files()
    if name not in files:
        raise UsageError(
            f"Expected a recipe among {', '.join(files)}, got {name!r}; see `attnreg list recipes`."
            f"{did_you_mean(name, files)}"
        )
    return files[name]


def load_command(name: str) -> RecipeCommand:
    """Load the command of a built-in recipe, or of your own recipe file.

    Raises:
        UsageError: if the recipe or the file does not exist.
        InputError: if the file cannot be imported or does not define exactly one recipe.
    """
    if not name.endswith(SUFFIX):
        find_recipe(name)
        module = importlib.import_module(f"attnreg.recipes.{name.replace('-', '_')}")
    else:
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"Recipe file {name} not found.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise InputError(f"Cannot import the recipe in {name}: {type(error).__name__}: {error}") from error
    commands = [value for value in vars(module).values() if isinstance(value, RecipeCommand)]
    if len(commands) != 1:
        raise InputError(
            f"{name} must define exactly one function under `@attnreg.experiments.recipe(...)`, found {len(commands)}."
        )
    return commands[0]
