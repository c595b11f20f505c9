"""Reading the files of a run folder, and its lock: one process at a time writes to it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from attnreg._files import LOCK, check_checksums
from attnreg.errors import InputError


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


class RunReader:
    """The records in the folder of a run, whatever it has written so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The run's options; an error if the folder holds no run."""
        config = self._object("config.json") if (self.folder / "config.json").is_file() else {}
        if "recipe" not in config or not isinstance(config.get("own", {}), dict):
            raise InputError(f"Expected a run folder, got {self.folder}: it has no config.json with a run's options.")
        return config

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One object per evaluation."""
        return self._lines("metrics.jsonl")

    @functools.cached_property
    def telemetry(self) -> list[dict[str, Any]]:
        """Losses and drop rates over steps."""
        return self._lines("telemetry.jsonl")

    @functools.cached_property
    def result(self) -> dict[str, Any]:
        """Scores, time and memory of a finished run."""
        return self._object("result.json")

    @functools.cached_property
    def predictions(self) -> list[dict[str, Any]]:
        """Label and prediction of each dev row, in order."""
        return self._lines("predictions.jsonl")

    @functools.cached_property
    def probe(self) -> dict[str, Any] | None:
        """The arguments of a probing run's plot; ``None`` for other runs."""
        return self._object("probe.json") if (self.folder / "probe.json").is_file() else None

    @property
    def title(self) -> str:
        """Recipe, task and seed, as the title of a plot."""
        return f"{self.config['recipe']} on {self.config['task']}, seed {self.config['seed']}"

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The telemetry of AttendOut's rounds, one line per round."""
        return [line for line in self.telemetry if "winner" in line]

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return (self.folder / "result.json").is_file()

    @property
    def kept(self) -> bool:
        """Whether the folder holds a run with a result, a checkpoint or an evaluation, which must not be lost."""
        begun = self.finished or self.resumable or bool(self.metrics)
        return begun and (self.folder / "config.json").is_file()

    @property
    def running(self) -> bool:
        """Whether a process is working on the run."""
        if not (self.folder / LOCK).is_file():
            return False
        try:
            with FileLock(self.folder / LOCK, timeout=0):
                return False
        except Timeout:
            return True

    @property
    def resumable(self) -> bool:
        """Whether the run has a checkpoint."""
        return any((self.folder / "checkpoints").glob("step-*"))

    def check_files(self) -> None:
        """Refuse result files that do not match their checksums."""
        try:
            check_checksums(self.folder)
        except (OSError, ValueError) as error:
            raise InputError(
                f"The finished run in {self.folder} has been changed: {error}. Remove that folder and run it again."
            ) from error

    def _object(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            what = "the run's options in" if name == "config.json" else "a JSON object from"
            raise InputError(f"Cannot read {what} {path}: {error}.") from error

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.is_file():
            return []
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        except ValueError as error:
            raise InputError(f"Cannot read {path} as JSON: {error}.") from error
