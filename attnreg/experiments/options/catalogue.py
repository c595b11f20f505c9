"""The built-in recipes: their names and files, found without importing them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import attnreg
from attnreg.errors import UsageError, did_you_mean


def recipe_files() -> dict[str, Path]:
    """Return the files of the built-in recipes, by name."""
    return {path.stem.replace("_", "-"): path for path in sorted(_folder().glob("[a-z]*.py"))}


def study_files() -> dict[str, Path]:
    """Return the built-in study files, by name."""
    return {path.stem: path for path in sorted((_folder() / "studies").glob("*.yaml"))}


def find_study(name: str) -> Path:
    """Return a study file by its path, or a built-in one, by its name."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    return _found(name, study_files(), "--study to be a YAML file or a built-in study", "studies")


def is_built_in(file: str) -> bool:
    """Whether a file is one of the built-in recipes."""
    return Path(file).resolve().parent == _folder().resolve()


def summary(path: Path) -> str:
    """Read the first line of the docstring of a recipe, which is a decorated function, without running its file."""
    functions = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef))
    return (ast.get_docstring(next(function for function in functions if function.decorator_list)) or "").partition(
        "\n"
    )[0]


def find_recipe(name: str) -> Path:
    """Return the file of a built-in recipe."""
    return _found(name, recipe_files(), f"a recipe among {', '.join(recipe_files())}", "recipes")


def _found(name: str, files: Mapping[str, Path], expected: str, what: str) -> Path:
    if name not in files:
        raise UsageError(f"Expected {expected}, got {name!r}; see `attnreg list {what}`.{did_you_mean(name, files)}")
    return files[name]


def _folder() -> Path:
    """Return the recipes of the package that runs: within it where it is installed, beside it in a checkout."""
    # Not `attnreg.recipes`: where one checkout is installed and another one runs, it is that of the first.
    package = Path(attnreg.__file__).parent
    return next(
        folder for folder in (package / "recipes", package.parent / "recipes") if (folder / "__init__.py").is_file()
    )
