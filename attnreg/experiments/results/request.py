"""What an evaluation of a finished run was asked for, to know later whether it still answers the question."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def request(
    options: Mapping[str, str | None],
    data_dir: str | None,
    split: str,
    max_length: int | None,
    classes: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Return the arguments of :func:`attnreg.experiments.results.saved.score_saved` as they are written to its file.

    Example:
        >>> request({"task": None}, None, "test", 64, None)
        {'options': {}, 'data_dir': None, 'split': 'test', 'max_length': 64, 'classes': {}}
    """
    return {
        "options": {name: value for name, value in options.items() if value is not None},
        "data_dir": absolute(data_dir),
        "split": split,
        "max_length": max_length,
        "classes": dict(classes or {}),
    }


def absolute(folder: str | None) -> str | None:
    """Return the absolute path of a folder; ``None`` stays ``None``."""
    return None if folder is None else str(Path(folder).resolve())
