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
from attnreg.experiments.options.files import CLASS_IN_FILE
from attnreg.experiments.options.option import as_typed, flag_of
from attnreg.experiments.runs.command import load_command

if TYPE_CHECKING:
    from optuna.trial import Trial

LAYERS = ("all", "lower half", "upper half", "first", "last")
_KEYS = ("recipe", "options", "providers", "layers", "most")
PLAIN = "finetune"
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
        by_text = {literal(value): value for value in self.extremes}  # optuna's file holds no lists
        return by_text[trial.suggest_categorical(name, list(by_text))]


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
        """Return the providers of the first trials: none, which is plain fine-tuning, then every provider alone."""
        plain = dict.fromkeys(self.providers, False)
        return [plain, *({**plain, name: True} for name in plain)] if plain else []

    def draw(self, trial: Trial, order: random.Random) -> str:
        """Draw a method. The random ``order`` of the providers matters if a composition may not hold all of them."""
        options = {flag: values.draw(trial, flag) for flag, values in self.options.items()}
        parts: dict[str, str] = {}
        for name in order.sample(list(self.providers), len(self.providers)):
            if len(parts) < self.most and trial.suggest_categorical(name, [False, True]):
                arguments = {key: values.draw(trial, f"{name} {key}") for key, values in self.providers[name].items()}
                parts[name] = self._expression(name, arguments)
        return self._method(options, [parts[name] for name in self.providers if name in parts])

    def extremes(self) -> Iterator[str]:
        """Return the methods to check before the search starts."""
        providers = self.providers.items()
        parts = [[self._expression(name, arguments)] for name, values in providers for arguments in _cycled(values)]
        for options in _cycled({"": Choice(parts or [[]]), **self.options}):
            part = options.pop("")
            yield self._method(options, part)

    def _expression(self, name: str, arguments: dict[str, Any]) -> str:
        indices = layer_indices(arguments.pop("layers"), self.layers)
        call = f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"
        return call if indices is None else f"OnLayers({call}, {indices})"

    def _method(self, options: Mapping[str, Any], parts: Sequence[str]) -> str:
        recipe = self.recipe
        if self.providers and not parts:
            recipe, flags = PLAIN, {param.opts[0] for param in load_command(PLAIN).params}
            options = {flag: value for flag, value in options.items() if flag in flags}
        # In double quotes, so that a shell needs only single quotes.
        quoted = " & ".join(parts).replace("\\", "\\\\").replace('"', '\\"')
        words = [recipe, f'--provider "{quoted}"' if parts else "", *(as_typed(*item) for item in options.items())]
        return " ".join(word for word in words if word)


def layer_indices(where: Any, layers: int | None) -> list[int] | None:
    """Return the layers that a word stands for, ``None`` for all; halves need the number of layers."""
    if isinstance(where, list):
        return where
    words: dict[str, list[int] | None] = {"all": None, "first": [0], "last": [-1]}
    if layers is not None:
        words |= {"lower half": list(range(layers // 2)), "upper half": list(range(layers // 2, layers))}
    if where not in words:
        forms = ", ".join(words) + ("" if layers else " (no halves: the model's number of layers is unknown)")
        raise InputError(f"Expected `layers` in the search space as {forms}, or lists of layer indices, got {where!r}.")
    return words[where]


def read_space(text: str | None) -> Space:
    """Read a search space from YAML (default: ``DEFAULT``), directly or from a ``.yaml`` or ``.yml`` file.

    Example:
        >>> space = read_space("{recipe: ad-drop, options: {--q: 0.1..0.5}}")
        >>> space.recipe, space.options
        ('ad-drop', {'--q': Range(low=0.1, high=0.5, log=False)})
    """
    source = text or DEFAULT
    is_file = source.lower().endswith((".yaml", ".yml"))
    content = mapping(load_yaml(Path(source) if is_file else source, "the search space"), "the search space", _KEYS)
    options, entries = (mapping(content.get(key), f"`{key}` of the search space") for key in ("options", "providers"))
    if not options and not entries:
        raise InputError("The search space is empty: give `options`, `providers`, or both.")
    if not entries and (unused := sorted({"layers", "most"} & content.keys())):
        raise InputError(f"`{unused[0]}` of the search space is of `providers`, which it lacks: remove it.")
    providers: dict[str, dict[str, Values]] = {}
    for name, entry in entries.items():
        if not re.fullmatch(rf"\w+|{CLASS_IN_FILE.pattern}", name):
            text = "Expected a provider's name in the search space, as in `DropHead: {p: 0.1..0.5}`"
            raise InputError(f"{text}, got {name!r}.")
        arguments = mapping(entry, f"{name} in the search space")
        arguments = {**arguments, "layers": arguments.get("layers", content.get("layers", list(LAYERS)))}
        providers[name] = {key: read_values(value, f"{name} {key}") for key, value in arguments.items()}
    most = content.get("most", max(1, len(providers)))
    if not isinstance(most, int) or most < 1:
        raise InputError(f"Expected `most` in the search space as a number of providers of at least 1, got {most!r}.")
    recipe = content.get("recipe", "regularize" if providers else PLAIN)
    flags = {flag_of(name.lstrip("-")): value for name, value in options.items()}
    params = (param for param in load_command(str(recipe)).params if getattr(param, "is_flag", False))
    switches = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    check_switches(flags, switches, "the search space")
    values = {flag: read_values(value, flag) for flag, value in flags.items()}
    return Space(str(recipe), values, providers, most, content)


def read_values(value: Any, name: str) -> Values:
    """Read a range such as ``0.1..0.5``, ``1..8`` or ``1e-5..1e-3 log``, a list of choices, or a fixed value.

    ``name`` names the value in messages.
    """
    if isinstance(value, str) and (ends := _RANGE.fullmatch(value.strip())):
        low, high, log = _number(ends[1]), _number(ends[2]), ends[3] == "log"
        numbers = not isinstance(low, str) and not isinstance(high, str) and (log or ends[3] is None)
        if numbers and low < high and (low > 0 or not log) and "..." not in value:
            return Range(low, high, log)
    else:
        values = [_number(item) for item in (value if isinstance(value, list) else [value])]
        if values and not any(isinstance(item, dict) or _has_dots(item) for item in values):
            return Choice(values)
    forms = "a range from low to high, such as 0.1..0.5 or 1e-5..1e-3 log (above 0), a list of values, or a value"
    raise InputError(f"Expected {name} in the search space as {forms}, got {value!r}.")


def _has_dots(value: Any) -> bool:
    """Whether a value is a text with the dots of a range, which is not a path."""
    return isinstance(value, str) and ".." in value and "/" not in value


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
    """Return combinations of the extreme values that hold every extreme value at least once."""
    ends = {name: value.extremes for name, value in values.items()}
    count = max(map(len, ends.values()))
    return [{name: end[number % len(end)] for name, end in ends.items()} for number in range(count)]
