"""The runs of a comparison or a search: their command, folder and state; and trials, which choose among methods."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from attnreg.errors import InputError
from attnreg.experiments.compare.method import Method, typed_words
from attnreg.experiments.folder.history import rank
from attnreg.experiments.folder.run_folder import DIVERGED, RunReader, check_same
from attnreg.experiments.options.settings import Settings, with_defaults
from attnreg.experiments.runs.command import check_paths

KILLED = "stopped without an error, as if it was killed"
Role = Literal["search", "final", "equal time"]  # in the order in which runs are made


@dataclass(frozen=True)
class PlannedRun:
    """A run that the comparison needs, finished or not.

    It is reported, part of a search, or of a longer baseline; ``options`` are by name, with the options of the role.
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
        last = typed_words({"seed": self.seed, "output_dir": self.folder})
        return [*typed_words(self.options), *self.method.options, *last]

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
    def turn(self) -> tuple[int, int]:
        """When it is made: searches first, on which more depends; then the first seed of all methods, the second, ...

        So, what has finished is balanced at any time, and a method that fails is soon known.
        """
        return get_args(Role).index(self.role), self.seed

    @property
    def log(self) -> Path:
        """The file with the run's output."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def reader(self) -> RunReader:
        """The reader of the run's files."""
        return RunReader(self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return self.reader.finished

    @property
    def failure(self) -> str | None:
        """Why the run ended without a result, by the end of its log; ``None`` if it has not failed."""
        if self.finished or not self.log.is_file() or self.reader.running:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[::-1]
        last = lines[0] if any(line.startswith("Traceback") for line in lines) else KILLED
        return next((line for line in lines if line.startswith("Error: ")), last)

    @property
    def diverged(self) -> bool:
        """Whether the run ended because its numbers diverged, as they would again with its options and files."""
        if DIVERGED not in (self.failure or ""):
            return False
        try:
            check_same(self.folder, self.settings)
        except InputError:
            return False
        return True

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
        """Label and prediction of every dev row, in order."""
        self.reader.check_files()
        return self.reader.predictions

    def check(self) -> None:
        """Refuse a folder with other files, and a run whose options, data or files differ."""
        if not self.folder.exists():
            return
        if not (self.folder / "config.json").is_file():
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):
                raise InputError(f"{self.folder} holds files but no run: choose another --output-dir.")
            return
        _ = self.reader.config  # raises if it is no run's
        if self.reader.kept or self.reader.running:  # else it starts over
            with self._with_flag():
                check_same(self.folder, self.settings)

    @contextmanager
    def _with_flag(self) -> Iterator[None]:
        """In an error of a search, name the option of the comparison that holds rows out."""
        try:
            yield
        except InputError as error:
            flag = "--search-rows" if self.role == "search" else "--validation-rows"
            raise type(error)(str(error).replace("--validation-rows", flag)) from None

    def check_paths(self) -> None:
        """Refuse trackers, data and models that do not exist, before slow imports."""
        with self._with_flag():
            check_paths(self.settings)

    def check_data(self) -> None:
        """Read the data, so that mistakes in them, or missing data, are reported before any run starts."""
        from attnreg.experiments.setup.rows import read_data  # late: it is slow to import

        with self._with_flag():
            read_data(self.settings)

    def command_line(self) -> list[str]:
        """Return the arguments of ``attnreg`` that start or resume the run."""
        resume = ["--resume"] if self.reader.resumable else []
        options = [*self.arguments, "--keep-checkpoints", "--no-plots", *resume]  # checkpoints until `tidy`
        return ["recipe", self.method.words[0], *options]

    def prepare(self) -> None:
        """Prepare the folder right before the run starts; remove a run that stopped before its first checkpoint."""
        if not self.reader.resumable and not self.reader.running and not self.finished:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Remove a finished run's checkpoints and, without ``keep_model``, its model and provider, once."""
        if self.finished and (self.folder / "checkpoints").is_dir() and not self.reader.running:
            for name in ("checkpoints",) if self.keep_model else ("model", "provider", "checkpoints"):
                shutil.rmtree(self.folder / name, ignore_errors=True)


FIRST_SEED = 1000  # of trials, so that no reported seed takes part in a choice
State = Literal["running", "complete", "failed"]


@dataclass(frozen=True)
class Trial:
    """A candidate method, its scores on held-out rows, by seed, and the reason if it failed."""

    number: int
    method: Method
    scores: Sequence[float]
    state: State
    failure: str | None = None

    @property
    def mean(self) -> float:
        """The mean score over the seeds."""
        return fmean(self.scores)


def score_cells(scores: Sequence[float]) -> list[str]:
    """Return the cells of a table with the mean and the scores of single seeds."""
    if not scores:
        return ["none", "none"]
    return [f"{fmean(scores):.4f}", "  ".join(f"{score:.3f}" for score in scores)]


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the complete trial with the best mean score, the first in a tie; ``None`` if no trial is complete."""
    complete = [trial for trial in trials if trial.state == "complete"]
    return max(complete, key=lambda trial: rank(trial.mean)) if complete else None


@dataclass(frozen=True)
class HeldOut:
    """How trials are scored: on rows held out from train, all with the same seeds (from 1000) and options."""

    options: Mapping[str, Any]
    folder: Path
    seeds: int
    rows: int

    def runs(self, method: Method) -> list[PlannedRun]:
        """Return the runs of a trial."""
        folder, options = self.folder / "search" / method.slug, {**self.options, "validation_rows": self.rows}
        seeds = range(FIRST_SEED, FIRST_SEED + self.seeds)
        return [PlannedRun(method, "search", seed, options, folder / f"seed{seed}") for seed in seeds]
