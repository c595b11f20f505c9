"""The space of a search: options of a recipe, and candidates for a composition of providers."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from attnreg.errors import InputError, did_you_mean
from attnreg.experiments.compare.search.values import Choice, Values, literal, read_values
from attnreg.experiments.options.option import as_typed
from attnreg.experiments.runs.command import load_command

if TYPE_CHECKING:
    from optuna.trial import Trial

HALVES = ("lower half", "upper half")
LAYERS = ("all", *HALVES, "first", "last")
_KEYS = ("recipe", "options", "providers", "layers", "most")
_PLAIN = "finetune"
DEFAULT = """
providers:
  AttentionDropout: {p: 0.02..0.5, placement: [weights, scores]}
  DropKey: {p: 0.02..0.5, share_queries: true}
  DropAttention: {p: 0.02..0.5, window: [2, 3]}
  DropHead: {p: 0.02..0.5}
  AttentionLayerDrop: {p: 0.02..0.5}
"""


@dataclass(frozen=True)
class Candidate:
    """A provider that a composition may contain.

    Args:
        name: the provider's name.
        arguments: the values of its arguments.
        layers: where it may act: words of ``LAYERS``, or lists of layer indices.
    """

    name: str
    arguments: Mapping[str, Values]
    layers: Choice

    def draw(self, trial: Trial, layers: int | None) -> str:
        """Draw the arguments and the layers; return an expression."""
        drawn = {name: values.draw(trial, f"{self.name} {name}") for name, values in self.arguments.items()}
        return self._expression(drawn, self._distinct(layers).draw(trial, f"{self.name} layers"), layers)

    def start(self, layers: int | None) -> dict[str, Any]:
        """The parameters of a first trial: the middle of each range, and the first of each list."""
        values = {**self.arguments, "layers": self._distinct(layers)}
        return {f"{self.name} {name}": each.start for name, each in values.items() if each.start is not None}

    def extremes(self, layers: int | None) -> Iterator[str]:
        """Return the expressions to check before the search starts."""
        ends = {name: values.extremes for name, values in self.arguments.items()}
        for number in range(max(map(len, [*ends.values(), self.layers.values]))):
            drawn = {name: values[number % len(values)] for name, values in ends.items()}
            yield self._expression(drawn, self.layers.values[number % len(self.layers.values)], layers)

    def _expression(self, drawn: Mapping[str, Any], where: Any, layers: int | None) -> str:
        call = f"{self.name}({', '.join(f'{name}={literal(value)}' for name, value in drawn.items())})"
        indices = layer_indices(where, layers)
        return call if indices is None else f"OnLayers({call}, {indices})"

    def _distinct(self, layers: int | None) -> Choice:
        """The choices of layers without those that are the same in a model of so few layers."""
        found = {str(layer_indices(each, layers)): each for each in reversed(self.layers.values)}
        return Choice(list(found.values())[::-1])


@dataclass(frozen=True)
class Space:
    """What a search varies.

    Args:
        recipe: the recipe to run.
        options: the values of its options, by flag.
        candidates: the providers of which a composition is made, each of them in or out.
        most: the largest number of providers in a composition.
        content: the space as JSON can store it, to tell whether it has changed.
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
        plain: dict[str, Any] = {flag: each.start for flag, each in self.options.items() if each.start is not None}
        plain |= {candidate.name: False for candidate in self.candidates}
        return [plain, *({**plain, each.name: True, **each.start(layers)} for each in self.candidates)]

    @property
    def needs_layers(self) -> bool:
        """Whether the number of layers must be known."""
        return any(where in HALVES for candidate in self.candidates for where in candidate.layers.values)

    def draw(self, trial: Trial, layers: int | None, order: random.Random) -> str:
        """Draw a method: a recipe with its options.

        Args:
            trial: optuna's trial.
            layers: the number of layers of the model, if known.
            order: the order in which the candidates are asked for, which matters if not all may be in.
        """
        drawn = {flag: values.draw(trial, flag) for flag, values in self.options.items()}
        parts: dict[str, str] = {}
        for candidate in order.sample(self.candidates, len(self.candidates)):
            if len(parts) < self.most and trial.suggest_categorical(candidate.name, [False, True]):
                parts[candidate.name] = candidate.draw(trial, layers)
        return self._method(drawn, [parts[each.name] for each in self.candidates if each.name in parts])

    def extremes(self, layers: int | None) -> Iterator[str]:
        """Return the methods to check before the search starts."""
        expressions = [each for candidate in self.candidates for each in candidate.extremes(layers)]
        ends = {flag: values.extremes for flag, values in self.options.items()}
        for number in range(max([len(expressions), 1, *map(len, ends.values())])):
            drawn = {flag: values[number % len(values)] for flag, values in ends.items()}
            yield self._method(drawn, [expressions[number % len(expressions)]] if expressions else [])

    def _method(self, drawn: Mapping[str, Any], parts: Sequence[str]) -> str:
        recipe = self.recipe
        if self.candidates and not parts:
            recipe, known = _PLAIN, {param.opts[0] for param in load_command(_PLAIN).params}
            drawn = {flag: value for flag, value in drawn.items() if flag in known}
        words = [recipe, *([_quoted(" & ".join(parts))] if parts else [])]
        return " ".join(word for word in [*words, *(as_typed(*each) for each in drawn.items())] if word)


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
        found = range(middle) if where == HALVES[0] else range(middle, layers)
        return list(found)
    return [0] if where == "first" else [-1]


def read_space(text: str | None) -> Space:
    """Read a search space from YAML, given directly or as the path of a file.

    Args:
        text: the YAML text, or the path of a ``.yaml`` or ``.yml`` file (default: ``DEFAULT``).

    Raises:
        InputError: if it is no search space.

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


def _candidate(name: str, arguments: Any, layers: Any) -> Candidate:
    arguments = _mapping(arguments, f"{name} in the search space")
    where = arguments.pop("layers", layers)
    choices = where if isinstance(where, list) else [where]
    wrong = [each for each in choices if not (_is_indices(each) or (isinstance(each, str) and each in LAYERS))]
    if wrong or not choices:
        raise InputError(
            f"Expected `layers` in the search space as choices among {', '.join(LAYERS)} and lists of layer indices, "
            f"got {where!r}."
        )
    return Candidate(
        name, {key: read_values(each, f"{name} {key}") for key, each in arguments.items()}, Choice(choices)
    )


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


def _quoted(expression: str) -> str:
    r"""Return an expression as the option ``--provider``, without single quotes, so that a shell needs only those."""
    escaped = expression.replace("\\", "\\\\").replace('"', '\\"')
    return f'--provider "{escaped}"'
