"""Write and check ``SHA256SUMS``, the checksums of a folder's files in the format of ``sha256sum``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

SUMS = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder's files to its ``SHA256SUMS``.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("whole")
        >>> write_checksums(folder)
        >>> _ = (folder / "a.txt").write_text("holed")
        >>> check_checksums(folder)
        Traceback (most recent call last):
            ...
        ValueError: a.txt has changed since it was written (if this is intended, delete SHA256SUMS)
    """
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"{_checksum(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def checksums_of(texts: Mapping[str, str]) -> str:
    """Return the content of ``SHA256SUMS`` for files that will be written, given their texts by name."""
    return "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in texts.items())


def check_checksums(folder: Path) -> None:
    """Check that the files of a folder match its checksums; a folder without ``SHA256SUMS`` passes.

    Raises:
        ValueError: if a file has changed, or ``SHA256SUMS`` is damaged.
        OSError: if a file is missing.
    """
    if not (folder / SUMS).exists():
        return
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        checksum, separator, name = line.partition("  ")
        if not separator or Path(name).name != name:
            raise ValueError(f"{SUMS} is damaged")
        if _checksum(folder / name) != checksum:
            raise ValueError(f"{name} has changed since it was written (if this is intended, delete {SUMS})")


def _checksum(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()
