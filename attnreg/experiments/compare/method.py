"""A method of a comparison: a recipe with its options, some of which may be searched, or the winner of a search."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnreg._files import write_text
from attnreg.errors import InputError, UsageError
from attnreg.experiments.options.files import recipe_files
from attnreg.experiments.options.option import flag_of
from attnreg.experiments.options.settings import TASK_OPTIONS
from attnreg.experiments.runs.command import RecipeCommand, load_command

OF_ALL = {  # options that cannot be of a single method
    *("task", *TASK_OPTIONS, "data_dir"),
    *("train_size", "stratified", "shots", "folds", "validation_rows"),
    *("seed", "output_dir", "resume", "device"),
}
WINNER = "winner.json"
_BRACES = re.compile(r"\{([^{}]*)\}")
_NAME = r"[^\W_]\w*(?:-\w+)*"
_NAMED = "Expected words of letters and digits, with dashes between, as a name"
_ALIAS = re.compile(rf"({_NAME})=(?=\S)")
_FOLDERS = ("search", "plots")  # of a comparison, besides the folders of methods


@dataclass(frozen=True)
class Winner:
    """The best method of a search, its mean score over seeds (from 1000) on held-out rows, and the search's cost."""

    method: str
    score: float
    task: str
    trials: int
    runs: int
    seeds: int
    rows: int

    @classmethod
    def read(cls, folder: Path) -> Winner:
        """Read the winner from the folder of a search."""
        path = folder / WINNER
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise InputError(
                f"Expected the folder of a search after @, got {folder}: it has no {WINNER}; see `attnreg search`."
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"Cannot read the winner of a search from {path}: {error}.") from error

    def write(self, folder: Path) -> None:
        """Write the winner to the folder of its search."""
        write_text(folder / WINNER, json.dumps(asdict(self), indent=2))


@dataclass(frozen=True)
class Method:
    """A recipe and its options, as typed after ``attnreg recipe``; values in braces are searched on held-out rows.

    ``alias`` is a short name for reports and folders, ``folder`` holds the search that the method won, if any.
    """

    text: str
    alias: str | None = None
    folder: str | None = None

    @classmethod
    def parse(cls, typed: str) -> Method:
        """Read ``RECIPE --options``, ``NAME=RECIPE --options`` or ``NAME=@FOLDER``, the winner of a search."""
        if typed.startswith("@"):
            raise UsageError(f"Give the winner of a search a name, as in best={typed}.")
        if len(words := typed.split()) > 1 and {*words} <= recipe_files().keys():
            raise UsageError(f"{typed!r} is one word: remove the quotes, to compare {' and '.join(words)}.")
        if Path(*words[:1]).is_file():  # a recipe in a file, whose name may have the sign
            return cls(typed)
        if (named := _ALIAS.match(typed)) is None:
            name, sign, _ = typed.partition("=")
            if sign and not re.search(r"\s-", name):  # the sign is of no option
                raise UsageError(f"{_NAMED}, got {name!r}.")
            return cls(typed)
        alias, text = named[1], typed[named.end() :]
        if alias in _FOLDERS:
            raise UsageError(f"A comparison has a folder {alias}: choose another name than in {typed!r}.")
        return cls(Winner.read(Path(text[1:])).method, alias, text[1:]) if text[0] == "@" else cls(text, alias)

    @property
    def name(self) -> str:
        """The alias, or else the recipe and its options."""
        return self.alias or self.text

    @property
    def typed(self) -> str:
        """The method as on the command line."""
        text = self.text if self.folder is None else f"@{self.folder}"
        return text if self.alias is None else f"{self.alias}={text}"

    @property
    def winner(self) -> Winner | None:
        """The search that the method won, if any."""
        return None if self.folder is None else Winner.read(Path(self.folder))

    @property
    def tries(self) -> int:
        """The number of methods of which this one was chosen."""
        return len(self.variants) if self.winner is None else self.winner.trials

    @property
    def words(self) -> list[str]:
        """The recipe's name and its options, split as by a shell."""
        try:
            words = shlex.split(self.text)
        except ValueError as error:
            raise UsageError(f"Cannot parse method {self.text!r}: {error}.") from error
        if not words:
            raise UsageError("Expected a recipe with its options, got an empty text.")
        return words

    @property
    def command(self) -> RecipeCommand:
        """The recipe's command."""
        return load_command(self.words[0])

    @property
    def options(self) -> list[str]:
        """The recipe's options for a run of the comparison, in which the baseline is a separate run."""
        has_baseline = any(parameter.name == "baseline" for parameter in self.command.params)
        return [*self.words[1:], *(["--no-baseline"] if has_baseline else [])]

    @property
    def variants(self) -> list[Method]:
        """One method per combination of the values in braces; the method itself if there are no braces."""
        pieces = _BRACES.split(self.text)  # text and values alternate
        if len(pieces) == 1:
            return [self]
        choices = [piece.split(",") if number % 2 else [piece] for number, piece in enumerate(pieces)]
        if invalid := next((values for values in choices[1::2] if "" in values or len({*values}) < len(values)), None):
            braces = f"{{{','.join(invalid)}}} in {self.text!r}"
            raise UsageError(f"Expected different values in braces, none of them empty, got {braces}.")
        return [  # a typed alias never has the form of a variant's alias
            Method("".join(chosen), self.alias and f"{self.alias}={','.join(chosen[1::2])}")
            for chosen in itertools.product(*choices)
        ]

    @property
    def candidates(self) -> list[Method]:
        """The variants that a search chooses from; none if there is only one."""
        return variants if len(variants := self.variants) > 1 else []

    @property
    def slug(self) -> str:
        """The folder's name: the words of the method's name, with a short hash if they had to be changed."""
        words = self.words if self.alias is None else self.alias.split()
        name = "".join(words)
        allowed = re.sub(r"[^\w.=,-]", "_", name)[:80]
        return allowed if allowed == name else f"{allowed}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:8]}"

    def with_option(self, name: str, value: object) -> Method:
        """Return this method with one more option."""
        return Method(f"{self.text} {name} {value}", self.alias and f"{self.alias} {name} {value}")


def texts_of(methods: Any) -> list[str]:
    """Return the methods of a study file, a list or a mapping of names, as typed; an empty list of anything else."""
    if isinstance(methods, dict):
        if bad := [name for name, text in methods.items() if name != text and not re.fullmatch(_NAME, str(name))]:
            raise UsageError(f"{_NAMED}, got {bad[0]!r}.")
        return [str(text) if name == text else f"{name}={text}" for name, text in methods.items()]
    return [str(text) for text in methods] if isinstance(methods, list) else []


def default_baseline(methods: Sequence[Method]) -> Method:
    """Return the method that the others are compared with unless one is named: plain fine-tuning, or else the first."""
    return next((method for method in methods if method.words[0] == "finetune"), methods[0])


def typed_words(options: Mapping[str, object]) -> list[str]:
    """Return options as they are typed, from their values by name; ``None`` and ``False`` are left out."""
    lists = [(flag_of(name), value if isinstance(value, tuple) else (value,)) for name, value in options.items()]
    pairs = [(flag, value) for flag, values in lists for value in values if value is not None and value is not False]
    return [word for flag, value in pairs for word in ([flag] if value is True else [flag, str(value)])]
