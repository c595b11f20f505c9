"""Which options exclude or need each other, and which are for some kinds of tasks: one table for all commands.

In the tables, ``name=value`` stands for an option that has this value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnreg.errors import UsageError
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.task import Task

Flag = Callable[[str], str]
#: values with which an option does nothing, besides none at all, 0 and false
IDLE = {"wise_ft": 1.0, "gradient_accumulation": 1, "launcher": "local"}
_FEW_TRAIN = "exclude each other, because LoRA does not train the weights that the other one changes"
#: pairs of options that exclude each other, and what a message says of the two
EXCLUDES = (
    ("shots", "train_size", "both say how many rows to train on"),
    ("class_weights", "label_smoothing", "both change the training loss"),
    ("class_weights", "prompt_weight", "both change the training loss"),
    ("lora_rank", "reinit_layers", _FEW_TRAIN),
    ("lora_rank", "noisy_tune", _FEW_TRAIN),
    ("lora_rank", "wise_ft", _FEW_TRAIN),
    ("stop_on=dev", "stopping_rows", "exclude each other, because no rows are held out"),
)
#: options, and those of which they need one
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
# Of `attnreg compare`.
COMPARE = (
    ("jobs", "launcher", "exclude each other, because only the launcher local starts runs"),
    ("baseline", "study", "exclude each other, because a study file has its own baseline"),
    ("folds", "validation_rows", "both say which rows of train the methods are scored on"),
)


def is_set(name: str, values: Mapping[str, Any]) -> bool:
    """Whether an option of a table does something, given the values of options by name."""
    name, _, wanted = name.partition("=")
    value = values.get(name)
    return str(value) == wanted if wanted else bool(value) and value != IDLE.get(name)


def check_pairs(values: Mapping[str, Any], pairs: Sequence[tuple[str, str, str]], flag: Flag) -> None:
    """Refuse two options that exclude each other."""
    for one, other, why in pairs:
        if is_set(one, values) and is_set(other, values):
            raise UsageError(f"{typed(one, flag)} and {typed(other, flag)} {why}: remove one of them.")


def check_needs(values: Mapping[str, Any], needs: Sequence[tuple[str, Sequence[str]]], flag: Flag) -> None:
    """Refuse an option without one that it needs."""
    for name, needed in needs:
        if is_set(name, values) and not any(is_set(other, values) for other in needed):
            raise UsageError(f"{typed(name, flag)} needs {' or '.join(typed(other, flag) for other in needed)}.")


def check_kind(values: Mapping[str, Any], task: Task, flag: Flag) -> None:
    """Refuse an option that is not for the kind of a task."""
    for name, what, fits in KINDS:
        if is_set(name, values) and not fits(kind_class(task.kind)):
            raise UsageError(f"{flag(name)} is for {what}, but {task.name} is a {task.kind} task: remove it.")


def typed(name: str, flag: Flag) -> str:
    """Return an option of a table as it is typed."""
    name, _, value = name.partition("=")
    return f"{flag(name)} {value}".rstrip()
