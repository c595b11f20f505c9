"""A run's folder: its options, what it measured, its model, provider and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from attnreg import __version__
from attnreg._checksums import SUMS, checksums_of
from attnreg._files import exclusive, replaced_file, replaced_folder
from attnreg.errors import InputError, StoppedError
from attnreg.experiments.runs.reader import LOCK
from attnreg.experiments.runs.settings import Settings
from attnreg.experiments.runs.state_files import recover_states, write_state


class RunFolder:
    """Where a run writes.

    Args:
        path: the folder.
        writer: whether this process writes; where several train one model, one does, and the others write nothing.
    """

    def __init__(self, path: Path, *, writer: bool = True) -> None:
        self.path = path
        self.writer = writer
        self.checkpoints = path / "checkpoints"

    def check(self, settings: Settings) -> None:
        """Raise if the folder cannot take this run, before anything is written.

        Raises:
            InputError: if it holds a run that is not to be resumed, or resuming was asked for and it holds none, no
                checkpoint, or a run with other options.
        """
        config = self.path / "config.json"
        if not settings.resume:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise InputError(
                    f"Expected --output-dir to be new or empty, got {self.path}, which is not: choose another folder"
                    + (", or pass --resume to go on with the run in it." if config.is_file() else ".")
                )
            return
        if not config.is_file():
            raise InputError(f"Expected a run to resume in {self.path}, found none: start it without --resume.")
        try:
            saved = json.loads(config.read_text(encoding="utf-8"))
            differences = settings.differences(saved)
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"Expected the options of a run in {config}, got: {error}.") from error
        if differences:
            raise InputError(
                f"Expected the options that the run in {self.path} was started with, got others: "
                f"resume with {', '.join(differences)}."
            )

    def create(self, settings: Settings) -> None:
        """Make the folder and write the configuration down."""
        if self.writer:
            self._make()
            self.write("config", {"attnreg": __version__, **settings.to_dict()})
            self.keep_lines(metrics=0, telemetry=0)  # of a run that was killed before its first checkpoint

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / LOCK).touch()
        except OSError as error:
            raise InputError(f"Expected --output-dir to be a folder that can be written to, got: {error}.") from error

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to ``name.jsonl``."""
        if self.writer:
            with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within the block nobody else writes here.

        Raises:
            InputError: if somebody does.
        """
        if not self.writer:
            yield
            return
        self._make()
        with exclusive(self.path / LOCK) as free:
            if not free:
                raise InputError(f"Expected {self.path} to be written by this process alone, found another at it.")
            recover_states(self.checkpoints)
            yield

    @contextmanager
    def written(self) -> Iterator[None]:
        """Within the block, a file that cannot be written ends the run with a sentence.

        Raises:
            StoppedError: instead of the error.
        """
        try:
            yield
        except ConnectionError:  # a tracker's, or of a pipe that nobody reads any more
            raise
        except (OSError, SafetensorError) as error:
            raise StoppedError(
                f"Expected the files of a run to be written, got: {error}. {self.last_good()}",
                can_go_on=any(self.checkpoints.glob("step-*")),
            ) from error

    def save_checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; the one before it is removed then."""
        if self.writer:
            write_state(self.checkpoints, step, state)

    def last_good(self) -> str:
        """A sentence that says which checkpoint is there."""
        steps = [int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*")]
        if not steps:
            return "It has no checkpoint yet."
        return f"Its last good checkpoint, of step {max(steps)}, is in {self.checkpoints}."

    @property
    def begun(self) -> bool:
        """Whether the run in it got as far as a checkpoint or an evaluation, which is lost if it starts anew."""
        metrics = self.path / "metrics.jsonl"
        return any(self.checkpoints.glob("step-*")) or (metrics.is_file() and metrics.stat().st_size > 0)

    @property
    def has_provider(self) -> bool:
        """Whether a provider was saved."""
        return (self.path / "provider").is_dir()

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Write ``name.json``, whole or not at all."""
        self.write_text(f"{name}.json", json.dumps(record, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        if self.writer:
            with replaced_file(self.path / name) as file:
                file.write(text)

    def write_outcome(self, result: Mapping[str, Any], predictions: Iterable[Mapping[str, Any]]) -> None:
        """Write ``predictions.jsonl``, then ``result.json``, each whole or not at all; their checksums before."""
        texts = {
            "predictions.jsonl": "".join(json.dumps(record) + "\n" for record in predictions),
            "result.json": json.dumps(result, indent=2) + "\n",
        }
        for name, text in {SUMS: checksums_of(texts), **texts}.items():
            self.write_text(name, text)

    def keep_lines(self, **counts: int) -> None:
        """Drop the lines of what is about to be run again: keep the first so many of each ``NAME.jsonl``."""
        for name, count in counts.items():
            file = self.path / f"{name}.jsonl"
            if file.is_file():
                lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
                self.write_text(file.name, "".join(lines[:count]))

    def save_model(self, model: Any, tokenizer: Any, provider: Any) -> None:
        """Write ``model/`` and ``provider/``, each whole or not at all."""
        if not self.writer:
            return
        with replaced_folder(self.path / "model") as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
        if provider is not None:
            provider.save_pretrained(self.path / "provider")
