"""The runs of a comparison: their command, folder and state."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnreg.errors import InputError
from attnreg.experiments.compare.method import Method, typed_words
from attnreg.experiments.folder.run_folder import RunReader, check_same
from attnreg.experiments.options.settings import Settings, with_defaults
from attnreg.experiments.runs.command import check_paths

Role = Literal["final", "search", "equal time"]


@dataclass(frozen=True)
class PlannedRun:
    """A run that the comparison needs, finished or not.

    It is reported, part of a search, or of a longer baseline; ``options`` are by name, with those that the role adds.
    """

    method: Method
    role: Role
    seed: int
    options: Mapping[str, Any]
    folder: Path
    keep_model: bool = False

    @property
    def arguments(self) -> list[str]:
        """Arguments of ``attnreg recipe NAME``, without ``--resume``."""
        place = typed_words({"seed": self.seed, "output_dir": self.folder})
        return [*typed_words(self.options), *self.method.options, *place]

    @property
    def alone(self) -> str:
        """The command that makes the run by itself, in a new folder, and keeps its model."""
        words = [*typed_words(self.options), *self.method.options, "--seed", str(self.seed)]
        return shlex.join(["attnreg", "recipe", self.method.words[0], *words])

    @property
    def settings(self) -> Settings:
        """The run's options, with defaults filled in."""
        return self.method.command.settings(self.arguments)

    @property
    def log(self) -> Path:
        """The file with the run's output."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def reader(self) -> RunReader:
        """What the run has written."""
        return RunReader(self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return self.reader.finished

    @property
    def failure(self) -> str | None:
        """Why the run has ended without a result, by the end of its log; ``None`` if it has not failed."""
        if self.finished or not self.log.is_file() or self.reader.running:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[::-1]
        messages = [line for line in lines if not line.startswith(("Warning: ", "CPU threads"))] or [
            "stopped; repeat the command to continue it"
        ]
        return next((line for line in messages if line.startswith("Error: ")), messages[0])

    @property
    def result(self) -> dict[str, Any]:
        """``result.json``, with the run's options under ``config``."""
        self.reader.check_files()
        return {**self.reader.result, "config": with_defaults(self.reader.config)}

    @property
    def score(self) -> float:
        """The dev score of the returned network, in the metric of the comparison."""
        result = self.reader.result
        return float(result["dev"][result["metric"]])

    @property
    def seconds(self) -> float:
        """Duration of the run in seconds, without start-up."""
        return float(self.reader.result["seconds"])

    @property
    def predictions(self) -> list[dict[str, Any]]:
        """Label and prediction of each dev row, in order."""
        self.reader.check_files()
        return self.reader.predictions

    def check(self) -> None:
        """Refuse a folder with other files, or a run with other options or of data or files that have changed."""
        if not self.folder.exists():
            return
        if not (self.folder / "config.json").is_file():
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):
                raise InputError(f"{self.folder} holds files but no run: choose another --output-dir.")
            return
        with self._naming_its_options():
            check_same(self.folder, self.settings)

    @contextmanager
    def _naming_its_options(self) -> Iterator[None]:
        """In an error of a search, name the option of the comparison that holds rows out."""
        try:
            yield
        except InputError as error:
            flag = "--search-rows" if self.role == "search" else "--validation-rows"
            raise type(error)(str(error).replace("--validation-rows", flag)) from None

    def check_paths(self) -> None:
        """Refuse what is not there, before anything slow is imported."""
        with self._naming_its_options():
            check_paths(self.settings)

    def check_data(self) -> None:
        """Read the data, to tell before any run what is wrong with them, or that they cannot be had."""
        from attnreg.experiments.setup.rows import read_data  # late: it is slow to import

        with self._naming_its_options():
            read_data(self.settings)

    def command_line(self) -> list[str]:
        """Return the arguments of ``attnreg`` that start or resume the run."""
        resume = ["--resume"] if self.reader.resumable else []
        return [
            "recipe",
            self.method.words[0],
            *self.arguments,
            "--keep-checkpoints",
            "--no-plots",
            *resume,
        ]  # until it is tidied

    def prepare(self) -> None:
        """Prepare the folder right before the run starts; remove a run that stopped before its first checkpoint."""
        if not self.reader.resumable and not self.reader.running and not self.finished:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Remove a finished run's checkpoints and, unless it is to be kept, its model and provider, once."""
        if self.finished and (self.folder / "checkpoints").is_dir() and not self.reader.running:
            for name in ("checkpoints",) if self.keep_model else ("model", "provider", "checkpoints"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
