"""The space of a search: options of a recipe, and candidates for a composition of providers."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from attnreg.errors import InputError, did_you_mean
from attnreg.experiments.options.option import as_typed
from attnreg.experiments.runs.command import load_command

if TYPE_CHECKING:
    from optuna.trial import Trial

HALVES = ("lower half", "upper half")
LAYERS = ("all", *HALVES, "first", "last")
_KEYS = ("recipe", "options", "providers", "layers", "most")
_PLAIN = "finetune"
_RANGE = re.compile(r"([^\s/]+?)\.\.([^\s/]+)(?:\s+(\S+))?")
DEFAULT = """
providers:
  AttentionDropout: {p: 0.02..0.5, placement: [weights, scores]}
  DropKey: {p: 0.02..0.5, share_queries: true}
  DropAttention: {p: 0.02..0.5, window: [2, 3]}
  DropHead: {p: 0.02..0.5}
  AttentionLayerDrop: {p: 0.02..0.5}
"""


@dataclass(frozen=True)
class Range:
    """The numbers between two ends, whole if both ends are; with ``log``, their logarithm is drawn uniformly."""

    low: float
    high: float
    log: bool = False

    @property
    def _whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def extremes(self) -> Sequence[Any]:
        """The values to check before the search starts."""
        return [self.low, self.high]

    @property
    def start(self) -> Any:
        """The value of a first trial, as optuna stores it: the middle."""
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return round(middle) if self._whole else middle

    def draw(self, trial: Trial, name: str) -> Any:
        """Draw a number; one that is not whole has three significant digits, so that it is easy to read and type."""
        if self._whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        value = trial.suggest_float(name, self.low, self.high, log=self.log)
        return min(max(float(f"{value:.3g}"), self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """A list of values; a single one is fixed."""

    extremes: Sequence[Any]  # all are checked before the search starts

    @property
    def start(self) -> Any:
        """The value of a first trial, as optuna stores it: the first one, or ``None`` if there is nothing to choose."""
        return literal(self.extremes[0]) if len(self.extremes) > 1 else None

    def draw(self, trial: Trial, name: str) -> Any:
        """Choose a value."""
        if len(self.extremes) == 1:
            return self.extremes[0]
        named = {literal(value): value for value in self.extremes}  # optuna's file holds no lists
        return named[trial.suggest_categorical(name, list(named))]


Values = Range | Choice


@dataclass(frozen=True)
class Candidate:
    """A provider that a composition may contain, and the values of its arguments.

    The last "argument", ``layers``, is where it may act: words of ``LAYERS``, or lists of layer indices.
    """

    name: str
    arguments: Mapping[str, Values]

    def draw(self, trial: Trial, layers: int | None) -> str:
        """Draw the arguments and the layers; return an expression."""
        drawn = {name: values.draw(trial, f"{self.name} {name}") for name, values in self._distinct(layers).items()}
        return self._expression(drawn, layers)

    def start(self, layers: int | None) -> dict[str, Any]:
        """The parameters of a first trial: the middle of each range, and the first of each list."""
        return _starts({f"{self.name} {name}": values for name, values in self._distinct(layers).items()})

    def extremes(self, layers: int | None) -> list[str]:
        """Return the expressions to check before the search starts."""
        ends = {name: values.extremes for name, values in self.arguments.items()}
        return [self._expression(drawn, layers) for drawn in _cycled(ends)]

    def _expression(self, drawn: dict[str, Any], layers: int | None) -> str:
        indices = layer_indices(drawn.pop("layers"), layers)
        call = f"{self.name}({', '.join(f'{name}={literal(value)}' for name, value in drawn.items())})"
        return call if indices is None else f"OnLayers({call}, {indices})"

    def _distinct(self, layers: int | None) -> dict[str, Values]:
        """The arguments without choices of layers that are the same in a model of so few layers."""
        found = {str(layer_indices(each, layers)): each for each in reversed(self.arguments["layers"].extremes)}
        return {**self.arguments, "layers": Choice(list(found.values())[::-1])}


@dataclass(frozen=True)
class Space:
    """What a search varies: options of a recipe, by flag, and which candidates, at most ``most``, are in a composition.

    ``content`` is the space as JSON can store it, to tell whether it has changed.
    """

    recipe: str
    options: Mapping[str, Values]
    candidates: Sequence[Candidate]
    most: int
    content: Mapping[str, Any]

    def starts(self, layers: int | None) -> list[dict[str, Any]]:
        """Return the parameters of the first trials: no provider, which is plain fine-tuning, and each one alone."""
        if not self.candidates:
            return []
        plain = _starts(self.options) | {candidate.name: False for candidate in self.candidates}
        return [plain, *({**plain, each.name: True, **each.start(layers)} for each in self.candidates)]

    @property
    def needs_layers(self) -> bool:
        """Whether the number of layers must be known."""
        return any(where in HALVES for each in self.candidates for where in each.arguments["layers"].extremes)

    def draw(self, trial: Trial, layers: int | None, order: random.Random) -> str:
        """Draw a method: a recipe with its options.

        The candidates are asked for in a random ``order``, which matters if not all may be in.
        """
        drawn = {flag: values.draw(trial, flag) for flag, values in self.options.items()}
        parts: dict[str, str] = {}
        for candidate in order.sample(self.candidates, len(self.candidates)):
            if len(parts) < self.most and trial.suggest_categorical(candidate.name, [False, True]):
                parts[candidate.name] = candidate.draw(trial, layers)
        return self._method(drawn, [parts[each.name] for each in self.candidates if each.name in parts])

    def extremes(self, layers: int | None) -> Iterator[str]:
        """Return the methods to check before the search starts."""
        parts = [[text] for candidate in self.candidates for text in candidate.extremes(layers)] or [[]]
        for drawn in _cycled({"": parts, **{flag: values.extremes for flag, values in self.options.items()}}):
            part = drawn.pop("")
            yield self._method(drawn, part)

    def _method(self, drawn: Mapping[str, Any], parts: Sequence[str]) -> str:
        recipe = self.recipe
        if self.candidates and not parts:
            recipe, known = _PLAIN, {param.opts[0] for param in load_command(_PLAIN).params}
            drawn = {flag: value for flag, value in drawn.items() if flag in known}
        # Without single quotes, so that a shell needs only those.
        quoted = " & ".join(parts).replace("\\", "\\\\").replace('"', '\\"')
        words = [recipe, f'--provider "{quoted}"' if parts else "", *(as_typed(*each) for each in drawn.items())]
        return " ".join(word for word in words if word)


def layer_indices(where: Any, layers: int | None) -> list[int] | None:
    """Return the layers that a word stands for; ``None`` for all.

    Example:
        >>> [layer_indices(where, 5) for where in LAYERS]
        [None, [0, 1], [2, 3, 4], [0], [-1]]
    """
    if where == "all":
        return None
    if isinstance(where, list):
        return where
    if where in HALVES:
        assert layers is not None
        middle = layers // 2
        return list(range(middle) if where == HALVES[0] else range(middle, layers))
    return [0] if where == "first" else [-1]


def read_space(text: str | None) -> Space:
    """Read a search space from YAML (default: ``DEFAULT``), given directly or as a ``.yaml`` or ``.yml`` file.

    Example:
        >>> space = read_space("{recipe: ad-drop, options: {--q: 0.1..0.5}}")
        >>> space.recipe, space.options
        ('ad-drop', {'--q': Range(low=0.1, high=0.5, log=False)})
    """
    try:
        is_file = text is not None and text.lower().endswith((".yaml", ".yml"))
        content = yaml.safe_load(Path(str(text)).read_text(encoding="utf-8") if is_file else text or DEFAULT)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"Cannot read the search space: {' '.join(str(error).split())}") from error
    content = _mapping(content, "The search space", _KEYS)
    options = _mapping(content.get("options"), "`options` of the search space")
    providers = _mapping(content.get("providers"), "`providers` of the search space")
    if not options and not providers:
        raise InputError("The search space is empty: give `options`, `providers`, or both.")
    layers = content.get("layers", list(LAYERS))
    candidates = [_candidate(name, arguments, layers) for name, arguments in providers.items()]
    most = content.get("most", max(1, len(candidates)))
    if not isinstance(most, int) or most < 1:
        raise InputError(f"Expected `most` in the search space as a number of providers of at least 1, got {most!r}.")
    recipe = content.get("recipe", "regularize" if candidates else _PLAIN)
    flags = {f"--{str(name).lstrip('-').replace('_', '-')}": value for name, value in options.items()}
    values = {flag: read_values(value, flag) for flag, value in flags.items()}
    return Space(str(recipe), values, candidates, most, content)


def read_values(value: Any, name: str) -> Values:
    """Read a range such as ``0.1..0.5``, ``1..8`` or ``1e-5..1e-3 log``, a list of choices, or a fixed value.

    ``name`` is what has this value, for messages.

    Example:
        >>> read_values("1e-5..1e-3 log", "--learning-rate")
        Range(low=1e-05, high=0.001, log=True)
    """
    if isinstance(value, str) and (found := _RANGE.fullmatch(value.strip())):
        low, high = _number(found[1]), _number(found[2])
        log = found[3] == "log"
        numbers = not isinstance(low, str) and not isinstance(high, str) and (log or found[3] is None)
        if not numbers or not low < high or (log and low <= 0):
            raise InputError(
                f"Expected {name} in the search space as a range from low to high, such as 0.1..0.5 or "
                f"1e-5..1e-3 log (above 0), got {value!r}."
            )
        return Range(low, high, log)
    values = [_number(each) for each in (value if isinstance(value, list) else [value])]
    if not values or any(isinstance(each, dict) for each in values):
        raise InputError(
            f"Expected {name} in the search space as a range such as 0.1..0.5, a list of values, or a value, got "
            f"{value!r}."
        )
    return Choice(values)


def literal(value: Any) -> str:
    """Return a value as it is written in an expression; texts are in double quotes.

    Example:
        >>> literal("scores"), literal([0, 1]), literal(True), literal(0.5)
        ('"scores"', '[0, 1]', 'True', '0.5')
    """
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _candidate(name: str, arguments: Any, layers: Any) -> Candidate:
    arguments = _mapping(arguments, f"{name} in the search space")
    where = arguments.pop("layers", layers)
    choices = where if isinstance(where, list) else [where]
    if not choices or not all((isinstance(each, str) and each in LAYERS) or _is_indices(each) for each in choices):
        raise InputError(
            f"Expected `layers` in the search space as choices among {', '.join(LAYERS)} and lists of layer indices, "
            f"got {where!r}."
        )
    values = {key: read_values(each, f"{name} {key}") for key, each in arguments.items()}
    return Candidate(name, {**values, "layers": Choice(choices)})


def _is_indices(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _mapping(content: Any, what: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """Return a copy of a mapping; an absent one is empty."""
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(
            f"{what} must be a mapping, such as `providers: {{DropHead: {{p: 0.1..0.5}}}}`, got {content!r}."
        )
    for key in content:
        if keys and key not in keys:
            raise InputError(
                f"Expected a key among {', '.join(keys)} in the search space, got {key!r}."
                + did_you_mean(str(key), keys)
            )
    return {str(key): value for key, value in content.items()}


def _number(value: Any) -> Any:
    """Return the number that a text stands for (YAML reads ``1e-5`` as a text), or else the value itself."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            number = kind(value)
            return number if math.isfinite(number) else value
    return value


def _starts(values: Mapping[str, Values]) -> dict[str, Any]:
    return {name: each.start for name, each in values.items() if each.start is not None}


def _cycled(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combine each value with some of the others, so that all of them are there."""
    count = max(map(len, values.values()))
    return [{name: each[number % len(each)] for name, each in values.items()} for number in range(count)]
