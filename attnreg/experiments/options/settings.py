"""The options that all recipes share, and the settings of a run."""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import click

from attnreg.experiments.options.catalogue import is_built_in
from attnreg.experiments.options.content import content_of
from attnreg.experiments.options.option import Rates, as_typed, names_like, option
from attnreg.experiments.tasks.built_in import TASKS
from attnreg.experiments.tasks.choice import choose_task
from attnreg.experiments.tasks.kinds import KINDS
from attnreg.experiments.tasks.models.pooling import POOLINGS
from attnreg.experiments.tasks.task import Task

LARGEST = 2**31 - 1
# Of transformers' schedules, those that need no argument besides the number of steps and differ from each other.
SCHEDULES = ("linear", "cosine", "inverse_sqrt", "constant_with_warmup", "constant")
OPTIMIZERS = ("adamw", "adafactor", "adagrad", "rmsprop", "sgd")
DEVICES = ("cpu", "cuda", "mps")
DATA, TRAINING, OUTPUT = "Task and data", "Training", "Output"
_POSITIVE, _NOT_NEGATIVE = click.IntRange(min=1), click.IntRange(min=0)
_SHARE, _BELOW_ONE = click.FloatRange(0, 1), click.FloatRange(0, 1, max_open=True)
# Of the options of every run, those that --help describes.
_FIRST = {"task", "data_dir", "model", "epochs", "seed", "output_dir", "resume"}
# A resumed run may differ from the original in these.
NOT_COMPARED = {
    "output_dir",
    "resume",
    "device",
    "threads",
    "save_steps",
    "report_to",
    "flags",
    "off_flags",
    "recipe_file",
    "keep_checkpoints",
}


def _option(group: str, help: str, default: Any = MISSING, *, scope: str = "all", **kwargs: Any) -> Any:
    """Declare a dataclass field that is also an option of every recipe; without a default, the task's is taken.

    The scope is ``"task"`` (defines the task; also an option of ``attnreg evaluate``), ``"all"`` (also an option of
    ``attnreg compare``) or ``"run"`` (only for a single run). Other arguments are those of :func:`click.option`.
    """
    shown = {} if default is MISSING else {"default": default}
    metadata = {"scope": scope, "option": {"group": group, "help": help, **shown, **kwargs}}
    return field(metadata=metadata, **({} if default is MISSING else {"default": default}))


