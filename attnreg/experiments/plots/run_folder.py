"""Reading what a run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnreg.errors import InputError


class Records:
    """The files of a run folder.

    Args:
        folder: the folder.

    Raises:
        InputError: if it does not hold a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        configs = self._read(folder / "config.json")
        if not configs or not isinstance(configs[0], dict):
            raise InputError(f"Expected a run folder, with the options of a run in config.json, got {folder}.")
        self.config: dict[str, Any] = configs[0]
        self.metrics = self._read(folder / "metrics.jsonl")
        self.telemetry = self._read(folder / "telemetry.jsonl")
        if not self.telemetry:
            raise InputError(f"Expected a run that has trained in {folder}, found no telemetry.jsonl with lines.")

    @property
    def title(self) -> str:
        """What was run."""
        return f"{self.config['recipe']} on {self.config['task']}, seed {self.config['seed']}"

    @property
    def scored_on(self) -> str:
        """Which rows its scores are of."""
        return "dev" if self.config.get("validation_rows") is None else "held-out"

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The lines at the end of a round of a game."""
        return [line for line in self.telemetry if "winner" in line]

    @staticmethod
    def _read(path: Path) -> list[dict[str, Any]]:
        if not path.is_file():
            return []
        text = path.read_text(encoding="utf-8")
        try:
            return (
                [json.loads(text)]
                if path.suffix == ".json"
                else [json.loads(line) for line in text.split("\n") if line]
            )
        except ValueError as error:
            raise InputError(f"Expected JSON in {path}, got: {error}.") from error


def moving_mean(values: list[float], window: int) -> list[float]:
    """The mean over the last so many values, fewer at the start.

    Example:
        >>> moving_mean([1.0, 3.0, 5.0, 7.0], 2)
        [1.0, 2.0, 4.0, 6.0]
    """
    return [
        sum(part) / len(part) for end in range(len(values)) for part in [values[max(0, end + 1 - window) : end + 1]]
    ]
