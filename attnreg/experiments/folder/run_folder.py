"""The folder of a run: its lock, how its files are written, and how they are read."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from attnreg import __version__
from attnreg._files import LOCK, SUMS, check_checksums, checksums_of, replaced_folder, write_text
from attnreg.errors import InputError, StoppedError
from attnreg.experiments.options.files import changed
from attnreg.experiments.options.settings import Settings


@contextmanager
def locked(folder: Path, busy: str) -> Iterator[None]:
    """Make a folder and lock it within the block; the lock also ends with the process.

    Raises:
        InputError: if the folder cannot be written to; with the message ``busy``, if another process has locked it.
    """
    try:
        str(folder).encode()  # else tokenizers could not write, and only after training
    except UnicodeEncodeError as error:
        advice = "choose another folder or, if its name reads well, a locale of UTF-8 (LC_ALL=C.UTF-8)"
        raise InputError(f"Expected --output-dir to be a name in UTF-8, got {str(folder)!r}: {advice}.") from error
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

    @property
    def is_run(self) -> bool:
        """Whether the folder has the options of a run; an error if its config.json cannot be read."""
        return (self.folder / "config.json").is_file() and "recipe" in self._object("config.json")

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The run's options; an error if the folder holds no run."""
        config = self._object("config.json") if self.is_run else {}
        if not config or not isinstance(config.get("own", {}), dict):
            hint = " It is of a fit: use `attnreg predict`." * (self.folder / "fit.json").is_file()
            text = f"Expected a run folder, got {self.folder}: it has no config.json with a run's options.{hint}"
            raise InputError(text)
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
        """Label and prediction of every dev row, in order."""
        return self._lines("predictions.jsonl")

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
        metrics = self.folder / "metrics.jsonl"
        is_evaluated = metrics.is_file() and b"\n" in metrics.read_bytes()  # not if it ended within the first line
        return (self.finished or self.resumable or is_evaluated) and (self.folder / "config.json").is_file()

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
            content = "the run's options in" if name == "config.json" else "a JSON object from"
            raise InputError(f"Cannot read {content} {path}: {error}.") from error

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.is_file():
            return []
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        except ValueError as error:
            raise InputError(f"Cannot read {path} as JSON: {error}.") from error


DIVERGED = "Training diverged"  # how the message of such a run begins
# The files of a run that failed before its first checkpoint: none of them needs to be kept.
_UNBEGUN = {LOCK, "config.json", "metrics.jsonl", "telemetry.jsonl"}