class _Norm(click.FloatRange):
    """A norm of at least 0; ``none`` is 0."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return 0.0 if value == "none" else float(super().convert(value, param, ctx))


def _joined(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    return ",".join(values) if values else None


_data, _training, _output = (functools.partial(_option, group) for group in (DATA, TRAINING, OUTPUT))
_of_task = functools.partial(_data, default=None, scope="task")
_columns = functools.partial(_of_task, multiple=True, callback=_joined)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one run.

    ``own`` holds the recipe's own options. ``flags`` maps the names of options to their flags, by default the name with
    dashes, and ``off_flags`` those of switches to the flags that turn them off. ``recipe_file`` is the file that
    defines the recipe.
    """

    recipe: str
    task: str = _data(
        "Task to train on; see `attnreg list tasks`.",
        "agreement",
        shell_complete=names_like(lambda: TASKS),
    )
    kind: str | None = _of_task("Kind of a custom task (default: classification).", type=click.Choice(list(KINDS)))
    text_columns: str | None = _columns("Text column of a custom task; for two, use a comma or repeat it.")
    label_column: str | None = _of_task("Label column of a custom task (default: label).")
    choice_columns: str | None = _columns("Choice columns of a custom multiple-choice task, or one of lists.")
    metric: str | None = _of_task("Metric to report first, also to choose the best epoch by (default: the task's).")
    model: str | None = _data("Folder or Hub name of the model (default: the task's).", None)
    data_dir: str | None = _data(
        "Folder with train and validation: .json[l], .csv, .tsv, .parquet or save_to_disk (default: the task's own).",
        None,
    )
    score_on: str | None = _data(
        "File or folder of other text (column text), to score the model on before and after training (causal-lm).", None
    )
    train_size: int | None = _data("Train on this many rows, drawn by the seed (default: all).", None, type=_POSITIVE)
    stratified: bool = _data(
        "Draw --train-size so that each class keeps its share (classification).", False, is_flag=True
    )
    shots: int | None = _data(
        "Train on this many rows of each class, drawn by the seed (classification).", None, type=_POSITIVE
    )
    folds: int | None = _data(
        "Cross-validation: divide train into this many parts, and score on the part of the seed instead of dev.",
        None,
        type=click.IntRange(min=2),
    )
    label_noise: float = _data(
        "Give this share of the training rows, and of rows held out of train, a wrong label (classification).",
        0.0,
        type=_SHARE,
    )
    validation_rows: int | None = _data(
        "Hold out this many rows of train and evaluate on them instead of dev.", None, scope="run", type=_POSITIVE
    )
    max_length: int | None = _data(
        "Maximum tokens per input; longer inputs are cut (default: the task's, or what the model takes).",
        None,
        type=click.IntRange(min=4),
    )
    epochs: int = _training("Passes over the training data (default: the task's).", type=click.IntRange(1, 100_000))
    batch_size: int = _training("Rows per optimizer step, over all processes (default: the task's).", type=_POSITIVE)
    learning_rate: float = _training(
        "Peak learning rate of the model (default: the task's).", type=click.FloatRange(min=0, min_open=True)
    )
    schedule: str = _training(
        "Schedule of the learning rate, by transformers' name; all but constant begin with a warm-up.",
        "linear",
        type=click.Choice(SCHEDULES),
    )
    lr_warmup: float = _training(
        "Fraction of the steps, from the start, in which the learning rate rises from zero to its peak.",
        0.1,
        type=_SHARE,
    )
    optimizer: str = _training(
        "Optimizer of the model, as the Hugging Face Trainer makes it; choose --learning-rate to fit it.",
        "adamw",
        type=click.Choice(OPTIMIZERS),
    )
    weight_decay: float = _training(
        "Weight decay of the model's matrices; biases and normalization weights have none.",
        0.01,
        type=click.FloatRange(min=0),
    )
    max_grad_norm: float = _training(
        'Clip the gradient of each network to this norm; "none" does not clip.', 1.0, type=_Norm(min=0)
    )
    layerwise_decay: float = _training(
        "Learning rate of each block, relative to the block above it; embeddings have the lowest.",
        1.0,
        type=click.FloatRange(0, 1, min_open=True),
    )
    reinit_layers: int = _training(
        "Re-initialize this many top blocks, and the pooler, before training.", 0, type=_NOT_NEGATIVE
    )
    linear_probe: bool = _training(
        "Fit the head to the pretrained features before training (LP-FT).", False, is_flag=True
    )
    noisy_tune: float = _training(
        "Add noise to the weights before training, of this size relative to their standard deviation, such as 0.15.",
        0.0,
        type=click.FloatRange(min=0),
    )
    ema: float = _training(
        "Keep the moving average of the weights over steps, with this decay, such as 0.99.", 0.0, type=_BELOW_ONE
    )
    wise_ft: float = _training(
        "Keep this share of the trained weights, and the rest of those before training (WiSE-FT).", 1.0, type=_SHARE
    )
    class_weights: str | None = _training(
        'Weights of classes in the training loss: "balanced" weighs a row by the inverse frequency of its class '
        "(classification; default: all the same).",
        None,
        type=click.Choice(["balanced"]),
    )
    label_smoothing: float = _training(
        "Share of each label that the training loss spreads over all classes.", 0.0, type=_BELOW_ONE
    )
    prompt_weight: float = _training(
        "Weight of a prompt's tokens in the training loss, relative to those of its completion (causal-lm).",
        0.0,
        type=click.FloatRange(min=0),
    )
    model_dropout: float | None = _training(
        "Rate of the model's own dropout, in attention and elsewhere (default: as configured).", None, type=_BELOW_ONE
    )
    pooling: str | None = _training(
        "State that a classification head reads: of the first token, of the last, the mean of all, or what the model's "
        'own head reads (default: "mean" for a checkpoint of sentence-transformers that has it, else "own").',
        None,
        type=click.Choice(POOLINGS),
    )
    lora_rank: int | None = _training(
        "Train low-rank adapters of this rank and the new head only, with peft (default: train the whole model).",
        None,
        type=_POSITIVE,
    )
    lora_targets: str | None = _training(
        "Modules with adapters, by comma or repeated, or all-linear (default: peft's for the model).",
        None,
        multiple=True,
        callback=_joined,
    )
    lora_alpha: int | None = _training(
        "Scale of the adapters, divided by their rank (default: the rank).", None, type=_POSITIVE
    )
    lora_dropout: float = _training("Rate of dropout on the adapters' inputs.", 0.0, type=_BELOW_ONE)
    lora_matrix_dropout: float | str = _training(
        "Rate at which input and output features of the adapters' matrices are dropped, or rates by pattern of module "
        "names, such as query=0.5,value=0.1.",
        0.0,
        type=Rates(),
    )
    lora_rank_dropout: float | str = _training(
        "Rate at which ranks of the adapters are dropped, or rates by pattern.", 0.0, type=Rates()
    )
    gradient_accumulation: int = _training(
        "Split each batch into N micro-batches to save memory; the update is that of the whole batch.",
        1,
        metavar="N",
        type=_POSITIVE,
    )
    evaluate_every: int = _training("Evaluate every N epochs and after the last one.", 1, type=_POSITIVE)
    select: str | None = _training(
        'Network to return, score and save: of the "last" epoch, or of the "best" evaluation on the rows of --stop-on '
        "(default: last; best with --patience).",
        None,
        type=click.Choice(["last", "best"]),
    )
    patience: int | None = _training(
        "Stop after N evaluations without a better score (default: do not stop).", None, type=_POSITIVE
    )
    stop_on: str | None = _training(
        'Rows that --patience and --select best look at: "held-out" (of train) or "dev" (biases dev scores) '
        "(default: held-out).",
        None,
        type=click.Choice(["held-out", "dev"]),
    )
    stopping_rows: int | None = _training(
        "Rows to hold out of train for --stop-on held-out (default: a tenth of train, at most 256).",
        None,
        type=_POSITIVE,
    )
    seed: int = _training(
        "Seed of the new head, the choice and order of rows, and dropout.",
        0,
        scope="run",
        type=click.IntRange(0, LARGEST),
    )
    device: str | None = _training("Device (default: the best available).", None, type=click.Choice(DEVICES))
    threads: int | None = _training(
        "CPU threads (default: 1 for a model of at most 5 million parameters, else torch's own number).",
        None,
        scope="run",
        type=_POSITIVE,
    )
    mixed_precision: str | None = _training(
        "Mixed precision (default: float32).", None, type=click.Choice(["bf16", "fp16"])
    )
    output_dir: Path = _option(
        OUTPUT,
        "Folder for the results (default: runs/RECIPE-TASK-seedN; of a custom task, the data's name).",
        scope="run",
        type=click.Path(path_type=Path),
    )
    resume: bool = _output("Continue from the last checkpoint in --output-dir.", False, scope="run", is_flag=True)
    save_steps: int | None = _output(
        "Save a checkpoint every N steps, besides the one after each epoch.", None, scope="run", type=_POSITIVE
    )
    keep_checkpoints: bool = _output("Keep the last checkpoint of a finished run.", False, scope="run", is_flag=True)
    report_to: tuple[str, ...] = _output(
        "Also log to this tracker (tensorboard, wandb, ...); repeatable.", (), multiple=True
    )
    own: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    off_flags: dict[str, str] = field(default_factory=dict)
    recipe_file: str | None = None

    @property
    def returns_best(self) -> bool:
        """Whether the network of the best evaluation is returned, not the last one."""
        return self.select == "best" or (self.select is None and self.patience is not None)

    @property
    def scored_on(self) -> str:
        """The rows that the run is scored on: ``"dev"``, or rows of train, ``"held-out"``."""
        return "dev" if self.validation_rows is None and self.folds is None else "held-out"

    def chosen_task(self) -> Task:
        """Return the task that the options define."""
        return choose_task(self.task, **{name: getattr(self, name) for name in TASK_OPTIONS})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        values = dataclasses.asdict(self)
        kept = {name: values[name] for name in values if name not in NOT_COMPARED}
        return json.loads(json.dumps(kept))  # tuples become lists, as when read from a file

    def differences(self, config: dict[str, Any]) -> list[str]:
        """List the options in which a saved configuration differs, as typed on the command line."""
        flat, theirs = self._flat(config)
        return [
            f"{as_typed(self.flag(name), theirs.get(name)) or 'no ' + self.flag(name)} "
            f"(not {as_typed(self.flag(name), flat.get(name)) or 'given'})"
            for name in self.different(config)
        ]

    def different(self, config: dict[str, Any]) -> list[str]:
        """Return the names of the options in which a saved configuration differs."""
        flat, theirs = self._flat(config)
        names = sorted((flat.keys() | theirs.keys()) - {"attnreg", "content", "parameters", "default_max_length"})
        return [name for name in names if flat.get(name) != theirs.get(name)]

    def _flat(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return these options and those of a saved configuration, with the recipe's own options beside the others."""
        mine, theirs = self.to_dict(), with_defaults(config)
        if mine["max_length"] is None and theirs.pop("default_max_length", True):
            mine["max_length"] = theirs.get("max_length")
        return ({**mine, **mine["own"], "own": None}, {**theirs, **config.get("own", {}), "own": None})

    def content(self) -> dict[str, str | None]:
        """Return what the results depend on besides these options; see :func:`.content.content_of`."""
        return content_of(self.recipe_file, self.data_dir, self.own.values(), self.score_on)

    def command(self) -> str:
        """Return the command that repeats the run: its recipe, and all options that affect the results."""
        shared = [each for each in dataclasses.fields(self) if "option" in each.metadata]
        kept = [each for each in shared if each.name not in NOT_COMPARED and each.name != "task"]
        changed = [each.name for each in kept if getattr(self, each.name) != each.default]
        values = {"task": self.task, **{name: getattr(self, name) for name in changed}, **self.own}
        file = self.recipe_file
        words = ["attnreg", "recipe", self.recipe if file is None or is_built_in(file) else shlex.quote(file)]
        for name, value in values.items():
            if value is False and name in self.off_flags:
                words.append(self.off_flags[name])
            else:
                words.append(as_typed(self.flag(name), str(value) if name == "data_dir" else value))
        return " ".join(word for word in words if word)

    def flag(self, name: str) -> str:
        """Return the flag of an option, without a value."""
        return self.flags.get(name, f"--{name.replace('_', '-')}")


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return a saved configuration with the defaults of shared options that are newer than it.

    Example:
        >>> with_defaults({"epochs": 3})["schedule"]
        'linear'
    """
    defaults = {each.name: each.default for each in dataclasses.fields(Settings) if "option" in each.metadata}
    known = {name: value for name, value in defaults.items() if value is not MISSING and name not in NOT_COMPARED}
    chosen = {"select": "last" if config.get("patience") is None else "best"}
    return {**json.loads(json.dumps(known)), **chosen, **config}


def data_name(task: str, data_dir: str | None) -> str:
    """Return the name of the data for a folder of results: the task's, or that of the folder of a custom task.

    Example:
        >>> data_name("cola", "/data/glue"), data_name("custom", "/data/reviews")
        ('cola', 'reviews')
    """
    return (task == "custom" and data_dir and Path(data_dir).resolve().name) or task


def shared_options(*scopes: str, defaults: Mapping[str, Any] | None = None) -> list[Callable[[Any], Any]]:
    """Make the command-line options of some scopes (see :func:`_option`), perhaps with other defaults, by name."""
    made = []
    for each in dataclasses.fields(Settings):
        if each.metadata.get("scope") in scopes:
            other = {"default": defaults[each.name]} if defaults and each.name in defaults else {}
            further = {"further": "all" in scopes and each.name not in _FIRST}
            flag = f"--{each.name.replace('_', '-')}"
            made.append(option(flag, each.name, **{**each.metadata["option"], **other, **further}))
    return made


SHARED = {each.name for each in dataclasses.fields(Settings) if each.metadata.get("scope") in ("task", "all")}
TASK_OPTIONS = [each.name for each in dataclasses.fields(Settings) if each.metadata.get("scope") == "task"]
