"""The lock of a folder: one process at a time writes to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from attnreg.errors import InputError

LOCK = ".lock"


@contextmanager
def locked(folder: Path, busy: str) -> Iterator[None]:
    """Make a folder and lock it within the block; the lock also ends with the process.

    Raises:
        InputError: if the folder cannot be written to; with the message ``busy``, if another process has locked it.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        acquired = lock.acquire()
    except Timeout as error:
        raise InputError(busy) from error
    except OSError as error:
        raise InputError(f"Cannot write to --output-dir: {error}.") from error
    with acquired:
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process has locked a folder."""
    if not (folder / LOCK).is_file():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True
