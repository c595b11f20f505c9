"""The built-in regularizers and their arguments, read from the source, so that a wrong one is refused without torch."""

from __future__ import annotations

import ast
import contextlib
import functools
from inspect import Parameter, Signature
from typing import Any

import attnreg
from attnreg import arguments
from attnreg._lazy import REGULARIZERS, listed_names
from attnreg.experiments.options.option import aliases_in, defined, parsed
from attnreg.regularizer.parsing import made, refusing
from attnreg.regularizer.parsing import parsed as expression

_BASES = {"Regularizer", "MaskProvider", "HiddenProvider"}
_CHECKS: dict[str, Any] = {
    "Probability": arguments.probability,
    "ProbabilityBelowOne": arguments.probability_below_one,
    "InnerProbability": arguments.inner_probability,
    "NotNegative": arguments.not_negative,
    "Count": arguments.whole_number,
    "Index": lambda name, value: arguments.whole_number(name, value, least=0),
}


@functools.cache
def regularizers() -> dict[str, tuple[str, ast.ClassDef]]:
    """Return the module and the definition of each built-in regularizer, by name."""
    names = {name: module for name, module in listed_names(attnreg.__file__).items() if module.startswith(REGULARIZERS)}
    classes = {name: module for name, module in names.items() if name[0].isupper() and name not in _BASES}
    return {name: (module, defined(parsed(module), name, ast.ClassDef)) for name, module in classes.items()}


def signature_of(name: str) -> Signature:
    """Return the arguments that an expression may give a regularizer: all but those that follow from the model."""
    module, source = regularizers()[name]
    family = [source, *_bases(module, source)]
    methods = {each.name: each for each in source.body if isinstance(each, ast.FunctionDef)}
    left_out = next((names for each in family if (names := _measured(each))), ())
    maker = methods["__init__"] if left_out else methods.get("for_model", methods["__init__"])
    spec, positional = maker.args, maker.args.posonlyargs + maker.args.args
    firsts = 1 if maker.name == "__init__" else 2  # `self`, or `cls` and the model
    kinds: list[tuple[ast.arg, Any]] = [(each, Parameter.POSITIONAL_OR_KEYWORD) for each in positional[firsts:]]
    kinds += [(spec.vararg, Parameter.VAR_POSITIONAL)] if spec.vararg else []
    kinds += [(each, Parameter.KEYWORD_ONLY) for each in spec.kwonlyargs]
    kinds += [(spec.kwarg, Parameter.VAR_KEYWORD)] if spec.kwarg else []
    given = dict(zip([each.arg for each in positional][::-1], spec.defaults[::-1], strict=False))
    given |= {each.arg: value for each, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value}
    defaults = {each: ast.literal_eval(value) for each, value in given.items()}
    made_of = [
        (each, kind, defaults.get(each.arg, Parameter.empty)) for each, kind in kinds if each.arg not in left_out
    ]
    return Signature(
        [Parameter(each.arg, kind, default=default, annotation=each.annotation) for each, kind, default in made_of]
    )


def checked(text: str) -> str:
    """Return an expression in a uniform spelling, if every regularizer and argument in it is known and in its range."""

    def check(name: str, *values: Any, **options: Any) -> None:
        bound = signature_of(name).bind_partial(*values, **options)
        aliases = aliases_in(regularizers()[name][0])
        for argument, value in bound.arguments.items():
            annotation = bound.signature.parameters[argument].annotation
            _check(argument, value, annotation, aliases)

    with refusing(text):
        node = expression(text)
        made(node, text, {name: name for name in regularizers()}, check, signature_of)
        return ast.unparse(node)


def _check(name: str, value: Any, annotation: ast.expr, aliases: dict[str, ast.expr]) -> None:
    """Check a plain value by its annotation, unless that allows something else, too."""
    spelled = ast.unparse(annotation).removesuffix(" | None")
    if value is None or isinstance(value, list):
        return
    if spelled in _CHECKS:
        _CHECKS[spelled](name, value)
    elif ast.unparse(literal := aliases.get(spelled, annotation)).startswith("Literal["):
        assert isinstance(literal, ast.Subscript)
        choices = ast.literal_eval(literal.slice)
        arguments.one_of(name, value, choices if isinstance(choices, tuple) else (choices,))


def _bases(module: str, source: ast.ClassDef) -> list[ast.ClassDef]:
    """Return the definitions of the bases that are in the same module, nearest first."""
    found: list[ast.ClassDef] = []
    for base in source.bases:
        with contextlib.suppress(StopIteration):
            nearest = defined(parsed(module), ast.unparse(base), ast.ClassDef)
            found += [nearest, *_bases(module, nearest)]
    return found


def _measured(source: ast.ClassDef) -> tuple[str, ...]:
    """Return the value of the attribute ``measured`` of a class, if it sets one."""
    values = (
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and "measured" in map(ast.unparse, node.targets)
    )
    return next(map(ast.literal_eval, values), ())
