"""Regularizers written as text, such as ``DropHead(0.1) & OnLayers(AttentionLayerDrop(0.2), [0, 1])``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from torch import nn

from attnreg.errors import InputError, did_you_mean, one_line
from attnreg.regularizer.base import Compose, Regularizer, a_regularizer
from attnreg.regularizer.saving import known_providers, shown

LONGEST = 1000  # characters; keeps nesting far below the parser's limit
Made = TypeVar("Made")
EXAMPLE = "AttentionDropout(0.1, placement='scores') & OnLayers(AttentionLayerDrop(0.2), [0, -1])"


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
        model: the model for regularizers that are made for one (those with ``for_model``).
        total_steps: number of optimizer steps, for schedules that do not set it.
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
        factory: Callable[..., Regularizer] = cls
        if hasattr(cls, "for_model"):
            if model is None:
                raise InputError(f"{cls.__name__} is made for a model: pass `model` to `parse_provider`.")
            factory, args = cls.for_model, (model, *args)
        bound = inspect.signature(factory).bind_partial(*args, **options)
        if "total_steps" in bound.signature.parameters and total_steps is not None:
            bound.arguments.setdefault("total_steps", total_steps)
        return factory(*bound.args, **bound.kwargs)

    with _refusing(text):
        return a_regularizer(_made(_parsed(text), text, _known(providers), make), text)


def parse_call(text: str, classes: Mapping[str, Callable[..., Made]]) -> Made:
    """Make an object from a call with literal arguments, such as ``Reinforce(per='sample')``, without evaluating it."""
    with _refusing(text):
        node = _parsed(text)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in classes:
            raise InputError(f"Expected {' or '.join(f'{name}(...)' for name in classes)}, got {text!r}.")
        return _made(node, text, classes, lambda factory, *args, **options: factory(*args, **options))


def expression_of(provider: Regularizer) -> str:
    """Return a regularizer as an expression, with all arguments by name."""
    if isinstance(provider, Compose):
        return " & ".join(expression_of(each) for each in provider.inner())
    values = (
        f"{name}={expression_of(value) if isinstance(value, Regularizer) else repr(value)}"
        for name, value in provider.config.items()
    )
    return f"{type(provider).__name__}({', '.join(values)})"


def checked_expression(text: str, providers: Sequence[type[Regularizer]] = ()) -> str:
    """Return an expression in a uniform spelling, if every regularizer and argument in it is known."""
    with _refusing(text):
        node = _parsed(text)
        _made(node, text, _known(providers), lambda *args, **options: None)
        return ast.unparse(node)


def _known(providers: Sequence[type[Regularizer]]) -> dict[str, type[Any]]:
    """Return the built-in classes and your own, by name; refuse one whose name is taken."""
    known = known_providers(providers)
    for cls in providers:
        if known.get(cls.__name__) is not cls:
            raise InputError(f"Another provider is named {cls.__name__}, too: rename {cls.__module__}.{cls.__name__}.")
    return known


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """Report what goes wrong inside the block as an ``InputError``."""
    try:
        yield
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"Expected a provider such as {EXAMPLE}, got {text!r}, which is nested too deeply.") from None
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        raise InputError(f"Cannot make {text!r}: {one_line(error) or type(error).__name__}.") from error


def _parsed(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise InputError(f"Expected a provider expression of at most {LONGEST} characters, got {len(text)}.")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise InputError(f"Expected a provider such as {EXAMPLE}, got {text!r}: {reason}.") from None


def _made(node: ast.expr, text: str, known: Mapping[str, Callable[..., Any]], make: Callable[..., Any]) -> Any:
    """Call ``make`` with what each call in an expression names, and its arguments, from the inside out."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return make(Compose, *(_made(side, text, known, make) for side in (node.left, node.right)))
    if isinstance(node, ast.Name) and node.id in known:
        raise InputError(f"Expected provider calls joined by &, got {node.id} without brackets: write {node.id}().")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise InputError(
            f"Expected provider calls joined by &, such as {EXAMPLE}, got {ast.unparse(node)!r} in {text!r}."
        )
    name = node.func.id
    if name not in known:
        raise InputError(
            f"Expected a provider among {', '.join(sorted(known))}, got {name!r}; see `attnreg list providers`."
            f"{did_you_mean(name, known)}"
        )
    values = [_value(argument, text, known, make) for argument in node.args]
    names = [option.arg for option in node.keywords]
    if None in names or len(set(names)) < len(names):
        raise InputError(f"Expected each argument of {name} by name and only once, got {ast.unparse(node)!r}.")
    options = {str(option.arg): _value(option.value, text, known, make) for option in node.keywords}
    signature = _signature(known[name])
    try:
        bound = signature.bind_partial(*values, **options)
        return make(known[name], *bound.args, **bound.kwargs)
    except (TypeError, KeyError) as error:
        unknown = next((option for option in options if option not in signature.parameters), "")
        raise InputError(
            f"Expected the arguments of {name}{shown(signature)}, got {ast.unparse(node)}: {error}."
            f"{did_you_mean(unknown, signature.parameters)}"
        ) from error


def _signature(cls: Callable[..., Any]) -> inspect.Signature:
    """The arguments that an expression may give: all but those that follow from the model."""
    measured = getattr(cls, "measured", ())
    factory = cls if measured else getattr(cls, "for_model", cls)
    left_out = (*measured, *(() if factory is cls else ("model",)))
    return inspect.Signature([p for name, p in inspect.signature(factory).parameters.items() if name not in left_out])


def _value(node: ast.expr, text: str, known: Mapping[str, Callable[..., Any]], make: Callable[..., Any]) -> Any:
    if isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd)):
        return _made(node, text, known, make)
    with suppress(ValueError, TypeError, SyntaxError):
        # A saved dict would be mistaken for the description of a regularizer.
        if not any(isinstance(part, (ast.Dict, ast.Set)) for part in ast.walk(node)):
            value = ast.literal_eval(node)
            return list(value) if isinstance(value, tuple) else value
    raise InputError(
        f"Expected numbers, strings, lists, True, False or None as arguments, got {ast.unparse(node)!r} in {text!r}."
    )
