"""What a task is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, and what a model is to make of it.

    Args:
        name: what ``--task`` takes.
        summary: one line for ``attnreg list tasks``.
        columns: the columns with what the model reads: text, or lists of words for kind ``"tokens"``. A column within a
            column is written with a dot, as in ``translation.en``.
        metrics: what is reported, names in :data:`attnreg.experiments.tasks.METRICS`; the first one chooses the
            best epoch.
        kind: a name in :data:`attnreg.experiments.tasks.kinds.KINDS`, which knows the head, the labels and the answers.
        label: the column with what the model is to answer.
        labels: class names, in the order of integer labels; empty where there are no classes, and where their names
            are read off the data.
        choices: the columns with what is chosen from, for kind ``"multiple-choice"``.
        merges: how classes of other tasks' models are read as this one's, for ``attnreg evaluate``.
        validation: the splits that are scored on, by the hub's names; all but the first are reported as well.
        evaluation_only: it is there to score models of other tasks on, not to train on.
        hub: repository and configuration on the Hugging Face hub; ``None`` where ``--data-dir`` is the only way.
        embedded: the function of :mod:`attnreg.experiments.tasks.agreement` that gives its rows; ``None`` where they do
            not come with the package.
        model: default model, a hub name; ``None`` for the embedded tiny BERT.
        epochs: default number of epochs.
        batch_size: default batch size.
        learning_rate: default learning rate.
        max_length: default longest input, in tokens; longer ones are cut.
        ad_drop_layers: layers that AD-DROP attributes by default, as its paper chose them; ``None`` for all.

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
        """The metric that is reported first and chooses the best epoch."""
        return self.metrics[0]
