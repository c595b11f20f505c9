"""Options that are expressions, such as ``--provider``, of built-in classes and of classes in files."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import attnreg
from attnreg._lazy import REGULARIZERS, listed_names
from attnreg.errors import InputError
from attnreg.experiments.options.files import CLASS_IN_FILE, load_file
from attnreg.experiments.options.option import option
from attnreg.regularizer.parsing import build, parsed, refusing

if TYPE_CHECKING:
    from torch import nn

    from attnreg.regularizer.base import Regularizer


def provider_option(*, required: bool = True, summary: str = "Provider") -> Callable[[Any], Any]:
    """Make the options ``--provider``, an expression, and ``--provider-lr``.

    Args:
        required: whether the option must be set; if not, the recipe may receive ``None``.
        summary: the beginning of the help text.
    """
    text = f"{summary}: of `attnreg list providers`, or FILE.py:CLASS(...); several joined by &."
    reader = f"{__name__}:read_provider"
    provider = expression_option("--provider", reader, required=required, metavar="EXPRESSION", help=text)
    rate = option("--provider-lr", type=click.FloatRange(min=0), default=1e-2,
                  help="Learning rate of the provider's parameters, if any.")  # fmt: skip
    return lambda function: provider(rate(function))


def expression_option(flag: str, reader: str, **kwargs: Any) -> Callable[[Any], Any]:
    """Make an option whose value is an expression, checked before the run begins. The recipe receives the expression.

    Args:
        flag: the option's flag.
        reader: module and name, such as ``my_module:read``, of a function that checks the text. If it returns a text,
            such as another spelling, this is the value. It is imported only if the option is used, because it may
            import torch.
        kwargs: arguments of :func:`attnreg.experiments.option`.
    """

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
        if text is None:
            return None
        value = pkgutil.resolve_name(reader)(text)
        return value if isinstance(value, str) else text

    return option(flag, callback=read, **kwargs)


def read_provider(text: str) -> str:
    """Return a provider expression in a uniform spelling; raise if one of its providers or arguments does not fit."""
    _check_names(text)
    classes = own_classes([text])
    from attnreg.regularizer.expressions import checked_expression  # late: it imports torch

    spelled = checked_expression(CLASS_IN_FILE.sub(r"\2", text), classes)
    for file, name in set(CLASS_IN_FILE.findall(text)):
        spelled = re.sub(rf"\b(?={name}\()", f"{file}:".replace("\\", r"\\"), spelled)
    return spelled


def _check_names(text: str) -> None:
    """Refuse a text that is no expression of regularizers before torch is imported, which takes seconds."""
    if re.search(r"[^\s&(,:=[]\s+[^\s&(),:=[\]]*\.py:", text):
        raise InputError(f"Expected a provider's file without spaces in its path, got {text!r}: move or link it.")
    names = [name for name, module in listed_names(attnreg.__file__).items() if module.startswith(REGULARIZERS)]
    known = dict.fromkeys([*names, *(name for _, name in CLASS_IN_FILE.findall(text))])
    with refusing(text):
        plain = CLASS_IN_FILE.sub(r"\2", text)
        build(parsed(plain), plain, known, lambda *_, **__: None, lambda _: inspect.signature(lambda *_, **__: None))


def make_provider(text: str, model: nn.Module, total_steps: int) -> Regularizer:
    """Make a provider from an expression that :func:`read_provider` has checked."""
    from attnreg.regularizer.expressions import parse_provider  # late: it imports torch

    return parse_provider(CLASS_IN_FILE.sub(r"\2", text), model, total_steps, own_classes([text]))


def own_classes(values: Iterable[object]) -> list[type[Regularizer]]:
    """Load the classes that values of options name, such as ``mine.py:DropSelf(0.2)``."""
    pairs = {pair for value in values if isinstance(value, str) for pair in CLASS_IN_FILE.findall(value)}
    if missing := [file for file, _ in sorted(pairs) if not Path(file).is_file()]:
        raise InputError(f"Provider file {missing[0]} not found.")
    from attnreg.regularizer.base import Regularizer  # late: it imports torch

    loaded: dict[str, tuple[str, type[Regularizer]]] = {}
    for file, name in pairs:
        if name in loaded:
            raise InputError(f"Two classes are named {name}, in {file} and in {loaded[name][0]}: rename one of them.")
        module = load_file(Path(file), Path(file).stem, "provider")
        classes = inspect.getmembers(module, lambda member: inspect.isclass(member) and issubclass(member, Regularizer))
        regularizers = {key: cls for key, cls in classes if cls.__module__ == module.__name__}
        if name not in regularizers:
            known = f"only {', '.join(sorted(regularizers))}" if regularizers else ""
            other = known or "nor any other: derive one from attnreg.MaskProvider"
            raise InputError(f"{file} has no regularizer {name}, {other}.")
        loaded[name] = file, regularizers[name]
    return [cls for _, cls in loaded.values()]