class RunFolder:
    """The folder that a run writes to. Of several processes, only one is the writer."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints, self.writer = path, path / "checkpoints", True

    def check(self, settings: Settings) -> None:
        """Check, before anything is written, that the run can start or, with the same options and data, resume here."""
        if not settings.resume:
            names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
            if self.path.is_file() or names - (set() if self.begun else _UNBEGUN):
                reader = RunReader(self.path)
                advice = ", or pass --resume to continue its run (of a finished one: to print its report)"
                raise InputError(
                    f"Expected --output-dir to be new or empty, got {self.path}: choose another folder"
                    f"{advice * (reader.resumable or reader.finished)}."
                )
            return
        if not (self.path / "config.json").is_file():
            raise InputError(f"No run to resume in {self.path}. Start it without --resume.")
        check_same(self.path, settings)

    def create(self, settings: Settings, parameters: Mapping[str, int], max_length: int, steps: int) -> None:
        """Write ``config.json``, with the numbers of parameters, of trainable parameters and of steps."""
        if self.writer:
            version = {"attnreg": __version__, "content": settings.content()}
            length = {"max_length": max_length, "default_max_length": settings.max_length is None}
            counts = {"parameters": dict(parameters), "steps": steps}
            self.write("config", {**version, **settings.to_dict(), **length, **counts})
            self.keep_lines(metrics=0, telemetry=0)  # left by a run that was killed before its first checkpoint

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to ``name.jsonl``."""
        if self.writer:
            with (self.path / f"{name}.jsonl").open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(record) + "\n")

    def locked(self) -> AbstractContextManager[None]:
        """Make the folder, and lock it against other processes within the block."""
        return locked(self.path, f"Another process is writing to {self.path}.") if self.writer else nullcontext()

    @contextmanager
    def written(self) -> Iterator[None]:
        """Turn a failure to write a file within the block into a :class:`StoppedError`."""
        try:
            yield
        except ConnectionError:  # from a tracker, or a pipe whose reader has gone
            raise
        except (OSError, SafetensorError) as error:
            message = f"Cannot write the run's files: {error}. {self.last_good()}"
            raise StoppedError(message, can_go_on=RunReader(self.path).resumable) from error

    def remove_checkpoints(self) -> None:
        """Remove the checkpoints of a finished run."""
        if self.writer:
            shutil.rmtree(self.checkpoints, ignore_errors=True)

    def last_report(self, settings: Settings) -> str | None:
        """Return the report of a run to resume that has finished, without a checkpoint; ``None`` of another run."""
        if not settings.resume or not (reader := RunReader(self.path)).finished or self.checkpoints.exists():
            return None
        self.check(settings)
        reader.check_files()
        report = self.path / "report.md"
        return report.read_text(encoding="utf-8") if report.is_file() else f"The run in {self.path} has finished."

    def last_good(self) -> str:
        """Return a sentence that names the last checkpoint."""
        steps = [int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*")]
        sentence = f"The last good checkpoint (step {max(steps, default=0)}) is in {self.checkpoints}."
        return sentence if steps else "The run has no checkpoint yet."

    @property
    def begun(self) -> bool:
        """Whether the folder holds a checkpoint or an evaluation, which starting over would lose."""
        return RunReader(self.path).resumable or bool(self._evaluated)

    @property
    def without_checkpoint_yet(self) -> bool:
        """Whether no checkpoint is missing: the run ended before it could write one after its first evaluation."""
        steps = {*re.findall(r'"step": \d+', self._evaluated)}
        is_missing = len(steps) > 1 or (self.path / "predictions.jsonl").is_file()
        return not is_missing and not RunReader(self.path).resumable

    @property
    def _evaluated(self) -> str:
        metrics = self.path / "metrics.jsonl"
        return metrics.read_text(encoding="utf-8", errors="replace") if metrics.is_file() else ""

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Write ``name.json`` atomically."""
        self.write_text(f"{name}.json", json.dumps(record, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        if self.writer:
            write_text(self.path / name, text)

    def write_outcome(self, result: Mapping[str, Any], predictions: Iterable[Mapping[str, Any]]) -> None:
        """Write the checksums, then ``predictions.jsonl``, then ``result.json``, all atomically."""
        rows = "".join(json.dumps(record) + "\n" for record in predictions)
        texts = {"predictions.jsonl": rows, "result.json": json.dumps(result, indent=2) + "\n"}
        lines = (self.path / f"{name}.jsonl" for name in ("metrics", "telemetry"))
        logs = {file.name: file.read_text(encoding="utf-8") for file in lines if file.is_file()}
        for name, text in {SUMS: checksums_of(texts | logs), **texts}.items():
            self.write_text(name, text)

    def keep_lines(self, **counts: int) -> None:
        """Keep only the first ``count`` lines of every ``NAME.jsonl``; the run is about to repeat the other lines."""
        for name, count in counts.items():
            file = self.path / f"{name}.jsonl"
            if file.is_file():
                lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
                self.write_text(file.name, "".join(lines[:count]))

    def save_model(self, model: Any, tokenizer: Any, provider: Any) -> None:
        """Write ``model/`` and ``provider/``, both atomically. All processes of a sharded model must call it."""
        from attnreg.experiments.tasks.models.lora import save_model  # late: they import torch
        from attnreg.sharding import is_sharded, whole_state

        weights = whole_state(model, model) if is_sharded(model) else None
        if not self.writer:
            return
        with replaced_folder(self.path / "model") as folder:
            save_model(model, folder, weights)
            tokenizer.save_pretrained(folder)
        if provider is not None:
            provider.save_pretrained(self.path / "provider")


@dataclass(frozen=True)
class OutputFolder:
    """The folder of a comparison, a search or a fit (its ``kind``): a JSON ``file`` holds its settings."""

    path: Path
    kind: str
    file: str

    @property
    def has_other_files(self) -> bool:
        """Whether the folder holds files, but none of this kind."""
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        return bool(names - {LOCK}) and self.file not in names

    def check(self) -> None:
        """Refuse a folder that holds other files."""
        if self.has_other_files:
            raise InputError(f"--output-dir {self.path} holds files but no {self.kind}: choose another folder.")

    def read(self) -> dict[str, Any]:
        """Return the saved settings; empty for a new folder."""
        path = self.path / self.file
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"Cannot read the {self.kind} from {path}: {error!r}.") from error

    def write(self, content: Mapping[str, Any]) -> None:
        """Save the settings."""
        write_text(self.path / self.file, json.dumps(content, indent=2))

    def locked(self) -> AbstractContextManager[None]:
        """Create and lock the folder for the duration of the block."""
        busy = f"Another {self.kind} is writing to {self.path}: wait for it, or choose another --output-dir."
        return locked(self.path, busy)


def in_free_folder(settings: Settings) -> tuple[Settings, str | None]:
    """Return the settings with the first folder of ``NAME``, ``NAME-2`` … that holds no run with other options.

    Also return a sentence if that is not their folder. A run that resumes needs a folder with the same run.
    """

    def other_options(folder: Path) -> str | None:
        reader = RunReader(folder)
        return ", ".join(settings.differences(reader.config).values()) if reader.kept else None

    path, note = free_folder(settings.output_dir, "a run", other_options)
    if settings.resume and not path.exists():
        return settings, None
    return replace(settings, output_dir=path), note


def free_folder(path: Path, content: str, differences: Callable[[Path], str | None]) -> tuple[Path, str | None]:
    """Return the first folder of ``NAME``, ``NAME-2`` … without other options, and a sentence if it is not the first.

    ``differences`` returns the options in which the ``content`` of a folder, such as "a run", differs, if any.
    """
    if not (options := differences(path)):
        return path, None
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    free = next(folder for folder in numbered if not differences(folder))
    return free, f"{path} holds {content} with {options}: saving to {free}."


def check_same(folder: Path, settings: Settings) -> None:
    """Refuse a run that was started with other options, or whose data or files have changed since."""
    config = RunReader(folder).config
    if options := ", ".join(settings.differences(config).values()):
        advice = f"repeat it with {options}, or choose another --output-dir"
        raise InputError(f"The run in {folder} was started with other options: {advice}.")
    if changes := " and ".join(changed(settings.content(), config)):
        advice = "remove this folder, or choose another --output-dir"
        raise InputError(f"Since the run in {folder} was started, {changes} changed: {advice}.")
