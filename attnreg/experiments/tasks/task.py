"""The definition of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set with its columns, labels, metrics and default hyperparameters.

    Example:
        >>> from attnreg.experiments.tasks import get_task
        >>> get_task("mrpc").columns, get_task("mrpc").metric
        (('sentence1', 'sentence2'), 'accuracy')
    """

    name: str  #: the value of ``--task``.
    summary: str  #: one line for ``attnreg list tasks``.
    #: input columns: text, or lists of words for kind ``"tokens"``. A nested field is written with a dot, as in
    #: ``translation.en``.
    columns: tuple[str, ...]
    #: names in :data:`attnreg.experiments.tasks.METRICS`; all are reported, and the first one selects the best epoch.
    metrics: tuple[str, ...]
    #: a name in :data:`attnreg.experiments.tasks.kinds.KINDS`; it sets the model head and the form of labels.
    kind: str = "classification"
    label: str = "label"  #: the label column.
    #: class names, in the order of integer labels. Empty if there are no classes, or if their names come from the data.
    labels: tuple[str, ...] = ()
    #: whether integers in the data may be the numbers of these classes; if not, they are names.
    numbered: bool = True
    #: the columns of the choices, or one column of lists, for kind ``"multiple-choice"``.
    choices: tuple[str, ...] = ()
    #: maps the classes of models of other tasks to classes of this task, for ``attnreg evaluate``.
    merges: Mapping[str, str] = field(default_factory=dict)
    #: evaluation splits, by their names on the hub; the first one selects the best epoch.
    validation: tuple[str, ...] = ("validation",)
    #: whether the task only scores models of other tasks, because it has no training data.
    evaluation_only: bool = False
    #: repository and configuration on the Hugging Face hub; ``None`` if the task needs ``--data-dir``.
    hub: tuple[str, str | None] | None = None
    #: the function of :mod:`attnreg.experiments.tasks.agreement` that returns the built-in rows; ``None`` if the task
    #: has none.
    embedded: str | None = None
    #: default model, a hub name; ``None`` for a built-in tiny model.
    model: str | None = "google-bert/bert-base-uncased"
    epochs: int = 3  #: default number of epochs.
    batch_size: int = 32  #: default batch size.
    learning_rate: float = 5e-5  #: default learning rate.
    max_length: int = 128  #: default maximum input length in tokens; longer inputs are truncated.
    #: layers whose attention AD-DROP attributes by default, as in its official code; ``None`` for all.
    ad_drop_layers: tuple[int, ...] | None = None

    @property
    def metric(self) -> str:
        """The metric that is reported first, and that methods and epochs are compared by."""
        return self.metrics[0]
