"""Command-line options: groups, presets, lists of numbers, and which options exclude or need each other."""

from __future__ import annotations

import functools
import math
import re
import shlex
import textwrap
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import click

from attnreg.errors import UsageError, did_you_mean
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.task import Task

METHOD = "Method"
_ALL = "attnreg.all"
# Names of our options in other tools.
_ALIASES = {
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

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value; refuse an empty text, which would choose the default instead."""
        if "" in (value if isinstance(value, (tuple, list)) else (value,)):
            raise click.BadParameter("got an empty text: is a variable of the shell not set?", ctx, self)
        return super().type_cast_value(ctx, value)


class GroupedCommand(click.Command):
    """A command that lists its options in groups, and suggests the nearest one for an unknown option."""

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
        """Return a space and a suggestion for an unknown option, or an empty text; ``typed`` is the command line."""
        known = [param.opts[0] for param in self.params if isinstance(param, click.Option)]
        return did_you_mean(_ALIASES.get(flag, flag), known)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options group by group."""
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        brief: dict[str, list[str]] = defaultdict(list)
        for parameter in (param for param in self.get_params(ctx) if isinstance(param, click.Option)):
            record, group = parameter.get_help_record(ctx), getattr(parameter, "group", "Other")
            if record and getattr(parameter, "further", False) and not ctx.meta.get(_ALL):
                brief[group].append(parameter.opts[0])
            elif record:
                groups[group].append(record)
        for name, records in groups.items():
            with formatter.section("Options" if [*groups] == [name] else f"{name} options"):
                formatter.write_dl(records)
        if brief:  # broken between flags only, in paragraphs that click leaves as they are
            fill = functools.partial(textwrap.fill, width=formatter.width - 20, break_on_hyphens=False)
            with formatter.section("More options, which --help-all describes"):
                formatter.write_dl([(name, "\b\n" + fill("  ".join(flags))) for name, flags in brief.items()])


def is_given(name: str) -> bool:
    """Whether an option of the current command was typed, and is not the default of a preset or a recipe."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def names_like(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Make a ``shell_complete`` that suggests these names."""
    return lambda context, parameter, typed: [name for name in names() if name.startswith(typed)]


class Numbers(click.ParamType):
    """Numbers separated by commas.

    Args:
        number: the type of the numbers.
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
            numbers = [self._number.convert(word, param, ctx) for word in value.split(",")]
        except click.BadParameter:
            numbers = [math.nan]
        if any(math.isnan(number) for number in numbers):
            self.fail(f"expected {self._expected}, got {value!r}.", param, ctx)
        return numbers


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
    """Combine the decorators of several options, listed in this order."""
    return lambda function: functools.reduce(lambda wrapped, decorator: decorator(wrapped), reversed(options), function)


def as_typed(flag: str, value: Any) -> str:
    """Format an option, or a positional argument, as typed on the command line; empty if it has no value."""
    flag, _, off_flag = flag.partition("/") if flag.startswith("-") else (flag, "", "")
    if value is None or value is False or value == []:
        return off_flag if value is False else ""
    if value is True:
        return flag
    words = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if not flag.startswith("-"):
        return shlex.join(words)
    text = ",".join(words)
    plain = not set(text) & set('"$`!\\')  # a shell leaves such a text unchanged within double quotes
    return f'{flag} "{text}"' if "'" in text and plain else f"{flag} {shlex.quote(text)}"


Preset = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]


class _TaskDefaults(UserDict[str, Any]):
    """Defaults by option that depend on ``--task``, which is known once all typed options are read."""

    def __init__(self, context: click.Context, preset: Callable[[str], Mapping[str, Any]]) -> None:
        self._context, self._preset = context, preset

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        task = next(param.default for param in self._context.command.params if param.name == "task")
        return dict(self._preset(str(self._context.params.get("task", task))))


def preset(flag: str, presets: Mapping[str, Preset], **kwargs: Any) -> Callable[[Any], Any]:
    """Make an option that chooses other defaults for a command. A typed option wins; the recipe does not see this one.

    Args:
        flag: the option's flag.
        presets: per choice, defaults by the names of the command's options, or a function that returns them for
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
            context.default_map = cast(Any, _TaskDefaults(context, chosen) if callable(chosen) else chosen)

    return option(flag, type=click.Choice(list(presets)), callback=choose, is_eager=True, expose_value=False, **kwargs)


Flag = Callable[[str], str]
#: values with which an option does nothing, besides ``None``, 0 and false
IDLE = {"wise_ft": 1.0, "gradient_accumulation": 1, "launcher": "local"}
_FEW_TRAIN = "exclude each other, because LoRA does not train the weights that the other one changes"
#: pairs of options that exclude each other, and the verb phrase of a message
EXCLUDES = (
    ("shots", "train_size", "both say how many rows to train on"),
    ("class_weights", "label_smoothing", "both change the training loss"),
    ("class_weights", "prompt_weight", "both change the training loss"),
    ("lora_rank", "reinit_layers", _FEW_TRAIN),
    ("lora_rank", "noisy_tune", _FEW_TRAIN),
    ("lora_rank", "wise_ft", _FEW_TRAIN),
    ("stop_on=dev", "stopping_rows", "exclude each other, because no rows are held out"),
)
#: options, and the options of which they need one
NEEDS = (
    ("stratified", ("train_size",)),
    *((name, ("patience", "select=best")) for name in ("stop_on", "stopping_rows")),
    *((f"lora_{name}", ("lora_rank",)) for name in ("targets", "alpha", "dropout", "matrix_dropout", "rank_dropout")),
)
#: options for some kinds of tasks only
KINDS: Sequence[tuple[str, str, Callable[[type[Kind]], bool]]] = (
    ("shots", "classification", lambda kind: kind.one_class_per_row),
    ("stratified", "classification", lambda kind: kind.one_class_per_row),
    ("class_weights", "classification", lambda kind: kind.one_class_per_row and kind.has_classes),
    ("label_smoothing", "classes and tokens", lambda kind: not kind.one_number_per_row),
    ("prompt_weight", "causal-lm", lambda kind: kind.head == "AutoModelForCausalLM"),
)
# Pairs of options of `attnreg compare` that exclude each other.
COMPARE = (
    ("jobs", "launcher", "exclude each other, because only the launcher local starts runs"),
    ("baseline", "study", "exclude each other, because a study file has its own baseline"),
    ("folds", "validation_rows", "both say which rows of train the methods are scored on"),
)


def is_set(name: str, values: Mapping[str, Any]) -> bool:
    """Whether an option of a table has an effect with these values of options, by name."""
    name, _, wanted = name.partition("=")
    value = values.get(name)
    return str(value) == wanted if wanted else bool(value) and value != IDLE.get(name)


def check_pairs(values: Mapping[str, Any], pairs: Sequence[tuple[str, str, str]], flag: Flag) -> None:
    """Refuse two options that exclude each other."""
    for first, second, why in pairs:
        if is_set(first, values) and is_set(second, values):
            raise UsageError(f"{typed(first, flag)} and {typed(second, flag)} {why}: remove one of them.")


def check_needs(values: Mapping[str, Any], needs: Sequence[tuple[str, Sequence[str]]], flag: Flag) -> None:
    """Refuse an option that needs another one, if that is not set."""
    for name, needed in needs:
        if is_set(name, values) and not any(is_set(other, values) for other in needed):
            raise UsageError(f"{typed(name, flag)} needs {' or '.join(typed(other, flag) for other in needed)}.")


def check_kind(values: Mapping[str, Any], task: Task, flag: Flag) -> None:
    """Refuse an option that is not for the kind of a task."""
    for name, kinds, fits in KINDS:
        if is_set(name, values) and not fits(kind_class(task.kind)):
            raise UsageError(f"{flag(name)} is for {kinds}, but {task.name} is a {task.kind} task: remove it.")


def typed(name: str, flag: Flag) -> str:
    """Return an option of a table as it is typed."""
    name, _, value = name.partition("=")
    return f"{flag(name)} {value}".rstrip()
