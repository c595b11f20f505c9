"""Write files and folders atomically, and check them by ``SHA256SUMS``, in the format of ``sha256sum``."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from attnreg.errors import InputError

SUMS = "SHA256SUMS"
LOCK = ".lock"  # in the folder of a run, a comparison or a search


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")  # checksums assume "\n" on every system
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path, advice: str) -> None:
    """Refuse a folder that cannot be written to, before anything is computed for it."""
    if not os.access(folder, os.W_OK):
        raise InputError(f"Cannot write to the folder {folder}: {advice}.")


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that replaces ``path`` when the block ends without an error."""
    temporary, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    path.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(path)
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        mode = temporary.stat().st_mode & 0o666  # of new files; safetensors makes files for their owner alone
        for file in (entry for entry in temporary.rglob("*") if entry.is_file()):
            file.chmod(mode)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    finally:
        recover_folder(path)
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Restore a folder if :func:`replaced_folder` was interrupted between its two renames."""
    old = path.with_name(f".{path.name}.old")
    with suppress(FileNotFoundError):  # another process of the same run may have restored it first
        if old.is_dir() and not path.exists():
            old.rename(path)


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder's files to its ``SHA256SUMS``."""
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"{_checksum(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def checksums_of(texts: Mapping[str, str]) -> str:
    """Return the content of ``SHA256SUMS`` for files that will be written, from their texts by name."""
    return "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in texts.items())


def check_checksums(folder: Path) -> None:
    """Check that the files of a folder match its checksums; a folder without ``SHA256SUMS`` passes.

    A changed file or damaged ``SHA256SUMS`` is an ``InputError``, a missing file an ``OSError``.
    """
    if not (folder / SUMS).exists():
        return
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        checksum, separator, name = line.partition("  ")
        if not separator or Path(name).name != name:
            raise InputError(f"{SUMS} is damaged")
        if _checksum(folder / name) != checksum:
            raise InputError(f"{name} has changed since it was written (if this is intended, delete {SUMS})")


def _checksum(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()
