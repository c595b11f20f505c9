"""A method of a comparison: a recipe with options, some of them perhaps to be searched."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from attnreg.errors import UsageError
from attnreg.experiments.runs.catalogue import load_command
from attnreg.experiments.runs.command import RecipeCommand

_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Method:
    """A recipe and its options, as they would be typed after ``attnreg recipe``.

    Values in braces are tried one after the other, on rows held out from train: ``ad-drop --q {0.1,0.3}``.

    Args:
        text: what was typed.

    Example:
        >>> [variant.text for variant in Method("ad-drop --p 0.3 --q {0.1,0.3}").variants]
        ['ad-drop --p 0.3 --q 0.1', 'ad-drop --p 0.3 --q 0.3']
        >>> Method("ad-drop --p 0.3").slug
        'ad-drop--p0.3'
    """

    text: str

    @property
    def words(self) -> list[str]:
        """The recipe's name and its options.

        Raises:
            UsageError: if quotes do not match, or there is nothing.
        """
        try:
            words = shlex.split(self.text)
        except ValueError as error:
            raise UsageError(f"Expected a recipe with its options, got {self.text!r}: {error}.") from error
        if not words:
            raise UsageError("Expected a recipe with its options, got an empty text.")
        return words

    @property
    def command(self) -> RecipeCommand:
        """The recipe's command.

        Raises:
            UsageError: if there is no such recipe.
        """
        return load_command(self.words[0])

    @property
    def options(self) -> list[str]:
        """Its options, for a run of a comparison: a baseline is a run of its own there."""
        has_baseline = any(parameter.name == "baseline" for parameter in self.command.params)
        return [*self.words[1:], *(["--no-baseline"] if has_baseline else [])]

    @property
    def variants(self) -> list[Method]:
        """Every combination of the values in braces; the method itself where there are none."""
        pieces = _BRACES.split(self.text)  # texts and values alternate
        choices = [piece.split(",") if number % 2 else [piece] for number, piece in enumerate(pieces)]
        return [Method("".join(chosen)) for chosen in itertools.product(*choices)]

    @property
    def slug(self) -> str:
        """Name of its folder: its words, and a short hash where they would not make a good name."""
        name = "".join(self.words)
        good = re.sub(r"[^\w.=,-]", "_", name)[:80]
        return good if good == name else f"{good}-{hashlib.sha256(' '.join(self.words).encode()).hexdigest()[:8]}"

    def with_option(self, name: str, value: object) -> Method:
        """The same with one more option."""
        return Method(f"{self.text} {name} {value}")


def common_options(options: Mapping[str, object]) -> list[str]:
    """Options as they are typed, from their values by name; those left ``None`` are left out.

    Example:
        >>> common_options({"train_size": 500, "model": None})
        ['--train-size', '500']
    """
    given = {name: value for name, value in options.items() if value is not None}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
