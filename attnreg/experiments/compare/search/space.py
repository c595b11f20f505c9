"""The space of a search: options of a recipe, and candidates for a composition of providers."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg.errors import InputError
from attnreg.experiments.compare.yaml_file import check_switches, load_yaml, mapping
from attnreg.experiments.options.option import as_typed
from attnreg.experiments.runs.command import load_command

if TYPE_CHECKING:
    from optuna.trial import Trial

LAYERS = ("all", "lower half", "upper half", "first", "last")
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
    def extremes(self) -> Sequence[Any]:
        """The values to check before the search starts."""
        return [self.low, self.high]

    def draw(self, trial: Trial, name: str) -> Any:
        """Draw a number; one that is not whole has three significant digits, so that it is easy to read and type."""
        if isinstance(self.low + self.high, int):
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        value = trial.suggest_float(name, self.low, self.high, log=self.log)
        return min(max(float(f"{value:.3g}"), self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """A list of values; a single one is fixed."""

    extremes: Sequence[Any]  # all are checked before the search starts

    def draw(self, trial: Trial, name: str) -> Any:
        """Choose a value."""
        if len(self.extremes) == 1:
            return self.extremes[0]
        named = {literal(value): value for value in self.extremes}  # optuna's file holds no lists
        return named[trial.suggest_categorical(name, list(named))]


Values = Range | Choice


@dataclass(frozen=True)
class Space:
    """What a search varies: options of a recipe, by flag, and which providers, at most ``most``, are in a composition.

    ``providers`` has the values of their arguments; the last "argument", ``layers``, is where it may act: words of
    ``LAYERS``, or lists of layer indices. ``content`` is the space as JSON can store it, to tell whether it has
    changed; ``layers`` is the number of layers of the model, if known.
    """

    recipe: str
    options: Mapping[str, Values]
    providers: Mapping[str, Mapping[str, Values]]
    most: int
    content: Mapping[str, Any]
    layers: int | None = None

    def starts(self) -> list[dict[str, bool]]:
        """Return which providers are in the first trials: none, which is plain fine-tuning, and each one alone."""
        plain = dict.fromkeys(self.providers, False)
        return [plain, *({**plain, name: True} for name in plain)] if plain else []

    def draw(self, trial: Trial, order: random.Random) -> str:
        """Draw a method; providers are asked for in a random ``order``, which matters if not all may be in."""
        options = {flag: values.draw(trial, flag) for flag, values in self.options.items()}
        parts: dict[str, str] = {}
        for name in order.sample(list(self.providers), len(self.providers)):
            if len(parts) < self.most and trial.suggest_categorical(name, [False, True]):
                drawn = {key: values.draw(trial, f"{name} {key}") for key, values in self.providers[name].items()}
                parts[name] = self._expression(name, drawn)
        return self._method(options, [parts[name] for name in self.providers if name in parts])

    def extremes(self) -> Iterator[str]:
        """Return the methods to check before the search starts."""
        parts = [
            [self._expression(name, drawn)] for name, provider in self.providers.items() for drawn in _cycled(provider)
        ]
        for drawn in _cycled({"": Choice(parts or [[]]), **self.options}):
            part = drawn.pop("")
            yield self._method(drawn, part)

    def _expression(self, name: str, drawn: dict[str, Any]) -> str:
        indices = layer_indices(drawn.pop("layers"), self.layers)
        call = f"{name}({', '.join(f'{key}={literal(value)}' for key, value in drawn.items())})"
        return call if indices is None else f"OnLayers({call}, {indices})"

    def _method(self, drawn: Mapping[str, Any], parts: Sequence[str]) -> str:
        recipe = self.recipe
        if self.providers and not parts:
            recipe, known = _PLAIN, {param.opts[0] for param in load_command(_PLAIN).params}
            drawn = {flag: value for flag, value in drawn.items() if flag in known}
        # Without single quotes, so that a shell needs only those.
        quoted = " & ".join(parts).replace("\\", "\\\\").replace('"', '\\"')
        words = [recipe, f'--provider "{quoted}"' if parts else "", *(as_typed(*item) for item in drawn.items())]
        return " ".join(word for word in words if word)


def layer_indices(where: Any, layers: int | None) -> list[int] | None:
    """Return the layers that a word stands for, ``None`` for all; halves need the number of layers."""
    if isinstance(where, list):
        return where
    words: dict[str, list[int] | None] = {"all": None, "first": [0], "last": [-1]}
    if layers is not None:
        words |= {"lower half": list(range(layers // 2)), "upper half": list(range(layers // 2, layers))}
    if where not in words:
        known = ", ".join(words) + ("" if layers else " (no halves: the model's number of layers is unknown)")
        raise InputError(f"Expected `layers` in the search space as {known}, or lists of layer indices, got {where!r}.")
    return words[where]


def read_space(text: str | None) -> Space:
    """Read a search space from YAML (default: ``DEFAULT``), given directly or as a ``.yaml`` or ``.yml`` file.

    Example:
        >>> space = read_space("{recipe: ad-drop, options: {--q: 0.1..0.5}}")
        >>> space.recipe, space.options
        ('ad-drop', {'--q': Range(low=0.1, high=0.5, log=False)})
    """
    source = text or DEFAULT
    is_file = source.lower().endswith((".yaml", ".yml"))
    content = mapping(load_yaml(Path(source) if is_file else source, "the search space"), "the search space", _KEYS)
    options, given = (mapping(content.get(key), f"`{key}` of the search space") for key in ("options", "providers"))
    if not options and not given:
        raise InputError("The search space is empty: give `options`, `providers`, or both.")
    if not given and (unused := sorted({"layers", "most"} & content.keys())):
        raise InputError(f"`{unused[0]}` of the search space is of `providers`, which it lacks: remove it.")
    providers: dict[str, dict[str, Values]] = {}
    for name, arguments in given.items():
        of_provider = mapping(arguments, f"{name} in the search space")
        whole = {**of_provider, "layers": of_provider.get("layers", content.get("layers", list(LAYERS)))}
        providers[name] = {key: read_values(value, f"{name} {key}") for key, value in whole.items()}
    most = content.get("most", max(1, len(providers)))
    if not isinstance(most, int) or most < 1:
        raise InputError(f"Expected `most` in the search space as a number of providers of at least 1, got {most!r}.")
    recipe = content.get("recipe", "regularize" if providers else _PLAIN)
    flags = {f"--{name.lstrip('-').replace('_', '-')}": value for name, value in options.items()}
    known = (param for param in load_command(str(recipe)).params if getattr(param, "is_flag", False))
    switches = {flag for param in known for flag in (*param.opts, *param.secondary_opts)}
    check_switches(flags, switches, "the search space")
    values = {flag: read_values(value, flag) for flag, value in flags.items()}
    return Space(str(recipe), values, providers, most, content)


def read_values(value: Any, name: str) -> Values:
    """Read a range such as ``0.1..0.5``, ``1..8`` or ``1e-5..1e-3 log``, a list of choices, or a fixed value.

    ``name`` is what has this value, for messages.
    """
    if isinstance(value, str) and (ends := _RANGE.fullmatch(value.strip())):
        low, high, log = _number(ends[1]), _number(ends[2]), ends[3] == "log"
        numbers = not isinstance(low, str) and not isinstance(high, str) and (log or ends[3] is None)
        if numbers and low < high and (low > 0 or not log):
            return Range(low, high, log)
    else:
        values = [_number(item) for item in (value if isinstance(value, list) else [value])]
        if values and not any(isinstance(item, dict) for item in values):
            return Choice(values)
    forms = "a range from low to high, such as 0.1..0.5 or 1e-5..1e-3 log (above 0), a list of values, or a value"
    raise InputError(f"Expected {name} in the search space as {forms}, got {value!r}.")


def literal(value: Any) -> str:
    """Return a value as it is written in an expression; texts are in double quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _number(value: Any) -> Any:
    """Return the number that a text stands for (YAML reads ``1e-5`` as a text), or else the value itself."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            number = kind(value)
            return number if math.isfinite(number) else value
    return value


def _cycled(values: Mapping[str, Values]) -> list[dict[str, Any]]:
    """Combine each extreme value with some of the others, so that all of them are there."""
    ends = {name: value.extremes for name, value in values.items()}
    count = max(map(len, ends.values()))
    return [{name: end[number % len(end)] for name, end in ends.items()} for number in range(count)]
