"""``SHA256SUMS``: what a folder's files must be, in the format of ``sha256sum``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

SUMS = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """Write down the checksums of a folder's files.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("whole")
        >>> write_checksums(folder)
        >>> _ = (folder / "a.txt").write_text("holed")
        >>> check_checksums(folder)
        Traceback (most recent call last):
            ...
        ValueError: a.txt is not as it was written (delete SHA256SUMS if you have changed it on purpose)
    """
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"{_checksum(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def checksums_of(texts: Mapping[str, str]) -> str:
    """The same for files that are still to be written, by name."""
    return "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in texts.items())


def check_checksums(folder: Path) -> None:
    """Raise if a file is not as it was when the checksums were written; a folder without checksums passes.

    Raises:
        ValueError: if one is not, or the checksums themselves cannot be read.
        OSError: if one is missing.
    """
    if not (folder / SUMS).exists():
        return
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        checksum, separator, name = line.partition("  ")
        if not separator or Path(name).name != name:
            raise ValueError(f"{SUMS} is not as it was written")
        if _checksum(folder / name) != checksum:
            raise ValueError(f"{name} is not as it was written (delete {SUMS} if you have changed it on purpose)")


def _checksum(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()
