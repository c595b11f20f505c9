"""Choose a task by its name and by options."""

from __future__ import annotations

from dataclasses import replace

from attnreg.errors import UsageError, did_you_mean
from attnreg.experiments.tasks.built_in import TASKS, get_task
from attnreg.experiments.tasks.kinds import KINDS, kind_class
from attnreg.experiments.tasks.task import Task


def choose_task(
    name: str,
    *,
    kind: str | None = None,
    text_columns: str | None = None,
    label_column: str | None = None,
    choice_columns: str | None = None,
    metric: str | None = None,
) -> Task:
    """Return the task that command-line options describe.

    Args:
        name: name of the task. The next four arguments are only for task ``custom``.
        kind: a name in :data:`attnreg.experiments.tasks.kinds.KINDS` (default: classification).
        text_columns: names of the text columns, separated by commas.
        label_column: name of the label column (default: ``label``).
        choice_columns: names of the columns with the choices, separated by commas, or of one column of lists; for kind
            ``"multiple-choice"``.
        metric: metric that is reported first and selects the best epoch (default: the task's). Micro-F1 of single
            classes, ``"micro_f1"``, is accuracy.

    Raises:
        UsageError: if there is no such task, or an option is missing, wrong, or only for task ``custom``.

    Example:
        >>> choose_task("custom", text_columns="question,answer", metric="f1").metrics
        ('f1', 'accuracy')
        >>> choose_task("mrpc", metric="f1").metrics
        ('f1', 'accuracy')
    """
    task = get_task(name)
    given = (kind, text_columns, label_column, choice_columns)
    if task is TASKS["custom"]:
        task = _custom(task, kind or "classification", *given[1:])
    elif set(given) != {None}:
        flags = ("--kind", "--text-columns", "--label-column", "--choice-columns")
        flag = next(flag for flag, value in zip(flags, given, strict=True) if value is not None)
        raise UsageError(f"{flag} is only for --task custom: remove it for --task {name}.")
    if metric is None:
        return task
    known = kind_class(task.kind).metrics
    if metric == "micro_f1" and "accuracy" in known:
        metric = "accuracy"  # one class and one prediction each: every miss is a false positive and a false negative
    if metric not in known:
        raise UsageError(
            f"Expected --metric for a {task.kind} task to be one of {', '.join(known)}, got {metric!r}."
            f"{did_you_mean(metric, known)}"
        )
    return replace(task, metrics=tuple(dict.fromkeys((metric, *task.metrics))))


def _custom(template: Task, kind: str, texts: str | None, label: str | None, choices: str | None) -> Task:
    if kind not in KINDS:
        raise UsageError(f"Expected --kind to be one of {', '.join(KINDS)}, got {kind!r}.{did_you_mean(kind, KINDS)}")
    expected = kind_class(kind)
    columns, chosen_from = _names("--text-columns", texts), _names("--choice-columns", choices)
    if not columns and expected.usual_columns:
        columns, label = expected.usual_columns, label or expected.usual_label
    if not columns:
        raise UsageError("--task custom needs --text-columns, for example --text-columns premise,hypothesis.")
    if len(columns) > expected.most_columns:
        raise UsageError(
            f"Expected at most {expected.most_columns} --text-columns for --kind {kind}, got {len(columns)}: {texts}."
        )
    if expected.needs_choices != bool(chosen_from):
        raise UsageError(
            "Expected --choice-columns for --kind multiple-choice (two or more, or one of lists), and none for other "
            f"kinds, got {choices or 'none'} for --kind {kind}."
        )
    target = label or (template.label if expected.needs_labels else columns[0])
    if expected.needs_labels and target in (*columns, *chosen_from):
        raise UsageError(f"Column {target} holds the labels, so it cannot be a text or choice column, too.")
    metrics = expected.metrics[:1]
    return replace(template, kind=kind, columns=columns, label=target, choices=chosen_from, metrics=metrics)


def _names(option: str, text: str | None) -> tuple[str, ...]:
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise UsageError(f"Expected {option} to be different column names, separated by commas, got {text!r}.")
    return names
