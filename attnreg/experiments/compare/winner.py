"""The winner of ``attnreg search``, as a method of a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnreg._files import replaced_file
from attnreg.errors import InputError

FILE = "winner.json"


@dataclass(frozen=True)
class Winner:
    """The best method of a search, and what finding it took.

    Args:
        method: the recipe with its options.
        score: the mean score on held-out rows.
        task: the task of the search.
        trials: the number of methods that were tried.
        runs: the number of their runs.
        seeds: runs per complete trial, with seeds from 1000.
        rows: rows held out from train to score them on.
    """

    method: str
    score: float
    task: str
    trials: int
    runs: int
    seeds: int
    rows: int

    @classmethod
    def read(cls, folder: Path) -> Winner:
        """Read the winner from the folder of a search.

        Raises:
            InputError: if the folder holds no winner.
        """
        path = folder / FILE
        try:
            content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(**content)
        except FileNotFoundError:
            raise InputError(
                f"Expected the folder of a search after @, got {folder}: it has no {FILE}; see `attnreg search`."
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"Cannot read the winner of a search from {path}: {error}.") from error

    def write(self, folder: Path) -> None:
        """Write the winner to the folder of its search."""
        with replaced_file(folder / FILE) as file:
            json.dump(asdict(self), file, indent=2)
