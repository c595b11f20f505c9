"""The built-in recipes: their names and files, found without importing them."""

from __future__ import annotations

import ast
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
    """Return a study file of one's own, by its path, or a built-in one, by its name."""
    path, files = Path(name), study_files()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    if name not in files:
        raise UsageError(
            f"Expected --study to be a YAML file or a built-in study, got {name!r}; see `attnreg list studies`."
            f"{did_you_mean(name, files)}"
        )
    return files[name]


def is_built_in(file: str) -> bool:
    """Whether a file is one of the built-in recipes."""
    return Path(file).resolve().parent == _folder().resolve()


def summary(path: Path) -> str:
    """Read the first line of a file's docstring without running the file."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def find_recipe(name: str) -> Path:
    """Return the file of a built-in recipe."""
    files = recipe_files()
    if name not in files:
        raise UsageError(
            f"Expected a recipe among {', '.join(files)}, got {name!r}; see `attnreg list recipes`."
            f"{did_you_mean(name, files)}"
        )
    return files[name]


def _folder() -> Path:
    """Return the recipes of the package that runs: within it where it is installed, beside it in a checkout.

    ``attnreg.recipes`` cannot be asked: where one checkout is installed and another one runs, it is that of the first.
    """
    package = Path(attnreg.__file__).parent
    return next(each for each in (package / "recipes", package.parent / "recipes") if (each / "__init__.py").is_file())
