"""Writing folders so that a reader never sees half of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder beside ``path``; it takes the place of ``path`` when the block ends without an error.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "weights"
        >>> with replaced_folder(folder) as new:
        ...     _ = (new / "a.txt").write_text("whole")
        >>> (folder / "a.txt").read_text()
        'whole'
    """
    path = Path(path)
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        if path.exists():
            path.rename(old)
        new.rename(path)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
