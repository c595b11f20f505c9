"""The definition of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set with its columns, labels, metrics and default hyperparameters.

    Args:
        name: the value of ``--task``.
        summary: one line for ``attnreg list tasks``.
        columns: input columns: text, or lists of words for kind ``"tokens"``. A nested field is written with a dot, as
            in ``translation.en``.
        metrics: names in :data:`attnreg.experiments.tasks.METRICS`; all are reported, and the first one selects the
            best epoch.
        kind: a name in :data:`attnreg.experiments.tasks.kinds.KINDS`; it sets the model head and the form of labels.
        label: the label column.
        labels: class names, in the order of integer labels. Empty if there are no classes, or if their names come
            from the data.
        choices: the columns of the choices, or one column of lists, for kind ``"multiple-choice"``.
        merges: maps the classes of models of other tasks to classes of this task, for ``attnreg evaluate``.
        validation: evaluation splits, by their names on the hub; the first one selects the best epoch.
        evaluation_only: whether the task only scores models of other tasks, with no training data of its own.
        hub: repository and configuration on the Hugging Face hub; ``None`` if the task needs ``--data-dir``.
        embedded: the function of :mod:`attnreg.experiments.tasks.agreement` that returns the built-in rows; ``None``
            if the task has none.
        model: default model, a hub name; ``None`` for a built-in tiny model.
        epochs: default number of epochs.
        batch_size: default batch size.
        learning_rate: default learning rate.
        max_length: default maximum input length in tokens; longer inputs are truncated.
        ad_drop_layers: layers whose attention AD-DROP attributes by default, as in its official code; ``None`` for all.

    Example:
        >>> from attnreg.experiments.tasks import get_task
        >>> get_task("mrpc").columns, get_task("mrpc").metric
        (('sentence1', 'sentence2'), 'accuracy')
    """

    name: str
    summary: str
    columns: tuple[str, ...]
    metrics: tuple[str, ...]
    kind: str = "classification"
    label: str = "label"
    labels: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    merges: Mapping[str, str] = field(default_factory=dict)
    validation: tuple[str, ...] = ("validation",)
    evaluation_only: bool = False
    hub: tuple[str, str | None] | None = None
    embedded: str | None = None
    model: str | None = "google-bert/bert-base-uncased"
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    max_length: int = 128
    ad_drop_layers: tuple[int, ...] | None = None

    @property
    def metric(self) -> str:
        """The metric that is reported first, and that methods and epochs are compared by."""
        return self.metrics[0]
