"""Files that a run is made of: recipes, studies, classes of your own and data; and whether they have changed."""

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


NAMES = {
    "recipe": "the recipe's file",
    "provider": "the provider's file",
    "data": "the data",
    "attnreg": "attnreg's version",
}


# A class in a file, as in `mine.py:DropSelf(0.2) & DropHead(0.1)`.
CLASS_IN_FILE = re.compile(r"""((?:[A-Za-z]:)?[^\s&(),:=[\]'"]+\.py):([A-Za-z_]\w*)""")

_OWN: dict[str, Path] = {}  # files of providers that were run, by the name that tracebacks give


def load_file(path: Path, name: str, what: str) -> ModuleType:
    """Run a Python file as a module; ``what`` it holds, for the error if it cannot be run."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if what == "provider":
        _OWN[str(spec.origin)] = path
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"Cannot import the {what} in {path}: {type(error).__name__}: {error}") from error
    return module


def place_of(error: BaseException) -> str | None:
    """Return file, line and function where an error arose in a provider from a file; ``None`` for other errors."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _OWN]
    return f"{_OWN[frames[-1].filename]}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else None


def changed(mine: Mapping[str, str | None], config: Mapping[str, Any]) -> list[str]:
    """Name what has changed since a run was started; what its ``config.json`` does not tell counts as unchanged."""
    theirs = {**config.get("content", {}), **{name: config[name] for name in ("attnreg",) if name in config}}
    both = {**mine, "attnreg": __version__}
    return [NAMES[name] for name, value in both.items() if name in theirs and theirs[name] != value]


def code_of(values: Iterable[object]) -> str | None:
    """Return a checksum of the files whose classes values of options name, if any."""
    files = sorted({file for value in values if isinstance(value, str) for file, _ in CLASS_IN_FILE.findall(value)})
    return " ".join(checksum(file) if Path(file).is_file() else "absent" for file in files) or None


def checksum(path: str) -> str:
    """Return the checksum of a file, or of a folder's files and their names, without hidden ones and results."""
    root = Path(path).resolve()
    files = [root] if root.is_file() else sorted(_files_in(root))
    return _checksum_of(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files), root)


def _files_in(root: Path) -> Iterator[Path]:
    """Yield the files of a folder, and of folders that links in it lead to, once."""
    seen = set[Path]()
    for place, folders, names in os.walk(root, followlinks=True):
        counts = (real := Path(place).resolve()) not in seen and (LOCK not in names or real == root)
        seen.add(real)
        folders[:] = sorted(folder for folder in folders if folder[0] != "." and counts)
        names = [name for name in names if name[0] != "." and counts]
        yield from (file for name in names if (file := Path(place, name)).is_file())


@functools.lru_cache(maxsize=16)  # a comparison asks for each of its runs
def _checksum_of(files: Sequence[tuple[Path, int, int]], root: Path) -> str:
    checksum = hashlib.sha256()
    for file, _, _ in files:
        checksum.update(file.relative_to(root).as_posix().encode() + b"\0")
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                checksum.update(block)
    return checksum.hexdigest()
