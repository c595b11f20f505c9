"""The files of a run: recipes, studies, files with your classes, and data; and whether they have changed."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attnreg
from attnreg import __version__
from attnreg._files import LOCK
from attnreg.errors import InputError, UsageError, did_you_mean
from attnreg.experiments.tasks.loading.files import is_data


@functools.cache  # a study asks for them thousands of times
def recipe_files() -> Mapping[str, Path]:
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
    return _file_named(name, study_files(), "--study to be a YAML file or a built-in study", "studies")


def is_built_in(file: str) -> bool:
    """Whether a file is one of the built-in recipes."""
    return Path(file).resolve().parent == _folder().resolve()


def summary(path: Path, class_name: str | None = None) -> str:
    """Read the first line of the docstring of a class or, without its name, of a recipe, without running the file.

    A recipe is the first decorated function of its file.
    """
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    classes = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == class_name)
    recipes = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list)
    documented = next(recipes) if class_name is None else next(classes)
    return (ast.get_docstring(documented) or "").partition("\n")[0]


def find_recipe(name: str) -> Path:
    """Return the file of a built-in recipe."""
    return _file_named(name, recipe_files(), f"a recipe among {', '.join(recipe_files())}", "recipes")


def _file_named(name: str, files: Mapping[str, Path], expected: str, plural: str) -> Path:
    if name not in files:
        raise UsageError(f"Expected {expected}, got {name!r}; see `attnreg list {plural}`.{did_you_mean(name, files)}")
    return files[name]


def _folder() -> Path:
    """Return the recipes of the package that runs: within it where it is installed, beside it in a checkout."""
    # Not `attnreg.recipes`, which is that of the installed checkout, even if another checkout runs.
    package = Path(attnreg.__file__).parent
    return next(
        folder for folder in (package / "recipes", package.parent / "recipes") if (folder / "__init__.py").is_file()
    )


NAMES = {
    "recipe": "the recipe's file",
    "provider": "the provider's file",
    "data": "the data",
    "model": "the model",
    "attnreg": "attnreg's version",
}


# A class in a file, as in `mine.py:DropSelf(0.2) & DropHead(0.1)`.
CLASS_IN_FILE = re.compile(r"""((?:[A-Za-z]:)?[^\s&(),:=[\]'"]+\.py):([A-Za-z_]\w*)""")

_PROVIDERS: dict[str, Path] = {}  # provider files that were loaded, by their name in tracebacks


def load_file(path: Path, name: str, content: str) -> ModuleType:
    """Run a Python file as a module; ``content`` is what it holds, for the error if it cannot be run."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if content == "provider":
        _PROVIDERS[str(spec.origin)] = path
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"Cannot import the {content} in {path}: {type(error).__name__}: {error}") from error
    return module


def place_of(error: BaseException) -> str | None:
    """Return file, line and function of an error in a loaded provider; ``None`` for other errors."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _PROVIDERS]
    return f"{_PROVIDERS[frames[-1].filename]}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else None


def changed(content: Mapping[str, str | None], config: Mapping[str, Any]) -> list[str]:
    """Name the files that have changed since a run was started; what its ``config.json`` lacks counts as unchanged."""
    saved = {**config.get("content", {}), **{name: config[name] for name in ("attnreg",) if name in config}}
    current = {**content, "attnreg": __version__}
    return [NAMES[name] for name, value in current.items() if name in saved and saved[name] != value]


def code_of(values: Iterable[object]) -> str | None:
    """Return checksums of the files whose classes the values of options name, or ``None``."""
    files = sorted({file for value in values if isinstance(value, str) for file, _ in CLASS_IN_FILE.findall(value)})
    return " ".join(checksum(file) if Path(file).is_file() else "absent" for file in files) or None


def checksum(path: str) -> str:
    """Return the checksum of a file, or of a folder's files and their names, without READMEs, results, predictions."""
    root = Path(path).resolve()
    files = [root] if root.is_file() else sorted(_files_in(root))
    return _checksum_of(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files), root)


def checksum_if_there(path: str | None) -> str | None:
    """Return the :func:`checksum`; ``None`` without a path, or where there is nothing, such as a model on the hub."""
    return checksum(path) if path and Path(path).exists() else None


def _files_in(root: Path) -> Iterator[Path]:
    """Yield every file of a folder once, also of folders that its links lead to."""
    seen = set[Path]()
    for folder, folders, names in os.walk(root, followlinks=True):
        counts = (real := Path(folder).resolve()) not in seen and (LOCK not in names or real == root)
        seen.add(real)
        folders[:] = sorted(name for name in folders if is_data(name) and counts)
        names = [name for name in names if is_data(name) and counts]
        yield from (file for name in names if (file := Path(folder, name)).is_file())


@functools.lru_cache(maxsize=16)  # every run of a comparison asks for it
def _checksum_of(files: Sequence[tuple[Path, int, int]], root: Path) -> str:
    checksum = hashlib.sha256()
    for file, _, _ in files:
        checksum.update(file.relative_to(root).as_posix().encode() + b"\0")
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                checksum.update(block)
    return checksum.hexdigest()
