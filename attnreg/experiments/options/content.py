"""What a run's results depend on besides its options: the version, files of code and the data's files."""

from __future__ import annotations

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

from attnreg import __version__
from attnreg._files import LOCK
from attnreg.errors import InputError

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
    """Yield the files of a folder, also behind links to other folders, each of which is looked into once."""
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
