"""Command-line options in groups, with type, default and help taken from the argument that they set.

Signatures and docstrings are read from the source, so that ``--help`` does not need to import torch.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
import shlex
import textwrap
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click

import attnreg
from attnreg._lazy import listed_names
from attnreg.errors import did_you_mean

METHOD = "Method"
_ALL = "attnreg.all"
Node = TypeVar("Node", ast.ClassDef, ast.FunctionDef)
_TYPES: Mapping[str, click.ParamType] = {
    "Probability": click.FloatRange(0, 1),
    "ProbabilityBelowOne": click.FloatRange(0, 1, max_open=True),
    "InnerProbability": click.FloatRange(0, 1, min_open=True, max_open=True),
    "NotNegative": click.FloatRange(min=0),
    "Count": click.IntRange(min=1),
    "Index": click.IntRange(min=0),
    "int": click.INT,
    "float": click.FLOAT,
    "str": click.STRING,
}
# Names that other tools give to our options.
_ELSEWHERE = {
    "--lr": "--learning-rate",
    "--bs": "--batch-size",
    "--per_device_train_batch_size": "--batch-size",
    "--num_train_epochs": "--epochs",
    "--model_name_or_path": "--model",
    "--wd": "--weight-decay",
    "--warmup-ratio": "--lr-warmup",
    "--dataset": "--task",
    "--bf16": "--mixed-precision",
    "--fp16": "--mixed-precision",
}


class Option(click.Option):
    """An option that belongs to a group in ``--help``, which only names it if it is ``further``."""

    def __init__(self, *args: Any, group: str = METHOD, further: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group, self.further = group, further


class GroupedCommand(click.Command):
    """A command that lists its options in groups, and answers an unknown one with the nearest of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = error.option_name
            raise click.UsageError(f"No such option {flag!r}.{self.instead(ctx, flag, typed)}", ctx) from None
        except click.BadParameter as error:  # click says "is not a valid integer range"
            plain = re.sub(r"a valid integer\b.*", "a whole number.", error.message)
            plain = re.sub(r"a valid float\b.*", "a number.", plain)
            if plain == error.message:
                raise
            raise click.BadParameter(plain, error.ctx, error.param, error.param_hint) from None

    def instead(self, ctx: click.Context, flag: str, typed: Sequence[str]) -> str:
        """Return what to write instead of an unknown option, of all that was typed, with a space before; or nothing."""
        known = [each.opts[0] for each in self.params if isinstance(each, click.Option)]
        return did_you_mean(_ELSEWHERE.get(flag, flag), known)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options group by group."""
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        named: dict[str, list[str]] = defaultdict(list)
        for parameter in (each for each in self.get_params(ctx) if isinstance(each, click.Option)):
            record, group = parameter.get_help_record(ctx), getattr(parameter, "group", "Other")
            if record and getattr(parameter, "further", False) and not ctx.meta.get(_ALL):
                named[group].append(parameter.opts[0])
            elif record:
                groups[group].append(record)
        for name, records in groups.items():
            with formatter.section("Options" if [*groups] == [name] else f"{name} options"):
                formatter.write_dl(records)
        if named:  # broken between flags only, in paragraphs that click leaves as they are
            fill = functools.partial(textwrap.fill, width=formatter.width - 20, break_on_hyphens=False)
            with formatter.section("More options, which --help-all describes"):
                formatter.write_dl([(name, "\b\n" + fill("  ".join(flags))) for name, flags in named.items()])


def is_given(name: str) -> bool:
    """Whether an option of the current command was typed; a preset, or a recipe, may have set another default."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def names_like(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Make a ``shell_complete`` for some names."""
    return lambda context, parameter, typed: [name for name in names() if name.startswith(typed)]


class Numbers(click.ParamType):
    """Numbers separated by commas.

    Args:
        number: the type of each number.
        example: noun and example, for the error message.
        word: a word that is accepted instead of numbers.

    Example:
        >>> layers = Numbers(click.INT, "layer indices such as 0,-1", word="all")
        >>> layers("0,2"), layers("all")
        ([0, 2], 'all')
    """

    name = "numbers"

    def __init__(self, number: click.ParamType, example: str, word: str | None = None) -> None:
        self._number, self._word = number, word
        self._expected = example if word is None else f"{word!r} or {example}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a list of numbers, or the word."""
        if value == self._word or isinstance(value, list):
            return value
        try:
            numbers = [self._number.convert(each, param, ctx) for each in value.split(",")]
        except click.BadParameter:
            numbers = [math.nan]
        if any(math.isnan(number) for number in numbers):
            self.fail(f"expected {self._expected}, got {value!r}.", param, ctx)
        return numbers


