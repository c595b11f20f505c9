"""The contract of a kind of task, and what kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import column_of, texts_of
from attnreg.experiments.tasks.definition import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

Record = dict[str, Any]
REFERENCE = "reference"  # a column of encoded rows that no model is given


class Kind(ABC):
    """How tasks of one kind are read, encoded, answered and scored.

    The class knows what rows must be; an instance also has a tokenizer.

    Args:
        task: the task, its labels known.
        tokenizer: the model's.
        max_length: longest input, in tokens; longer ones are cut.
        reading: where the model was trained on other classes: for each of them, its number among the task's.
    """

    head: ClassVar[str]
    #: what applies to it; the first is the default of ``--task custom``
    metrics: ClassVar[tuple[str, ...]]
    most_columns: ClassVar[int] = 2
    needs_choices: ClassVar[bool] = False
    #: whether the head has a class for each label
    has_classes: ClassVar[bool] = False
    #: whether an answer is right or wrong
    can_be_right: ClassVar[bool] = True
    #: whether there is a column with answers
    needs_labels: ClassVar[bool] = True
    #: whether they are text
    has_text_labels: ClassVar[bool] = False
    #: whether :meth:`collate` draws from torch's random generator
    draws: ClassVar[bool] = False
    #: how many of the training rows are scored at the end
    scored_train_rows: ClassVar[int] = 1000

    def __init__(self, task: Task, tokenizer: Any, max_length: int, reading: Sequence[int] | None = None) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.reading = reading

    @classmethod
    def label_names(cls, task: Task, splits: Mapping[str, Dataset], where: Any) -> tuple[str, ...]:
        """The names of the classes: the task's, or those that the data has; empty where there are no classes."""
        return task.labels

    @classmethod
    def labels_in(cls, task: Task, rows: Dataset) -> list[Any]:
        """The labels of all rows, as the data has them."""
        return column_of(rows, task.label)

    @classmethod
    def check(cls, task: Task, rows: Dataset, place: str) -> None:
        """Raise if a row is not as it must be; its columns are there.

        Raises:
            InputError: with the column, the row and the place.
        """
        for column in (*task.columns, *task.choices):
            texts_of(rows, column, place)
        cls.gold(task, rows, place)

    @classmethod
    @abstractmethod
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        """The right answer to each row, in the form that :meth:`inputs` takes.

        Raises:
            InputError: if one is not as it must be.
        """

    @classmethod
    def head_options(cls, task: Task) -> dict[str, Any]:
        """What the configuration of a model is told of the task."""
        return {"id2label": dict(enumerate(task.labels)), "label2id": {name: i for i, name in enumerate(task.labels)}}

    @classmethod
    def fit_tokenizer(cls, tokenizer: Any, name: str) -> None:
        """Set a tokenizer as this kind needs it.

        Args:
            tokenizer: as it was loaded.
            name: of the model.

        Raises:
            InputError: if it cannot do what the kind needs.
        """

    def encode(self, rows: Dataset) -> Dataset:
        """Tokenize rows: what the model is given, ``labels`` among it, and ``reference``, what answers are for."""
        gold = self.gold(self.task, rows)

        def encoded(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, Any]:
            return self.inputs(batch, [gold[number] for number in numbers])

        return rows.map(encoded, batched=True, with_indices=True, remove_columns=rows.column_names, keep_in_memory=True)

    def to_train_on(self, encoded: Dataset) -> Dataset:
        """Of encoded rows, those that there is something to learn from: a loss of nothing would be no number.

        Raises:
            InputError: if there are none.
        """
        return encoded

    @abstractmethod
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        """Some rows as the model takes them, with ``labels`` and ``reference``."""

    @abstractmethod
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Encoded rows, without ``reference``, as one padded batch."""

    def length(self, ids: list[Any]) -> int:
        """The length of a row, of its ``input_ids``."""
        return len(ids)

    @abstractmethod
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        """What a network answers to each row of a batch, from its output, as plain values."""

    @abstractmethod
    def record(self, answer: Any, reference: Any) -> Record:
        """A row of ``predictions.jsonl``: ``label`` and ``prediction``, and what else there is to know."""

    def score(self, records: Iterable[Record]) -> dict[str, float]:
        """The task's metrics, by name."""
        from attnreg.experiments.tasks.metrics import METRICS  # late: it imports torch

        kept, scores = list(records), {}
        for name in self.task.metrics:
            predictions, references = self.compared(name, kept)
            result = METRICS[name](keep_in_memory=True).compute(predictions=predictions, references=references)
            scores.update({key: float(value) for key, value in result.items()})
        return scores

    def compared(self, metric: str, records: Sequence[Record]) -> tuple[list[Any], list[Any]]:
        """Predictions and references as a metric takes them."""
        return [record["prediction"] for record in records], [record["label"] for record in records]

    def calibration_error(self, records: Iterable[Record]) -> float | None:
        """How far confidence is from accuracy; ``None`` where answers are no classes of whole rows."""
        return None

    def _read(self, number: int) -> int:
        return number if self.reading is None else self.reading[number]

    def _texts(self, batch: Mapping[str, Any]) -> list[list[str]]:
        return [column_of(batch, column) for column in self.task.columns]


def kept(encoded: Dataset, wanted: Sequence[bool], what: str) -> Dataset:
    """Encoded rows without those that are not wanted.

    Args:
        encoded: the rows.
        wanted: for each of them, whether it is.
        what: a row must have to be wanted.

    Raises:
        InputError: if none is wanted.
    """
    if all(wanted):
        return encoded
    if not any(wanted):
        raise InputError(f"Expected {what}, got {len(wanted)} rows without: see what the tokenizer makes of them.")
    return encoded.select([number for number, is_wanted in enumerate(wanted) if is_wanted])


def reading_of(classes: Sequence[str], task: Task) -> list[int]:
    """For each class of a model, its number among a task's, by name or by what the task merges.

    Raises:
        InputError: if a class is none of the task's.

    Example:
        >>> from attnreg.experiments.tasks import get_task
        >>> reading_of(["entailment", "neutral", "contradiction"], get_task("hans"))
        [0, 1, 1]
    """
    names = [task.merges.get(name, name) for name in classes]
    if strange := [name for name in names if name not in task.labels]:
        known = dict.fromkeys((*task.labels, *task.merges))
        raise InputError(
            f"Expected a model whose classes are among {', '.join(known)} for task {task.name!r}, got {strange[0]!r} "
            f"among {', '.join(classes)}."
        )
    return [task.labels.index(name) for name in names]
