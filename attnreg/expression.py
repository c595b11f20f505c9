"""Providers written as text, such as ``DropHead(0.1) & OnLayers(AttentionLayerDrop(0.2), [0, 1])``, or as YAML."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from attnreg.errors import InputError
from attnreg.pretrained import build, known_providers
from attnreg.provider import MaskProvider

SUFFIXES = (".yaml", ".yml")
LONGEST = 1000  # characters: nesting stays far from what the parser can take
EXAMPLE = "AttentionDropout(0.1, placement='scores') & OnLayers(AttentionLayerDrop(0.2), [0, -1])"


def parse_provider(
    text: str,
    model: nn.Module | None = None,
    total_steps: int | None = None,
    providers: Sequence[type[MaskProvider]] = (),
) -> MaskProvider:
    """Make a provider from an expression: calls of providers with literal arguments, joined by ``&``.

    The text is taken apart, never evaluated: names other than those of providers, and anything but numbers, strings,
    lists, ``True``, ``False`` and ``None``, are refused.

    Args:
        text: the expression.
        model: for providers that are made to fit a model (those with a ``for_model``).
        total_steps: of training, for schedules that do not say it themselves.
        providers: classes of your own that the expression may name.

    Raises:
        InputError: if it is not such an expression, an argument does not fit, or memory does not suffice.

    Example:
        >>> provider = parse_provider("AttentionDropout(0.1, 'scores') & OnLayers(AttentionLayerDrop(0.2), [0])")
        >>> [type(part).__name__ for part in provider.providers]
        ['AttentionDropout', 'OnLayers']
        >>> parse_provider("__import__('os').getcwd()")
        Traceback (most recent call last):
            ...
        attnreg.errors.InputError: Expected calls of providers joined by &, ...
    """

    def make(cls: type[MaskProvider], *args: Any, **options: Any) -> MaskProvider:
        factory: Callable[..., MaskProvider] = cls
        if hasattr(cls, "for_model"):
            if model is None:
                raise InputError(f"Expected a model, to which {cls.__name__} is made to fit, got none.")
            factory, args = cls.for_model, (model, *args)
        if "total_steps" in inspect.signature(factory).parameters and total_steps is not None:
            options.setdefault("total_steps", total_steps)
        return factory(*args, **options)

    known = known_providers(providers)
    for cls in providers:
        if known.get(cls.__name__) is not cls:
            raise InputError(
                f"{cls.__name__} is the name of another provider too: rename {cls.__module__}.{cls.__name__}."
            )
    with _within_depth(text):
        try:
            return build(_description(_parsed(text), text, known), make, known)
        except (InputError, RecursionError):
            raise
        except (ValueError, TypeError) as error:
            raise InputError(" ".join(str(error).split())) from error
        except (RuntimeError, OverflowError, MemoryError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"Expected a provider that can be made, got {text!r}: {reason}.") from error


def read_expression(text: str) -> str:
    """The expression itself, in one spelling: of an expression, or of a YAML file that holds one or spells one out.

    Args:
        text: an expression, or the path of a ``.yaml`` or ``.yml`` file.

    Raises:
        InputError: if there is no such file, or it does not hold a provider.

    Example:
        >>> read_expression("AttentionLayerDrop( p=0.2 )&AttentionDropout(0.1,'scores')")
        "AttentionLayerDrop(p=0.2) & AttentionDropout(0.1, 'scores')"
    """
    with _within_depth(text):
        if text.lower().endswith(SUFFIXES):
            text = _of_yaml(Path(text))
        node = _parsed(text)
        _description(node, text, known_providers())  # what does not fit is told at once
        return ast.unparse(node)


@contextmanager
def _within_depth(text: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise InputError(f"Expected a provider such as {EXAMPLE}, got {text!r}, which is nested too deeply.") from None


def _parsed(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise InputError(f"Expected a provider in at most {LONGEST} characters, got {len(text)}.")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"Expected a provider such as {EXAMPLE}, got {text!r}: {error}.") from None


def _description(node: ast.expr, text: str, known: Mapping[str, type[MaskProvider]]) -> dict[str, Any]:
    """What :func:`attnreg.pretrained.build` takes."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        parts = [_description(side, text, known) for side in (node.left, node.right)]
        return {"provider": "Compose", "config": {"providers": parts}}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise InputError(
            f"Expected calls of providers joined by &, such as {EXAMPLE}, got {ast.unparse(node)!r} in {text!r}."
        )
    name = node.func.id
    if name not in known:
        raise InputError(
            f"Expected a provider among {', '.join(sorted(known))}, got {name!r}; see `attnreg list providers`."
        )
    factory = getattr(known[name], "for_model", known[name])
    values = [_value(argument, text, known) for argument in node.args]
    names = [option.arg for option in node.keywords]
    if None in names or len(set(names)) < len(names):
        raise InputError(f"Expected the arguments of {name} by name, each once, got {ast.unparse(node)!r}.")
    options = {str(option.arg): _value(option.value, text, known) for option in node.keywords}
    parameters = inspect.signature(factory).parameters.values()
    signature = inspect.Signature([p for p in parameters if factory is known[name] or p.name != "model"])
    try:
        bound = signature.bind_partial(*values, **options).arguments
    except TypeError as error:
        raise InputError(f"Expected the arguments of {name}{signature}, got {ast.unparse(node)}: {error}.") from None
    return {"provider": name, "config": {k: list(v) if isinstance(v, tuple) else v for k, v in bound.items()}}


def _value(node: ast.expr, text: str, known: Mapping[str, type[MaskProvider]]) -> Any:
    if isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd)):
        return _description(node, text, known)
    try:
        # A dict would be taken for the description of a provider.
        if not any(isinstance(part, (ast.Dict, ast.Set)) for part in ast.walk(node)):
            return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass
    raise InputError(
        f"Expected numbers, strings, lists, True, False or None as arguments, got {ast.unparse(node)!r} in {text!r}."
    )


def _of_yaml(file: Path) -> str:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"Expected a YAML file with a provider, got {file}: {' '.join(str(error).split())}") from error
    if isinstance(content, dict) and set(content) == {"provider"}:
        content = content["provider"]
    return _spelled(content, file)


def _spelled(content: Any, file: Path) -> str:
    if isinstance(content, str):
        return content if "(" in content else f"{content}()"
    if isinstance(content, list) and content:
        return " & ".join(_spelled(item, file) for item in content)
    if isinstance(content, dict) and len(content) == 1:
        ((name, arguments),) = content.items()
        arguments = {} if arguments is None else arguments
        if isinstance(arguments, list):
            return f"{name}({', '.join(_argument(value, file) for value in arguments)})"
        if isinstance(arguments, dict):
            return f"{name}({', '.join(f'{key}={_argument(value, file)}' for key, value in arguments.items())})"
    raise InputError(
        f"Expected providers in {file} as a list of entries like `AttentionLayerDrop: {{p: 0.2}}`, or an expression, "
        f"got {content!r}."
    )


def _argument(value: Any, file: Path) -> str:
    is_provider = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
    return _spelled(value, file) if is_provider else repr(value)
