"""The options that all recipes share, and the settings of a run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import click

from attnreg.arguments import LARGEST_WHOLE
from attnreg.errors import InputError, counted
from attnreg.experiments.options.files import checksum, checksum_if_there, code_of, is_built_in
from attnreg.experiments.options.option import (
    EXCLUDES,
    as_typed,
    check_kind,
    check_pairs,
    flag_of,
    help_all,
    names_like,
    option,
)
from attnreg.experiments.tasks.built_in import TASKS, choose_task
from attnreg.experiments.tasks.kinds import KINDS
from attnreg.experiments.tasks.loading.files import stem_of
from attnreg.experiments.tasks.models.pooling import POOLINGS
from attnreg.experiments.tasks.task import Task

# The schedules of transformers that need only the number of steps, without repetitions.
SCHEDULES = ("linear", "cosine", "inverse_sqrt", "constant_with_warmup", "constant")
DEVICES = ("cpu", "cuda", "mps")
DATA, TRAINING, OUTPUT, RUNNING = "Task and data", "Training", "Output", "Running"
#: the option of commands that train no run
DEVICE = option("--device", type=click.Choice(DEVICES), group=RUNNING, help="Device (default: the best available).")
_GROUPS = {"task": DATA, "epochs": TRAINING, "output_dir": OUTPUT}  # by the first option of a group
TASK_OPTIONS = ("kind", "text_columns", "label_column", "choice_columns", "metric")
_OF_ONE_RUN = {
    *("validation_rows", "seed", "threads", "output_dir", "resume", "save_steps", "keep_checkpoints", "no_plots"),
}
# The options of all runs that --help describes; it only names the others.
_FIRST = {"task", "data_dir", "model", "epochs", "seed", "output_dir", "resume"}
# Options in which a resumed run may differ from the original.
NOT_COMPARED = {
    *("output_dir", "resume", "device", "threads", "save_steps", "report_to", "flags", "recipe_file"),
    *("keep_checkpoints", "no_plots"),
}


# Fields of config.json that are no options.
NO_OPTIONS = {"attnreg", "content", "parameters", "default_max_length", "steps"}


class _Norm(click.FloatRange):
    """A norm of at least 0; ``none`` is 0."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return 0.0 if value == "none" else float(super().convert(value, param, ctx))


