"""Regularizers written as text, such as ``DropHead(0.1) & OnLayers(AttentionLayerDrop(0.2), [0, 1])``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from attnreg.errors import InputError
from attnreg.regularizer.base import Regularizer, a_regularizer
from attnreg.regularizer.parsing import build, parsed, refusing
from attnreg.regularizer.saving import known_providers

Result = TypeVar("Result")


def parse_provider(
    text: str,
    model: nn.Module | None = None,
    total_steps: int | None = None,
    providers: Sequence[type[Regularizer]] = (),
) -> Regularizer:
    """Make a regularizer from an expression: calls joined by ``&``.

    The text is parsed, never evaluated. Arguments are regularizers, numbers, strings, lists, ``True``, ``False`` or
    ``None``.

    Args:
        text: the expression.
        model: the model for regularizers that need one (the classes with ``for_model``).
        total_steps: number of optimizer steps, for schedules that do not set this argument.
        providers: your own classes that the expression may name.

    Raises:
        InputError: if the text is not such an expression, an argument does not fit, or memory runs out.

    Example:
        >>> provider = parse_provider("AttentionDropout(0.1, 'scores') & OnLayers(AttentionLayerDrop(0.2), [0])")
        >>> [type(part).__name__ for part in provider.providers]
        ['AttentionDropout', 'OnLayers']
        >>> parse_provider("__import__('os').getcwd()")
        Traceback (most recent call last):
            ...
        attnreg.errors.InputError: Expected provider calls joined by &, ...
    """

    def make(cls: type[Regularizer], *args: Any, **options: Any) -> Regularizer:
        if not hasattr(cls, "for_model"):
            return _call(cls, total_steps, *args, **options)
        if model is None:
            raise InputError(f"{cls.__name__} is made for a model: pass `model` to `parse_provider`.")
        return _call(cls.for_model, total_steps, model, *args, **options)

    with refusing(text):
        return a_regularizer(build(parsed(text), text, _classes(providers), make, _signature), text)


def parse_call(text: str, classes: Mapping[str, Callable[..., Result]]) -> Result:
    """Make an object from a call with literal arguments, such as ``Reinforce(per='sample')``, without evaluating it."""
    with refusing(text):
        node = parsed(text)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in classes:
            raise InputError(f"Expected {' or '.join(f'{name}(...)' for name in classes)}, got {text!r}.")
        return build(node, text, classes, lambda cls, *args, **options: cls(*args, **options), inspect.signature)


def checked_expression(text: str, providers: Sequence[type[Regularizer]] = ()) -> str:
    """Return an expression in a uniform spelling, if every regularizer and argument in it is known and in range.

    Of regularizers that need a model, and of regularizers around them, only the arguments' names are checked.
    """
    unmade = object()  # stands for a regularizer that needs a model

    def make(cls: type[Regularizer], *args: Any, **options: Any) -> Any:
        needs_model = hasattr(cls, "for_model") or any(value is unmade for value in (*args, *options.values()))
        return unmade if needs_model else _call(cls, 1, *args, **options)

    with refusing(text):
        node = parsed(text)
        build(node, text, _classes(providers), make, _signature)
        return ast.unparse(node)


def _call(factory: Callable[..., Regularizer], total_steps: int | None, *args: Any, **options: Any) -> Regularizer:
    """Call a factory, with the number of steps if it takes this argument and the options lack it."""
    bound = inspect.signature(factory).bind_partial(*args, **options)
    if "total_steps" in bound.signature.parameters and total_steps is not None:
        bound.arguments.setdefault("total_steps", total_steps)
    return factory(*bound.args, **bound.kwargs)


def _classes(providers: Sequence[type[Regularizer]]) -> dict[str, type[Any]]:
    """Return the built-in and the user's classes, by name; refuse a class whose name is taken."""
    known = known_providers(providers)
    for cls in providers:
        if known.get(cls.__name__) is not cls:
            raise InputError(f"Another provider is named {cls.__name__}, too: rename {cls.__module__}.{cls.__name__}.")
    return known


def _signature(cls: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of an expression's call: without the arguments that follow from the model."""
    measured = getattr(cls, "measured", ())
    factory = cls if measured else getattr(cls, "for_model", cls)
    left_out = (*measured, *(() if factory is cls else ("model",)))
    return inspect.Signature([p for name, p in inspect.signature(factory).parameters.items() if name not in left_out])
