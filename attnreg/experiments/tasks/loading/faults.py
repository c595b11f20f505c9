"""Look into data files, to refuse with one sentence what would be misread."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.loading.folder import format_of, suffix_of

try:
    import zstandard
except ImportError:  # it is an extra of `datasets`
    zstandard = None
DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error, *(() if zstandard is None else (zstandard.ZstdError,)))
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
_UNPACKERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def opened(file: Path) -> BinaryIO:
    """Open a file to read its bytes, unpacked."""
    packed = file.suffix.lower()
    if packed != ".zst":
        return cast(BinaryIO, _UNPACKERS.get(packed, open)(file, "rb"))
    if zstandard is None:
        raise InputError(f"Reading {file} needs the package zstandard: pip install zstandard.")
    return io.BytesIO(_unpacked(file.read_bytes()))


def _unpacked(frames: bytes) -> bytes:
    """Unpack zstandard's frames; its own reader takes a file that is cut off for a whole one."""
    parts = []
    while frames:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(frames))
        if not frame.eof:
            raise EOFError("Compressed file ended before the end of a frame")
        frames = frame.unused_data
    return b"".join(parts)


def columns_in(file: Path, separator: str, quoting: Literal[0, 3], wanted: Collection[str]) -> list[str]:
    """Return the column names in the first line of a table in text form.

    Raises if a wanted column is there twice, or the columns are separated by another character.
    """
    try:
        with opened(file) as content:
            lines = io.TextIOWrapper(content, encoding="utf-8-sig", errors="replace", newline="")
            columns = next((row for row in csv.reader(lines, delimiter=separator, quoting=quoting) if row), [])
    except (csv.Error, *DAMAGED) as reason:
        raise InputError(f"Cannot read {file}: {one_line(reason)}.") from reason
    if twice := [name for name in wanted if columns.count(name) > 1]:
        raise InputError(f"{file} has two columns named {twice[0]}: rename one of them.")
    if len(columns) == 1 and not set(columns) & set(wanted):
        (line,) = columns
        for other, name in _SEPARATORS.items():
            if other != separator and {field.strip('" ') for field in line.split(other)} & set(wanted):
                raise InputError(
                    f"{file} has {name} between its columns: a .{format_of(file)} file needs {_SEPARATORS[separator]}."
                )
    return columns


def rows_in_field(file: Path) -> list[dict[str, Any]] | None:
    """Return the rows of a ``.json`` file that has them in a field, as in ``{"data": [...]}``; else ``None``."""
    try:
        with opened(file) as content:
            if not content.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
                return None
        with opened(file) as content:
            whole = json.loads(content.read().decode("utf-8-sig"))
    except (ValueError, *DAMAGED):
        return None  # lines, each of them an object; or a damaged file, of which the reader complains
    fields = [
        name
        for name, value in whole.items()
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    ]
    if len(fields) > 1:
        raise InputError(f"{file} has rows in {' and '.join(fields)}: write each of them as a file.")
    if not fields and all(isinstance(value, (list, dict)) for value in whole.values()):
        raise InputError(f'{file} must be an array of objects, one for each row, or have it as in {{"data": [...]}}.')
    return whole[fields[0]] if fields else None


def fault_in(file: Path) -> str | None:
    """Return a sentence about the first damaged line of a file in text form; ``None`` if each line is sound."""
    number = 0
    try:
        with opened(file) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    encoding = "utf-16" if line.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
                    how = f"convert the file, for example with `iconv -f {encoding} -t utf-8`"
                    return f"Line {number} of {file} is not UTF-8: {how}."
                if format_of(file) == "jsonl" and text.strip():
                    try:
                        row = json.loads(text)
                    except ValueError as reason:
                        return f"Line {number} of {file} must be one JSON object, but cannot be read: {reason}."
                    if not isinstance(row, dict):
                        return f"Line {number} of {file} must be one JSON object, got {text.strip()[:60]!r}."
    except DAMAGED as reason:
        return f"Cannot read {file}{f' after line {number}' if number else ''}: {reason}."
    return None


def reason_of(file: Path, error: BaseException) -> str:
    """Say in one sentence why a file cannot be read, from the error of its reader."""
    cause, form = error.__cause__ or error, format_of(file)
    if "corresponds to no data" in str(error):
        return f"{file} has no rows."
    if form != "parquet" and (fault := fault_in(file)) is not None:
        return fault
    if found := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(cause)):
        how = "put a text with a comma in double quotes" if form == "csv" else "replace a tab in a text by a space"
        return f"Line {found[2]} of {file} has {found[3]} fields instead of {found[1]}: {how}."
    wanted = ", which must be one array of objects" if form == "json" else ""
    return f"Cannot read {file} as {suffix_of(file)}{wanted}: {one_line(cause)}"
