"""Options that are expressions, such as ``--provider``: of built-in classes and of those in files of your own."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from attnreg.errors import InputError, one_line
from attnreg.experiments.options.content import CLASS_IN_FILE, load_file
from attnreg.experiments.options.option import option

if TYPE_CHECKING:
    from torch import nn

    from attnreg.regularizer.base import Regularizer

SUFFIXES = (".yaml", ".yml")


def provider_option(*, required: bool = True, summary: str = "Provider") -> Callable[[Any], Any]:
    """Make the options ``--provider``, an expression or a YAML file, and ``--provider-lr``.

    Args:
        required: whether the provider must be given; if not, the recipe may receive ``None``.
        summary: the beginning of the help text.
    """
    text = f"{summary}: of `attnreg list providers`, FILE.py:CLASS(...), several joined by &, or a YAML file."
    reader, shown = f"{__name__}:read_provider", "EXPRESSION|FILE.yaml"
    provider = expression_option("--provider", reader, required=required, metavar=shown, help=text)
    rate = option("--provider-lr", type=click.FloatRange(min=0), default=1e-2,
                  help="Learning rate of the provider's own parameters, if any.")  # fmt: skip
    return lambda function: provider(rate(function))


def expression_option(flag: str, reader: str, **kwargs: Any) -> Callable[[Any], Any]:
    """Make an option whose value is an expression, checked before the run begins. The recipe receives the expression.

    Args:
        flag: the option's flag.
        reader: module and name, such as ``my_module:read``, of a function that checks the text. If it returns a text,
            such as another spelling, this is the value. It is imported only where the option is given, because it may
            import torch.
        kwargs: arguments of :func:`attnreg.experiments.option`.
    """

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
        if text is None:
            return None
        module, _, name = reader.partition(":")
        value = getattr(importlib.import_module(module), name)(text)
        return value if isinstance(value, str) else text

    return option(flag, callback=read, **kwargs)


def read_provider(text: str) -> str:
    """Read and check a provider expression, or a ``.yaml`` file with an expression or a list of providers."""
    from attnreg.regularizer.expressions import checked_expression, within_depth  # late: they import torch

    with within_depth(text):
        text = _of_yaml(Path(text)) if text.lower().endswith(SUFFIXES) else text
        checked = checked_expression(CLASS_IN_FILE.sub(r"\2", text), own_classes([text]))
    for file, name in set(CLASS_IN_FILE.findall(text)):
        checked = re.sub(rf"\b(?={name}\()", f"{file}:".replace("\\", r"\\"), checked)
    return checked


def make_provider(text: str, model: nn.Module, total_steps: int) -> Regularizer:
    """Make a provider from an expression that :func:`read_provider` has checked."""
    from attnreg.regularizer.expressions import parse_provider  # late: it imports torch

    return parse_provider(CLASS_IN_FILE.sub(r"\2", text), model, total_steps, own_classes([text]))


def own_classes(values: Iterable[object]) -> list[type[Regularizer]]:
    """Load the classes that values of options name, such as ``mine.py:DropSelf(0.2)``."""
    from attnreg.regularizer.base import Regularizer  # late: it imports torch

    found: dict[str, tuple[str, type[Regularizer]]] = {}
    for file, name in {pair for value in values if isinstance(value, str) for pair in CLASS_IN_FILE.findall(value)}:
        if not Path(file).is_file():
            raise InputError(f"Provider file {file} not found.")
        if name in found:
            raise InputError(f"Two classes are named {name}, in {file} and in {found[name][0]}: rename one of them.")
        known = vars(load_file(Path(file), Path(file).stem, "provider"))
        theirs = {n for n, each in known.items() if inspect.isclass(each) and issubclass(each, Regularizer)}
        own = {each for each in theirs if known[each].__module__ == Path(file).stem}
        if name not in own:
            raise InputError(
                f"{file} has no regularizer {name}, "
                + (f"only {', '.join(sorted(own))}." if own else "nor any other: derive one from attnreg.MaskProvider.")
            )
        found[name] = file, known[name]
    return [cls for _, cls in found.values()]


def _of_yaml(file: Path) -> str:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"Cannot read a provider from {file}: {one_line(error)}") from error
    return _spelled(content["provider"] if isinstance(content, dict) and [*content] == ["provider"] else content, file)


def _spelled(content: Any, file: Path) -> str:
    match content:
        case str():
            return content if "(" in content else f"{content}()"
        case [_, *_]:
            return " & ".join(_spelled(item, file) for item in content)
        case dict() if len(content) == 1:
            ((name, arguments),) = content.items()
            if isinstance(arguments, list):
                return f"{name}({', '.join(_argument(value, file) for value in arguments)})"
            if isinstance(arguments, dict | None):
                named = (f"{key}={_argument(value, file)}" for key, value in (arguments or {}).items())
                return f"{name}({', '.join(named)})"
    raise InputError(
        f"Expected providers in {file} as a list of entries like `AttentionLayerDrop: {{p: 0.2}}`, or an expression, "
        f"got {content!r}."
    )


def _argument(value: Any, file: Path) -> str:
    is_provider = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
    return _spelled(value, file) if is_provider else repr(value)
