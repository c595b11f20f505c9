"""The list of tasks, and choosing one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnreg.errors import UsageError
from attnreg.experiments.tasks import further, glue
from attnreg.experiments.tasks.definition import Task as Task
from attnreg.experiments.tasks.kinds import KINDS, kind_class

_AGREEMENT = Task(
    name="agreement",
    summary="English acceptability by agreement, made by a grammar; embedded, needs no network",
    columns=("sentence",),
    labels=("unacceptable", "acceptable"),
    metrics=("matthews_correlation", "accuracy"),
    embedded="rows",
    model=None,
    epochs=30,
    batch_size=64,
    learning_rate=2e-3,
    max_length=32,
)
_AGREEMENT_WORDS = replace(
    _AGREEMENT,
    name="agreement-words",
    summary="Hidden words of the acceptable sentences of agreement, to be guessed: pre-training; embedded",
    kind="masked-lm",
    label="sentence",
    labels=(),
    metrics=("accuracy",),
    embedded="corpus",
)
_CUSTOM = Task(
    name="custom",
    summary="a set of your own: --data-dir, --kind, --text-columns, --label-column, --metric",
    columns=(),
    metrics=(),
)

TASKS = {task.name: task for task in (_AGREEMENT, _AGREEMENT_WORDS, *glue.TASKS, *further.TASKS, _CUSTOM)}


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
        UsageError: if there is none.
    """
    if name not in TASKS:
        raise UsageError(f"Expected a task among {', '.join(TASKS)}, got {name!r}; see `attnreg list tasks`.")
    return TASKS[name]


def choose_task(
    name: str,
    *,
    kind: str | None = None,
    text_columns: str | None = None,
    label_column: str | None = None,
    choice_columns: str | None = None,
    metric: str | None = None,
) -> Task:
    """A task as the command line names it: by its name and, for ``custom``, by the columns of the data.

    Args:
        name: of the task.
        kind: of ``custom``, a name in :data:`attnreg.experiments.tasks.kinds.KINDS`; classification by default.
        text_columns: of ``custom``, names with commas between them.
        label_column: of ``custom``.
        choice_columns: of ``custom`` of kind ``"multiple-choice"``, names with commas between them.
        metric: the metric that chooses the best epoch, in place of the task's.

    Raises:
        UsageError: if there is no such task, an option is for ``custom`` alone, one is missing, or one does not fit.

    Example:
        >>> choose_task("custom", text_columns="question,answer", metric="f1").metrics
        ('f1', 'accuracy')
        >>> choose_task("mrpc", metric="f1").metrics
        ('f1', 'accuracy')
    """
    task = get_task(name)
    columns = {
        "--kind": kind,
        "--text-columns": text_columns,
        "--label-column": label_column,
        "--choice-columns": choice_columns,
    }
    if task is TASKS["custom"]:
        task = _custom(task, kind or "classification", text_columns, label_column, choice_columns)
    elif given := [option for option, value in columns.items() if value is not None]:
        raise UsageError(f"Expected {given[0]} with --task custom alone, got it with --task {name}.")
    if metric is None:
        return task
    known = kind_class(task.kind).metrics
    if metric not in known:
        raise UsageError(f"Expected --metric of a {task.kind} task among {', '.join(known)}, got {metric!r}.")
    return replace(task, metrics=tuple(dict.fromkeys((metric, *task.metrics))))


def _custom(template: Task, kind: str, texts: str | None, label: str | None, choices: str | None) -> Task:
    if kind not in KINDS:
        raise UsageError(f"Expected --kind among {', '.join(KINDS)}, got {kind!r}.")
    expected = kind_class(kind)
    columns, chosen_from = _names("--text-columns", texts), _names("--choice-columns", choices)
    if not columns:
        raise UsageError(
            "Expected --text-columns with --task custom, as in --text-columns premise,hypothesis, got none."
        )
    if len(columns) > expected.most_columns:
        raise UsageError(
            f"Expected at most {expected.most_columns} --text-columns for kind {kind}, got {len(columns)}: {texts}."
        )
    if expected.needs_choices != (len(chosen_from) > 1):
        raise UsageError(
            "Expected --choice-columns with two names or more for --kind multiple-choice, and none for others, got "
            f"{choices or 'none'} with --kind {kind}."
        )
    return replace(
        template,
        kind=kind,
        columns=columns,
        label=label or (template.label if expected.needs_labels else columns[0]),
        choices=chosen_from,
        metrics=expected.metrics[:1],
    )


def _names(option: str, text: str | None) -> tuple[str, ...]:
    names: Sequence[str] = [] if text is None else [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise UsageError(f"Expected {option} as names of columns with commas between them, each once, got {text!r}.")
    return tuple(names)
