"""One run of a comparison: its command, its folder, how far it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnreg._checksums import check_checksums
from attnreg._files import exclusive
from attnreg.errors import InputError
from attnreg.experiments.compare.method import Method
from attnreg.experiments.runs.folder import LOCK
from attnreg.experiments.runs.settings import Settings

Role = Literal["final", "search", "equal time"]


@dataclass(frozen=True)
class PlannedRun:
    """A run that is wanted, whether it was made or not.

    Args:
        method: what is run.
        role: what it is for.
        seed: its seed.
        options: what all runs of the comparison have in common, and what its role adds.
        folder: its run folder.
        keep_model: whether its model stays when it is finished.
    """

    method: Method
    role: Role
    seed: int
    options: tuple[str, ...]
    folder: Path
    keep_model: bool = False

    @property
    def arguments(self) -> list[str]:
        """What is typed after ``attnreg recipe NAME``, without what resuming needs."""
        own = [*self.options, *self.method.options]
        return [*own, "--seed", str(self.seed), "--output-dir", str(self.folder)]

    @property
    def settings(self) -> Settings:
        """The options, resolved."""
        return self.method.command.settings(self.arguments)

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def finished(self) -> bool:
        """Whether its result is there."""
        return (self.folder / "result.json").is_file()

    @property
    def result(self) -> dict[str, Any]:
        """Its result, with the options it was obtained with."""
        self._check_files()
        return {**self._json("result.json"), "config": self._json("config.json")}

    @property
    def score(self) -> float:
        """The last epoch's score in the task's metric."""
        result = self._json("result.json")
        return float(result["dev"][result["metric"]])

    @property
    def seconds(self) -> float:
        """The time it took, without what starting it takes."""
        return float(self._json("result.json")["seconds"])

    def predictions(self) -> list[dict[str, Any]]:
        """Label and prediction of each dev row, in order."""
        self._check_files()
        with (self.folder / "predictions.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def check(self) -> None:
        """Raise if the folder cannot take this run.

        Raises:
            InputError: if it holds a run with other options, or what is not a run.
        """
        if not self.folder.exists():
            return
        if not (self.folder / "config.json").is_file():
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):
                raise InputError(f"Expected a run in {self.folder} or nothing, got a folder without config.json.")
        elif differences := self.settings.differences(self._json("config.json")):
            raise InputError(
                f"Expected the run in {self.folder} to have the options of this comparison, got "
                f"{', '.join(differences)}: give the same options, or another --output-dir."
            )

    @property
    def running(self) -> bool:
        """Whether some process is at it."""
        if not (self.folder / LOCK).is_file():
            return False
        with exclusive(self.folder / LOCK) as free:
            return not free

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to continue from."""
        return any((self.folder / "checkpoints").glob("step-*"))

    def command_line(self) -> list[str]:
        """What to run after ``attnreg``."""
        return ["recipe", self.method.words[0], *self.arguments, *(["--resume"] if self.resumable else [])]

    def prepare(self) -> None:
        """Make room, right before the run starts: what stopped before there was anything to go on from is removed."""
        if not self.resumable and not self.running and not self.finished:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Remove what a finished run no longer needs: its checkpoints and, unless it is to be kept, its model.

        A run without checkpoints was tidied before, and what was kept then is left.
        """
        if self.finished and (self.folder / "checkpoints").is_dir() and not self.running:
            for name in (*(() if self.keep_model else ("model", "provider")), "checkpoints"):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _check_files(self) -> None:
        try:
            check_checksums(self.folder)
        except (OSError, ValueError) as error:
            raise InputError(
                f"Expected the run in {self.folder} as it was finished, got: {error}. Remove that folder, and the same "
                "command runs it again."
            ) from error

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"Expected a JSON object in {path}, got: {error}.") from error


def finished(runs: Sequence[PlannedRun]) -> bool:
    """Whether all runs are."""
    return all(run.finished for run in runs)
