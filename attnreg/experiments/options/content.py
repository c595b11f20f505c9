"""What a run's results depend on besides its options: the version, the recipe's file and the data's files."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnreg import __version__

NAMES = {"recipe": "the recipe's file", "data": "the data", "attnreg": "attnreg's version"}


def content_of(recipe_file: str | None, data_dir: str | None) -> dict[str, str | None]:
    """Return checksums of the recipe and of all files of the data folder; other data has none."""
    return {
        "recipe": _checksum(recipe_file) if recipe_file and Path(recipe_file).is_file() else None,
        "data": None if data_dir is None else _checksum(data_dir),
    }


def changed(mine: Mapping[str, str | None], config: Mapping[str, Any]) -> list[str]:
    """Name what has changed since a run was started; what its ``config.json`` does not tell counts as unchanged.

    Example:
        >>> changed({"recipe": "a", "data": None}, {"attnreg": "0.0.1", "content": {"recipe": "b"}})
        ["the recipe's file", "attnreg's version"]
    """
    theirs = {**config.get("content", {}), **{name: config[name] for name in ("attnreg",) if name in config}}
    both = {**mine, "attnreg": __version__}
    return [NAMES[name] for name, value in both.items() if name in theirs and theirs[name] != value]


def _checksum(path: str) -> str:
    root = Path(path).resolve()
    files = [root] if root.is_file() else [each for each in sorted(root.rglob("*")) if each.is_file()]
    shown = [each for each in files if not any(part[0] == "." for part in each.relative_to(root).parts)]
    return _checksum_of(tuple((each, each.stat().st_mtime_ns, each.stat().st_size) for each in shown), root)


@functools.lru_cache(maxsize=16)  # a comparison asks for each of its runs
def _checksum_of(files: Sequence[tuple[Path, int, int]], root: Path) -> str:
    checksum = hashlib.sha256()
    for file, _, _ in files:
        checksum.update(file.relative_to(root).as_posix().encode() + b"\0")
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                checksum.update(block)
    return checksum.hexdigest()
