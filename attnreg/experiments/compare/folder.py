"""The output folder of a comparison or a search: whose it is, what it was made with, and who writes to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnreg._files import LOCK, write_text
from attnreg.errors import InputError
from attnreg.experiments.folder.reader import locked


@dataclass(frozen=True)
class OutputFolder:
    """The folder of a comparison or a search (its ``kind``), with a JSON ``file`` that says what it was made with."""

    path: Path
    kind: str
    file: str

    def check(self) -> None:
        """Refuse a folder that holds other files."""
        held = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        if held - {LOCK} and self.file not in held:
            raise InputError(f"--output-dir {self.path} holds files but no {self.kind}: choose another folder.")

    def read(self) -> dict[str, Any]:
        """Return what the folder was made with; empty for a new folder."""
        path = self.path / self.file
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"Cannot read the {self.kind} from {path}: {error!r}.") from error

    def write(self, content: Mapping[str, Any]) -> None:
        """Write down what the folder is made with."""
        write_text(self.path / self.file, json.dumps(content, indent=2))

    def locked(self) -> AbstractContextManager[None]:
        """Create and lock the folder for the duration of the block."""
        busy = f"Another {self.kind} is writing to {self.path}: wait for it, or choose another --output-dir."
        return locked(self.path, busy)
