"""The options that all recipes share, resolved."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnreg.tasks.definition import Task
from attnreg.tasks.task import choose_task

TASK_OPTIONS = ("kind", "text_columns", "label_column", "choice_columns", "metric")
# What may differ between a run and its continuation.
_NOT_COMPARED = {"output_dir", "resume", "device", "save_steps", "report_to", "flags"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run's options; ``own`` are those of its recipe. Numbers left ``None`` take the task's defaults.

    ``flags`` says what is typed to give an option, by its name; by default the name, after dashes.
    """

    recipe: str
    task: str
    model: str | None = None
    data_dir: str | None = None
    epochs: int
    batch_size: int
    learning_rate: float
    max_length: int
    train_size: int | None = None
    validation_rows: int | None = None
    evaluate_every: int = 1
    seed: int = 0
    output_dir: Path
    resume: bool = False
    device: str | None = None
    save_steps: int | None = None
    mixed_precision: str | None = None
    report_to: tuple[str, ...] = ()
    kind: str | None = None
    text_columns: str | None = None
    label_column: str | None = None
    choice_columns: str | None = None
    metric: str | None = None
    own: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)

    def chosen_task(self) -> Task:
        """The task that the options name.

        Raises:
            UsageError: if they name none.
        """
        return choose_task(self.task, **{name: getattr(self, name) for name in TASK_OPTIONS})

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        values = dataclasses.asdict(self)
        kept = {name: values[name] for name in values if name not in _NOT_COMPARED}
        return json.loads(json.dumps(kept))  # tuples become lists, as they come back from a file

    def differences(self, config: dict[str, Any]) -> list[str]:
        """The options, as typed on the command line, in which a saved configuration differs."""
        mine = self.to_dict()
        flat = {**{k: v for k, v in mine.items() if k != "own"}, **mine["own"]}
        theirs = {**{k: v for k, v in config.items() if k != "own"}, **config.get("own", {})}
        return [
            f"{as_typed(self.flag(name), theirs.get(name)) or 'no ' + self.flag(name)} "
            f"(not {as_typed(self.flag(name), flat.get(name)) or 'given'})"
            for name in sorted(flat.keys() | theirs.keys() - {"attnreg"})
            if name != "attnreg" and flat.get(name) != theirs.get(name)
        ]

    def flag(self, name: str) -> str:
        """What is typed to give an option, without its value."""
        return self.flags.get(name, f"--{name.replace('_', '-')}")


def as_typed(flag: str, value: Any) -> str:
    r"""An option as it is typed; nothing where it is left out.

    Args:
        flag: the option's, such as ``--layers``; the name of an argument, which is typed without it.
        value: what it was read as.

    Example:
        >>> as_typed("--layers", [0, 1]), as_typed("--provider", "A('x') & B()"), as_typed("grid", ["p=0.1", "q=0.3"])
        ('--layers 0,1', '--provider "A(\'x\') & B()"', 'p=0.1 q=0.3')
        >>> as_typed("--search", True), as_typed("--search", False)
        ('--search', '')
    """
    if value is None or value is False or value == []:
        return ""
    if value is True:
        return flag
    words = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if not flag.startswith("-"):
        return shlex.join(words)
    text = ",".join(words)
    plain = not set(text) & set('"$`!\\')  # so that double quotes take it as it is
    return f'{flag} "{text}"' if "'" in text and plain else f"{flag} {shlex.quote(text)}"
