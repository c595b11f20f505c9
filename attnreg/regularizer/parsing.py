"""Expressions of calls as text, parsed and never evaluated; without torch, so that a wrong text is refused at once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import Signature
from typing import Any

from attnreg.errors import InputError, did_you_mean, one_line

LONGEST = 1000  # characters; keeps nesting far below the parser's limit
EXAMPLE = "AttentionDropout(0.1, placement='scores') & OnLayers(AttentionLayerDrop(0.2), [0, -1])"


@contextmanager
def refusing(text: str) -> Iterator[None]:
    """Report errors inside the block as an ``InputError``."""
    try:
        yield
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"Expected a provider such as {EXAMPLE}, got {text!r}, which is nested too deeply.") from None
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        raise InputError(f"Cannot make {text!r}: {one_line(error) or type(error).__name__}.") from error


def parsed(text: str) -> ast.expr:
    """Parse the text of an expression."""
    if len(text) > LONGEST:
        raise InputError(f"Expected a provider expression of at most {LONGEST} characters, got {len(text)}.")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise InputError(f"Expected a provider such as {EXAMPLE}, got {text!r}: {reason}.") from None


def build(
    node: ast.expr,
    text: str,
    known: Mapping[str, Any],
    make: Callable[..., Any],
    signature_of: Callable[[Any], Signature],
) -> Any:
    """Call ``make`` with the value in ``known`` of every called name, and its arguments, from the inside out."""
    context = text, known, make, signature_of
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return make(known.get("Compose"), *(build(side, *context) for side in (node.left, node.right)))
    if isinstance(node, ast.Name) and node.id in known:
        raise InputError(f"Expected provider calls joined by &, got {node.id} without brackets: write {node.id}().")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise InputError(
            f"Expected provider calls joined by &, such as {EXAMPLE}, got {ast.unparse(node)!r} in {text!r}."
        )
    name = node.func.id
    if name not in known:
        hint = did_you_mean(name, known) or f" Known are {', '.join(sorted(known))}."
        raise InputError(f"No provider is named {name!r}: see `attnreg list providers`.{hint}")
    values = [_argument(argument, *context) for argument in node.args]
    names = [option.arg for option in node.keywords]
    if None in names or len(set(names)) < len(names):
        raise InputError(f"Expected every argument of {name} by name and only once, got {ast.unparse(node)!r}.")
    options = {str(option.arg): _argument(option.value, *context) for option in node.keywords}
    signature = signature_of(known[name])
    try:
        bound = signature.bind_partial(*values, **options)
        return make(known[name], *bound.args, **bound.kwargs)
    except (TypeError, KeyError) as error:
        unknown = next((option for option in options if option not in signature.parameters), "")
        raise InputError(
            f"Expected the arguments of {name}{shown(signature)}, got {ast.unparse(node)}: {error}."
            f"{did_you_mean(unknown, signature.parameters)}"
        ) from error


def _argument(node: ast.expr, text: str, *context: Any) -> Any:
    if isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd)):
        return build(node, text, *context)
    with suppress(ValueError, TypeError, SyntaxError):
        # A saved dict would be mistaken for the description of a regularizer.
        if not any(isinstance(part, (ast.Dict, ast.Set)) for part in ast.walk(node)):
            value = ast.literal_eval(node)
            return list(value) if isinstance(value, tuple) else value
    raise InputError(
        f"Expected numbers, strings, lists, True, False or None as arguments, got {ast.unparse(node)!r} in {text!r}."
    )


def shown(signature: Signature) -> str:
    """Return a signature without types, for messages."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