class Rates(click.FloatRange):
    """A rate in a range, or rates by pattern, which stay text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a number, or the text."""
        if "=" not in str(value):
            return super().convert(value, param, ctx)
        for each in value.split(","):
            super().convert(each.rpartition("=")[2], param, ctx)
        if len({each.rpartition("=")[0] for each in value.split(",")}) <= value.count(","):
            self.fail(f"expected each pattern once, got {value!r}.", param, ctx)
        return value

    @staticmethod
    def by_pattern(rates: float | str) -> float | dict[str, float]:
        """Return a rate, or the rates in a text by pattern."""
        if not isinstance(rates, str):
            return rates
        return {pattern: float(rate) for pattern, _, rate in (each.rpartition("=") for each in rates.split(","))}


def option(*flags: str, group: str = METHOD, **kwargs: Any) -> Callable[[Any], Any]:
    """Make a :func:`click.option` that belongs to a group and shows its default."""
    return click.option(*flags, cls=Option, group=group, **{"show_default": True, **kwargs})


def _help_all(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


#: for a command with options that ``--help`` only names
help_all = option(
    "--help-all", group="Other", is_flag=True, is_eager=True, expose_value=False, show_default=False,
    callback=_help_all, help="Describe all options and exit.",
)  # fmt: skip


def flag_of(name: str) -> str:
    """Return the usual flag of an option: ``--`` and its name with dashes."""
    return f"--{name.replace('_', '-')}"


def together(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Make one decorator of several options, listed in this order."""
    return lambda function: functools.reduce(lambda done, each: each(done), reversed(options), function)


def as_typed(flag: str, value: Any) -> str:
    """Format an option, or a positional argument, as it is typed on the command line; empty if it is not given."""
    flag, _, off_flag = flag.partition("/") if flag.startswith("-") else (flag, "", "")
    if value is None or value is False or value == []:
        return off_flag if value is False else ""
    if value is True:
        return flag
    words = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if not flag.startswith("-"):
        return shlex.join(words)
    text = ",".join(words)
    plain = not set(text) & set('"$`!\\')  # a shell leaves such a text unchanged within double quotes
    return f'{flag} "{text}"' if "'" in text and plain else f"{flag} {shlex.quote(text)}"


def argument(target: str, name: str, flag: str | None = None, **kwargs: Any) -> Callable[[Any], Any]:
    """Make an option from an argument of a class or dataclass, with the same type, default and help.

    Args:
        target: the public name of a class, such as ``attnreg:AttributionProvider``, or its name in a module.
        name: name of the argument; the recipe's function receives the value under this name.
        flag: the option's flag (default: ``--`` and the name with dashes).
        kwargs: arguments of :func:`option` that replace those from the source.

    Example:
        >>> @click.command()
        ... @argument("attnreg.training:Mixout", "p")
        ... def command(p): ...
        >>> command.params[0].default, command.params[0].type
        (0.7, <FloatRange 0<=x<1>)
    """
    source, aliases = _source(target)
    annotation, default = _argument(source, name)
    flag, is_switch = flag or flag_of(name), ast.unparse(annotation) == "bool"
    flag += f"/--no-{flag[2:]}" if is_switch and default else ""
    kind: dict[str, Any] = {"is_flag": True} if is_switch else {"type": _click_type(annotation, aliases)}
    return option(flag, name, **{**kind, "default": default, "help": _help(source, name), **kwargs})


Preset = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]


class _OfTask(UserDict[str, Any]):
    """Defaults by option that depend on ``--task``, which is known once all given options are read."""

    def __init__(self, context: click.Context, preset: Callable[[str], Mapping[str, Any]]) -> None:
        self._context, self._preset = context, preset

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        task = next(each.default for each in self._context.command.params if each.name == "task")
        return dict(self._preset(str(self._context.params.get("task", task))))


def preset(flag: str, presets: Mapping[str, Preset], **kwargs: Any) -> Callable[[Any], Any]:
    """Make an option that chooses other defaults for a command. An option that is given wins; the recipe sees neither.

    Args:
        flag: the option's flag.
        presets: for each choice, defaults by the names of the command's options, or a function that returns them for
            the value of ``--task``.
        kwargs: arguments of :func:`option`.

    Example:
        >>> @click.command()
        ... @preset("--size", {"small": {"rows": 10, "epochs": 2}})
        ... @option("--rows", default=100)
        ... @option("--epochs", default=20)
        ... def command(**options): print(options)
        >>> command(["--epochs", "5", "--size", "small"], standalone_mode=False)
        {'epochs': 5, 'rows': 10}
    """

    def choose(context: click.Context, parameter: click.Parameter, name: str | None) -> None:
        if name is not None:
            chosen = presets[name]
            context.default_map = cast(Any, _OfTask(context, chosen) if callable(chosen) else chosen)

    return option(flag, type=click.Choice(list(presets)), callback=choose, is_eager=True, expose_value=False, **kwargs)


def _source(target: str) -> tuple[ast.ClassDef, Mapping[str, ast.expr]]:
    """Return the definition of a class, and the type aliases that its module defines or imports."""
    package, _, name = target.partition(":")
    file = _file(package)
    module = listed_names(str(file))[name] if file.name == "__init__.py" else package
    return defined(parsed(module), name, ast.ClassDef), aliases_in(module)


def aliases_in(module: str) -> dict[str, ast.expr]:
    """Return the type aliases that a module defines or imports."""
    tree = parsed(module)
    aliases = _assigned(tree)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("attnreg."):
            theirs = _assigned(parsed(str(node.module)))
            aliases.update({each.name: theirs[each.name] for each in node.names if each.name in theirs})
    return aliases


def defined(tree: ast.Module | ast.ClassDef, name: str, kind: type[Node]) -> Node:
    """Return the definition of a class in a module, or of a method in a class."""
    return next(node for node in tree.body if isinstance(node, kind) and node.name == name)


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return {left.id: node.value for node in assigned for left in node.targets if isinstance(left, ast.Name)}


def attribute_texts(module: str, name: str) -> dict[str, str]:
    """Return the texts below the attributes of a class, each as one line, by attribute."""
    return {
        ast.unparse(each.target): " ".join(ast.literal_eval(text.value).split())
        for each, text in itertools.pairwise(defined(parsed(module), name, ast.ClassDef).body)
        if isinstance(each, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _file(module: str) -> Path:
    """Return the file of a module of this package without importing the packages that it is in."""
    path = Path(attnreg.__file__).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def parsed(module: str) -> ast.Module:
    """Parse the source of a module without running it."""
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _argument(source: ast.ClassDef, name: str) -> tuple[ast.expr, Any]:
    """Return the annotation and the default of an argument, which must be a literal."""
    fields = (node for node in source.body if isinstance(node, ast.AnnAssign))
    arguments: dict[str, tuple[Any, ast.expr | None]]
    arguments = {ast.unparse(each.target): (each.annotation, each.value) for each in fields}
    if name not in arguments:  # no dataclass
        spec = defined(source, "__init__", ast.FunctionDef).args
        defaults = [*[None] * (len(spec.args) - len(spec.defaults)), *spec.defaults, *spec.kw_defaults]
        named = zip([*spec.args, *spec.kwonlyargs], defaults, strict=True)
        arguments = {each.arg: (each.annotation, default) for each, default in named}
    annotation, default = arguments[name]
    return annotation, None if default is None else ast.literal_eval(default)


def _click_type(annotation: ast.expr, aliases: Mapping[str, ast.expr]) -> click.ParamType:
    """Return the click type of an annotation; the first alternative of a union."""
    if isinstance(annotation, ast.BinOp):
        return _click_type(annotation.left, aliases)
    if isinstance(annotation, ast.Name) and annotation.id in aliases:
        return _click_type(aliases[annotation.id], aliases)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return click.Choice(list(ast.literal_eval(annotation.slice)))
    return _TYPES[ast.unparse(annotation)]


def _help(source: ast.ClassDef, name: str) -> str:
    """Return the entry of an argument in the section ``Args``, as plain text."""
    section = re.search(r"^Args:\n((?:[ ]{4,}.*\n|\n)+)", f"{ast.get_docstring(source)}\n", re.M)
    entry = section and re.search(rf"^    {name}: ((?:.*\n)(?:        .*\n)*)", section[1], re.M)
    if not entry:
        return ""
    text = " ".join(entry[1].split())
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"\1", text).replace("``", "")
    return text[0].upper() + text[1:]