# Annotations of options beside the type: a type of click, or arguments of `option`.
Positive = Annotated[int, click.IntRange(min=1)]
THREADS = click.IntRange(1, 1024)  # an operating system refuses to start very many
NotNegative = Annotated[float, click.FloatRange(min=0)]
Share = Annotated[float, click.FloatRange(0, 1)]
BelowOne = Annotated[float, click.FloatRange(0, 1, max_open=True)]
Joined = Annotated[str | None, {"multiple": True, "callback": lambda ctx, param, values: ",".join(values) or None}]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a run. An attribute with a text below it is an option of every recipe, with this help.

    The task sets an option that has no default. ``own`` holds the recipe's options. ``flags`` maps the names of
    options to their flags, such as ``"--baseline/--no-baseline"``, by default the name with dashes. ``recipe_file`` is
    the file that defines the recipe.
    """

    recipe: str
    task: Annotated[str, {"shell_complete": names_like(TASKS.keys)}] = "agreement"
    """Task to train on; see `attnreg list tasks`."""
    kind: Annotated[str | None, click.Choice(list(KINDS))] = None
    """Kind of a custom task (default: classification)."""
    text_columns: Joined = None
    """Text column of a custom task; for two, use a comma or repeat it."""
    label_column: str | None = None
    """Label column of a custom task (default: label)."""
    choice_columns: Joined = None
    """Choice columns of a custom multiple-choice task, or one of lists."""
    metric: str | None = None
    """Metric to report first, also to choose the best epoch by (default: the task's)."""
    model: str | None = None
    """Folder or Hub name of the model (default: the task's)."""
    data_dir: str | None = None
    """Folder with train and validation, or one file: .json[l], .csv, .tsv, .parquet or save_to_disk (default: the
    task's)."""
    train_size: Positive | None = None
    """Train on this many rows, drawn by the seed (default: all)."""
    stratified: bool = False
    """Draw --train-size so that classes keep their shares (classification)."""
    shots: Positive | None = None
    """Train on this many rows per class, drawn by the seed (classification)."""
    folds: Annotated[int | None, click.IntRange(min=2)] = None
    """Cross-validation: divide train into this many parts, and score on the part of the seed instead of dev."""
    validation_rows: Positive | None = None
    """Hold out this many rows of train and evaluate on them instead of dev."""
    max_length: Annotated[int | None, click.IntRange(min=4)] = None
    """Maximum tokens per input; longer inputs are cut (default: the task's, or what the model takes)."""
    epochs: Annotated[int, click.IntRange(1, 100_000)]
    """Passes over the training data (default: the task's)."""
    batch_size: Positive
    """Rows per optimizer step, over all processes (default: the task's)."""
    learning_rate: Annotated[float, click.FloatRange(min=0, min_open=True)]
    """Peak learning rate of the model (default: the task's)."""
    schedule: Annotated[str, click.Choice(SCHEDULES)] = "linear"
    """Schedule of the learning rate, by transformers' name; all but constant begin with a warm-up."""
    lr_warmup: Share = 0.1
    """Fraction of the steps, from the start, in which the learning rate rises from zero to its peak."""
    weight_decay: NotNegative = 0.01
    """Weight decay of the model's matrices; biases and normalization weights have none."""
    max_grad_norm: Annotated[float, _Norm(min=0)] = 1.0
    """Clip the gradient of a network to this norm; "none" does not clip."""
    layerwise_decay: Annotated[float, click.FloatRange(0, 1, min_open=True)] = 1.0
    """Learning rate of a block, relative to the block above it; embeddings have the lowest."""
    reinit_layers: Annotated[int, click.IntRange(min=0)] = 0
    """Re-initialize this many top blocks, and the pooler, before training."""
    linear_probe: bool = False
    """Fit the head to the pretrained features before training (LP-FT)."""
    noisy_tune: NotNegative = 0.0
    """Add noise to the weights before training, of this size relative to their standard deviation, such as 0.15."""
    ema: BelowOne = 0.0
    """Keep the moving average of the weights over steps, with this decay, such as 0.99."""
    wise_ft: Share = 1.0
    """Keep this share of the trained weights, and the rest of those before training (WiSE-FT)."""
    class_weights: Annotated[str | None, click.Choice(["balanced"])] = None
    """Weights of classes in the training loss: "balanced" weighs a row by the inverse frequency of its class
    (classification; default: all the same)."""
    label_smoothing: BelowOne = 0.0
    """Share of a label that the training loss spreads over all classes."""
    prompt_weight: NotNegative = 0.0
    """Weight of a prompt's tokens in the training loss, relative to those of its completion (causal-lm)."""
    model_dropout: BelowOne | None = None
    """Rate of the model's dropout, in attention and elsewhere (default: as configured)."""
    pooling: Annotated[str | None, click.Choice(POOLINGS)] = None
    """State that a classification head reads: of the first token, of the last, the mean of all, or what the model's own
    head reads (default: "mean" for a checkpoint of sentence-transformers that has it, else "own")."""
    lora_rank: Positive | None = None
    """Train low-rank adapters of this rank and the new head only, with peft (default: train the whole model)."""
    lora_targets: Joined = None
    """Modules with adapters, by comma or repeated, or all-linear (default: peft's for the model)."""
    lora_alpha: Positive | None = None
    """Scale of the adapters, divided by their rank (default: the rank)."""
    lora_dropout: BelowOne = 0.0
    """Rate of dropout on the adapters' inputs."""
    lora_matrix_dropout: BelowOne = 0.0
    """Rate at which input and output features of the adapters' matrices are dropped."""
    lora_rank_dropout: BelowOne = 0.0
    """Rate at which ranks of the adapters are dropped."""
    gradient_accumulation: Annotated[Positive, {"metavar": "N"}] = 1
    """Split a batch into N micro-batches to save memory; the update is that of the whole batch."""
    evaluate_every: Positive = 1
    """Evaluate every N epochs and after the last one."""
    select: Annotated[str | None, click.Choice(["last", "best"])] = None
    """Network to return, score and save: of the "last" epoch, or of the "best" evaluation on the rows of --stop-on
    (default: last; best with --patience)."""
    patience: Positive | None = None
    """Stop after N evaluations without a better score (default: do not stop)."""
    stop_on: Annotated[str | None, click.Choice(["held-out", "dev"])] = None
    """Rows that --patience and --select best look at: "held-out" (of train) or "dev" (biases dev scores) (default:
    held-out)."""
    stopping_rows: Positive | None = None
    """Rows to hold out of train for --stop-on held-out (default: a tenth of train, at most 256)."""
    seed: Annotated[int, click.IntRange(0, LARGEST_WHOLE)] = 0
    """Seed of the new head, the choice and order of rows, and dropout."""
    device: Annotated[str | None, click.Choice(DEVICES)] = None
    """Device (default: the best available)."""
    threads: Annotated[int | None, THREADS] = None
    """CPU threads (default: 1 for a model of at most 5 million parameters, else torch's number)."""
    mixed_precision: Annotated[str | None, click.Choice(["bf16", "fp16"])] = None
    """Mixed precision (default: float32)."""
    output_dir: Annotated[Path, click.Path(path_type=Path)]
    """Folder for the results (default: runs/RECIPE-TASK-seedN; of a custom task, the data's name)."""
    resume: bool = False
    """Continue from the last checkpoint in --output-dir."""
    save_steps: Positive | None = None
    """Save a checkpoint every N steps, besides the one after every epoch."""
    keep_checkpoints: bool = False
    """Keep the last checkpoint of a finished run."""
    no_plots: bool = False
    """Draw no pictures at the end."""
    report_to: Annotated[tuple[str, ...], {"multiple": True}] = ()
    """Also log to this tracker (tensorboard, wandb, ...); repeatable."""
    own: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    recipe_file: str | None = None

    def __post_init__(self) -> None:
        check_pairs(vars(self), EXCLUDES, self.flag)
        check_kind(vars(self), self.chosen_task(), self.flag)

    @property
    def scored_on(self) -> str:
        """The rows that score the run; see :func:`scored_rows`."""
        return scored_rows(vars(self))

    def chosen_task(self) -> Task:
        """Return the task that the options define."""
        return task_of(vars(self))

    def check_rows(self, rows: int) -> None:
        """Refuse to hold out, or to train on, more rows than train has."""
        left = rows
        if self.folds is not None:
            if self.folds > rows:
                raise InputError(f"Expected --folds of at most {rows}, the number of training rows, got {self.folds}.")
            left -= len(range(self.seed % self.folds, rows, self.folds))
        if self.validation_rows is not None:
            if self.validation_rows >= left:
                raise too_few_rows(self.validation_rows, left, "--validation-rows")
            left -= self.validation_rows
        if self.train_size is not None and self.train_size > left:
            held_out = f", because {rows - left} of {rows} rows are held out to score on" * (left < rows)
            raise InputError(f"Expected --train-size of at most {left}{held_out}, got {self.train_size}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        kept = {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_COMPARED}
        return json.loads(json.dumps(kept))  # tuples become lists, as when read from a file

    def differences(self, config: dict[str, Any]) -> dict[str, str]:
        """Return the options in which a saved configuration differs, by name, as typed on the command line."""
        current, saved = self.to_dict(), with_defaults(config)
        if current["max_length"] is None and saved.pop("default_max_length", True):
            current["max_length"] = saved.get("max_length")
        current, saved = {**current, **current["own"], "own": None}, {**saved, **config.get("own", {}), "own": None}
        names = sorted((current.keys() | saved.keys()) - NO_OPTIONS)
        return {
            name: f"{as_typed(self.flag(name), saved.get(name)) or 'no ' + self.flag(name)} "
            f"(not {as_typed(self.flag(name), current.get(name)) or 'given'})"
            if name in current
            else f"an attnreg that has {self.flag(name)}"
            for name in names
            if current.get(name) != saved.get(name)
        }

    def content(self) -> dict[str, str | None]:
        """Return checksums of the files behind the results: recipe, files with provider classes, data and model."""
        return {
            "provider": code_of(self.own.values()),
            "recipe": checksum_if_there(self.recipe_file),
            "data": None if self.data_dir is None else checksum(self.data_dir),
            "model": checksum_if_there(self.model),
        }

    def command(self) -> str:
        """Return the command that repeats the run: its recipe, and all options that affect the results."""
        skipped = {*NOT_COMPARED, "task"}
        changed = [row.name for row in OPTIONS if row.name not in skipped and getattr(self, row.name) != row.default]
        values = {"task": self.task, **{name: getattr(self, name) for name in changed}, **self.own}
        file = self.recipe_file
        words = ["attnreg", "recipe", self.recipe if file is None or is_built_in(file) else shlex.quote(file)]
        words += [as_typed(self.flags.get(name, flag_of(name)), value) for name, value in values.items()]
        return " ".join(word for word in words if word)

    def flag(self, name: str) -> str:
        """Return the flag of an option, without a value."""
        return self.flags.get(name, flag_of(name)).partition("/")[0]


def _help_texts() -> dict[str, str]:
    """Return the texts below the attributes of the settings, in one line, by name."""
    (source,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(source, ast.ClassDef)
    return {
        ast.unparse(attribute.target): " ".join(ast.literal_eval(text.value).split())
        for attribute, text in pairwise(source.body)
        if isinstance(attribute, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


_HELP = _help_texts()
OPTIONS = [attribute for attribute in dataclasses.fields(Settings) if attribute.name in _HELP]
SHARED = {attribute.name for attribute in OPTIONS} - _OF_ONE_RUN


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return a saved configuration with the defaults of shared options that it lacks, because they are newer."""
    kept = (
        attribute for attribute in OPTIONS if attribute.default is not MISSING and attribute.name not in NOT_COMPARED
    )
    return {**json.loads(json.dumps({row.name: row.default for row in kept})), **config}


def task_of(options: Mapping[str, Any]) -> Task:
    """Return the task that options by name, such as those of a run, define."""
    return choose_task(options["task"], **{name: options.get(name) for name in TASK_OPTIONS})


def scored_rows(options: Mapping[str, Any]) -> str:
    """Return the rows that score a run with these options: ``"dev"``, or rows of train, ``"held-out"``."""
    return "dev" if options.get("validation_rows") is None and options.get("folds") is None else "held-out"


def too_few_rows(size: int, rows: int, flag: str | None) -> InputError:
    """Return the error that ``size`` of ``rows`` rows, the value of the option ``flag``, cannot be held out."""
    fewer = "" if flag is None else f": lower {flag}, for example to {max(1, rows // 5)}"
    return InputError(f"Holding out {counted(size, 'row')} needs at least {size + 1} training rows, got {rows}{fewer}.")


def data_name(task: str, data_dir: str | None) -> str:
    """Return the name of the data for a folder of results: the task's or, of a custom task, the folder's or file's."""
    return (task == "custom" and data_dir and stem_of(Path(data_dir).resolve())) or task


def shared_options(*scopes: str, defaults: Mapping[str, Any] | None = None) -> list[Callable[[Any], Any]]:
    """Make the command-line options of some scopes; ``defaults`` replace their defaults, by name.

    The scopes are ``"task"`` (they define the task; also options of ``attnreg evaluate``), ``"all"`` (also of ``attnreg
    compare``) and ``"run"`` (only of a single run).
    """
    options, group, hints = list[Callable[[Any], Any]](), "", get_type_hints(Settings, include_extras=True)
    for name, default in ((attribute.name, attribute.default) for attribute in OPTIONS):
        group = _GROUPS.get(name, group)
        if ("task" if name in TASK_OPTIONS else "run" if name in _OF_ONE_RUN else "all") not in scopes:
            continue
        kwargs: dict[str, Any] = {"is_flag": True} if default is False else {}
        for hint in (hints[name], *get_args(hints[name])):
            for extra in getattr(hint, "__metadata__", ()):
                kwargs |= extra if isinstance(extra, dict) else {"type": extra}
        kwargs |= {} if default is MISSING else {"default": default}
        kwargs |= {"default": defaults[name]} if defaults and name in defaults else {}
        further = "all" in scopes and name not in _FIRST
        options.append(option(flag_of(name), name, group=group, help=_HELP[name], further=further, **kwargs))
    return [*options, help_all] if "all" in scopes else options
