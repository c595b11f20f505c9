"""Read the records of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnreg.errors import InputError


class Records:
    """Options, metrics and telemetry of a run.

    Args:
        folder: the run folder.

    Raises:
        InputError: if the folder holds no run, or the run has not trained yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        configs = self._read(folder / "config.json")
        if not configs or not isinstance(configs[0], dict):
            raise InputError(f"Expected a run folder, got {folder}: it has no config.json with options.")
        self.config: dict[str, Any] = configs[0]
        self.metrics = self._read(folder / "metrics.jsonl")
        self.telemetry = self._read(folder / "telemetry.jsonl")
        if not self.telemetry:
            raise InputError(f"The run in {folder} has not trained yet: there are no lines in telemetry.jsonl.")

    @property
    def title(self) -> str:
        """Recipe, task and seed, as the title of a plot."""
        return f"{self.config['recipe']} on {self.config['task']}, seed {self.config['seed']}"

    @property
    def scored_on(self) -> str:
        """The rows that the scores are for: ``"dev"`` or ``"held-out"``."""
        return "dev" if self.config.get("validation_rows") is None else "held-out"

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The telemetry of AttendOut's rounds, one line per round."""
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
            raise InputError(f"Cannot read {path} as JSON: {error}.") from error


def moving_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of the last ``window`` values at each position; the first positions average fewer values.

    Example:
        >>> moving_mean([1.0, 3.0, 5.0, 7.0], 2)
        [1.0, 2.0, 4.0, 6.0]
    """
    return [
        sum(part) / len(part) for end in range(len(values)) for part in [values[max(0, end + 1 - window) : end + 1]]
    ]
