"""What a task is; the list of tasks. Adding one costs an entry here."""

from __future__ import annotations

from dataclasses import dataclass

from attnreg.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Task:
    """A text classification task.

    Args:
        name: what ``--task`` takes.
        summary: one line for ``attnreg list tasks``.
        columns: the text columns, one or two.
        labels: class names, in the order of the integer labels in column ``label``.
        metric: the metric that is optimised and reported first, a name in :data:`attnreg.tasks.METRICS`.
        hub: repository and configuration on the Hugging Face hub; ``None`` for the embedded task.
        model: default model, a hub name; ``None`` for the embedded tiny BERT.
        epochs: default number of epochs.
        batch_size: default batch size.
        learning_rate: default learning rate.
        max_length: default longest input, in tokens; longer ones are cut.
        ad_drop_layers: layers that AD-DROP attributes by default, as its paper chose them; ``None`` for all.

    Example:
        >>> get_task("cola").columns
        ('sentence',)
    """

    name: str
    summary: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metric: str
    hub: tuple[str, str] | None = None
    model: str | None = "google-bert/bert-base-uncased"
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    max_length: int = 128
    ad_drop_layers: tuple[int, ...] | None = None


TASKS = {
    task.name: task
    for task in (
        Task(
            name="agreement",
            summary="English acceptability by agreement, made by a grammar; embedded, needs no network",
            columns=("sentence",),
            labels=("unacceptable", "acceptable"),
            metric="matthews_correlation",
            model=None,
            epochs=30,
            batch_size=64,
            learning_rate=2e-3,
            max_length=32,
        ),
        Task(
            name="cola",
            summary="Corpus of Linguistic Acceptability (GLUE): is the sentence acceptable English?",
            columns=("sentence",),
            labels=("unacceptable", "acceptable"),
            metric="matthews_correlation",
            hub=("nyu-mll/glue", "cola"),
        ),
        Task(
            name="sst2",
            summary="Stanford Sentiment Treebank (GLUE): is the sentence of a film review positive?",
            columns=("sentence",),
            labels=("negative", "positive"),
            metric="accuracy",
            hub=("nyu-mll/glue", "sst2"),
            ad_drop_layers=(0,),
        ),
        Task(
            name="mrpc",
            summary="Microsoft Research Paraphrase Corpus (GLUE): do the two sentences say the same?",
            columns=("sentence1", "sentence2"),
            labels=("not_equivalent", "equivalent"),
            metric="accuracy",
            hub=("nyu-mll/glue", "mrpc"),
        ),
        Task(
            name="rte",
            summary="Recognizing Textual Entailment (GLUE): does the second sentence follow from the first?",
            columns=("sentence1", "sentence2"),
            labels=("entailment", "not_entailment"),
            metric="accuracy",
            hub=("nyu-mll/glue", "rte"),
        ),
    )
}


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
        UsageError: if there is none.
    """
    if name not in TASKS:
        raise UsageError(f"Expected a task among {', '.join(TASKS)}, got {name!r}; see `attnreg list tasks`.")
    return TASKS[name]
