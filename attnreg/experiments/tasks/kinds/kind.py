"""The base class of kinds of tasks, and functions that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from attnreg.errors import InputError, listed
from attnreg.experiments.tasks.columns import Classes, class_names, column_of, names_of, texts_of
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

Record = dict[str, Any]
Splits = Mapping[str, "Dataset"]  # rows by the name of their split
IGNORED = -100  # transformers' label for positions without a loss
REFERENCE = "reference"  # a column of encoded rows with the right answers; it is not a model input
FAST = ("is_fast", "cannot map tokens to words of the text: choose a model with a fast tokenizer (tokenizer.json)")


@dataclass(eq=False)
class Kind(ABC):
    """A kind of task: checks, encodes and scores the rows of every task of this kind.

    Rows are checked without a tokenizer. Unsuitable rows raise an :class:`~attnreg.errors.InputError`.

    Args:
        task: the task, with its class names filled in.
        tokenizer: the tokenizer of the model, or its image processor.
        max_length: maximum input length in tokens; longer inputs are truncated.
        reading: for a model that was trained on other classes, the task's class numbers of the model's classes.
    """

    task: Task
    tokenizer: Any = None
    max_length: int = 0
    reading: Sequence[int] | None = None

    head: ClassVar[str]  #: auto class of transformers with the head
    head_is_new: ClassVar[bool] = True  #: whether pretrained models usually lack the head, so that a new one is needed
    collator: ClassVar[str] = "DataCollatorWithPadding"  #: collator of transformers that pads the rows of a batch
    metrics: ClassVar[tuple[str, ...]]  #: metrics that apply; the first one is the default of ``--task custom``
    most_columns: ClassVar[int] = 2
    #: columns of ``--task custom`` without ``--text-columns``; empty if the option is required
    usual_columns: ClassVar[tuple[str, ...]] = ()
    usual_label: ClassVar[str] = "label"  #: label column that goes with these columns
    needs_choices: ClassVar[bool] = False
    has_classes: ClassVar[bool] = False  #: whether the head has one output per class
    one_class_per_row: ClassVar[bool] = False  #: whether the label of a row is a single class
    #: whether the label of a row is a number that is no class, so that a prediction is not right or wrong
    one_number_per_row: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = True  #: whether the data has a label column
    reads_images: ClassVar[bool] = False  #: whether inputs are images, which an image processor prepares
    has_windows: ClassVar[bool] = False  #: whether a long row becomes several encoded rows, instead of being cut
    scored_train_rows: ClassVar[int] = 1000  #: number of training rows that are scored after training
    config: ClassVar[Mapping[str, Any]] = {}  #: options of the model's configuration
    learns_from: ClassVar[str] = ""  #: for a message: what rows need to be trained on, if rows may lack it
    #: an attribute that the tokenizer needs, and the message about a tokenizer without it
    tokenizer_needs: ClassVar[tuple[str, str] | None] = None

    @property
    def generates(self) -> bool:
        """Whether :meth:`answers` lets the network generate text."""
        return False

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences on how rows are encoded, for the report."""
        return ()

    def plain(self, splits: Splits, places: Mapping[str, str]) -> Splits:
        """Bring rows, and the task, into the form that the other methods take, or raise; by default unchanged.

        The columns are known to exist. ``places`` says where the rows of a split are from, for messages.
        """
        return splits

    def label_names(self, splits: Splits, where: Any) -> tuple[str, ...]:
        """Return the class names, from the task or else from the data; empty if the kind has no classes.

        Raises if they do not fit the kind or the task's metrics.
        """
        label = self.task.label
        if self.task.labels or not self.has_classes:
            return self.task.labels
        known = next((names for rows in splits.values() if (names := class_names(rows, label))), [])
        bare = [splits["train"]] if known and "train" in splits and class_names(splits["train"], label) is None else []
        number = Classes(known, numbered=False).number
        if strange := [label for rows in bare for label in names_of(self.labels_in(rows)) if number(label) is None]:
            raise InputError(
                f"Label {strange[0]!r} in column {label} of split train of {where} is none of the classes that another "
                f"split declares, {listed(known, 20)}: give train their names."
            )
        labels = known or names_of(label for rows in splits.values() for label in self.labels_in(rows))
        if len(labels) < 2:
            got = ", ".join(labels) or "none: numbers are of --kind regression, and lists of labels of --kind tokens"
            raise InputError(f"Column {label} of {where} needs at least two classes, got {got}.")
        return tuple(labels)

    def labels_in(self, rows: Dataset) -> list[Any]:
        """Return the labels of all rows, unconverted."""
        return column_of(rows, self.task.label)

    def check(self, rows: Dataset, place: str) -> None:
        """Raise an ``InputError`` that names the first bad value and its place; the columns are known to exist."""
        for column in (*self.task.columns, *self.task.choices):
            texts_of(rows, column, place)
        self.gold(rows, place)

    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        """Return the labels of rows, in the form that :meth:`inputs` takes, or raise; by default texts."""
        return texts_of(rows, self.task.label, place)

    def label_warnings(self, rows: Dataset) -> Iterable[str]:
        """Return sentences on probable mistakes in the labels of training rows that are not yet encoded."""
        return ()

    def head_options(self) -> dict[str, Any]:
        """Return the options of the model's configuration that depend on the task."""
        names = dict(enumerate(self.task.labels))
        maps = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        return {**(maps if self.has_classes else {}), **self.config}

    def fit_tokenizer(self, tokenizer: Any, name: str) -> None:
        """Adapt a loaded tokenizer to this kind, in place, or raise if it lacks what the kind needs."""
        if self.tokenizer_needs and not getattr(tokenizer, self.tokenizer_needs[0]):
            subject = f"The tokenizer of --model {name} ({type(tokenizer).__name__})"
            raise InputError(f"{subject} {self.tokenizer_needs[1]}.")

    def check_model(self, model: nn.Module, name: str) -> None:
        """Raise if a loaded model does not fit the kind."""

    def encode(self, rows: Dataset) -> Dataset:
        """Tokenize rows: model inputs with ``labels``, and ``reference`` for scoring."""
        gold = self.gold(rows)

        def encoded(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, Any]:
            inputs = self.inputs(batch, [gold[number] for number in numbers])
            for number, ids in zip(numbers, inputs["input_ids"], strict=False):  # a long row may have several
                if not (any(map(len, ids)) if self.needs_choices else len(ids)):
                    raise InputError(f"Row {number + 1} has no text, and the tokenizer adds no token: remove it.")
            return inputs

        options = {"batched": True, "with_indices": True, "remove_columns": rows.column_names, "keep_in_memory": True}
        return rows.map(encoded, try_original_type=False, **options)  # `labels` may have been of another type

    def to_train_on(self, encoded: Dataset) -> Dataset:
        """Drop encoded rows without labels, whose loss would be NaN, or raise if no rows remain."""
        return keep_rows(encoded, labelled(encoded), self.learns_from) if self.learns_from else encoded

    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        """Return model inputs for a batch of rows, with ``labels`` and ``reference``."""
        encoded = self.tokenizer(*self._texts(batch), truncation=True, max_length=self.max_length)
        return {**encoded, "labels": gold, REFERENCE: gold}

    def to_score(self, encoded: Dataset) -> Dataset:
        """Return encoded rows to score a network on; what training draws per batch is drawn once per row."""
        return encoded

    def divided(self, encoded: Dataset, at: int) -> int:
        """Return the last index, up to ``at``, where encoded rows can be divided: not between a row's windows."""
        return at

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Pad encoded rows, which come without ``reference``, to one batch."""
        import transformers

        return dict(getattr(transformers, self.collator)(self.tokenizer)(rows))

    def lengths(self, encoded: Dataset) -> list[int]:
        """Return the numbers of tokens of encoded rows, of the longest part; 1 for images."""
        return [1] * len(encoded) if self.reads_images else [len(ids) for ids in encoded["input_ids"]]

    @abstractmethod
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        """Return the network's answers to the rows of a batch (logits, tags or text), as plain Python values."""

    def record(self, answer: Any, reference: Any) -> Record:
        """Return a row of ``predictions.jsonl``: ``label``, ``prediction`` and, for classes, ``logits``."""
        return {"label": reference, "prediction": answer}

    def records(self, answers: Sequence[Any], references: Sequence[Any]) -> list[Record]:
        """Return the rows of ``predictions.jsonl``, from the answers and references of all encoded rows, in order."""
        return [self.record(answer, reference) for answer, reference in zip(answers, references, strict=True)]

    def trivial(self, references: Sequence[Any]) -> tuple[str, Any] | None:
        """Return name and answer of the best constant predictor, or ``None`` if the kind has none."""
        return None

    def score(self, records: Iterable[Record]) -> dict[str, float]:
        """Return the task's metrics, by name."""
        from attnreg.experiments.tasks.metrics import METRICS  # late: it imports torch

        rows, scores = list(records), dict[str, float]()
        with TemporaryDirectory() as folder:  # `evaluate` makes folders, by default in a home that may be read-only
            for name in self.task.metrics:
                predictions, references = self.compared(name, rows)
                metric = METRICS[name](keep_in_memory=True, cache_dir=folder)
                result = metric.compute(predictions=predictions, references=references)
                scores |= {key: float(value) for key, value in result.items()}
        return scores

    def compared(self, metric: str, records: Sequence[Record]) -> tuple[list[Any], list[Any]]:
        """Return predictions and references in the form that a metric takes; accuracy counts the items of lists."""
        sides = [[record[name] for record in records] for name in ("prediction", "label")]
        if metric == "accuracy" and isinstance(sides[1][0], list):
            right = [int(ours == theirs) for ours, theirs in zip(*map(chain.from_iterable, sides), strict=True)]
            return right, [1] * len(right)
        return sides[0], sides[1]

    def calibration_error(self, records: Iterable[Record]) -> float | None:
        """Return the expected calibration error, or ``None`` unless the answer to a row is one class."""
        return None

    def _task_class(self, number: int) -> int:
        return number if self.reading is None else self.reading[number]

    def _texts(self, batch: Mapping[str, Any]) -> list[list[str]]:
        return [column_of(batch, column) for column in self.task.columns]


def absent_classes(names: Sequence[str], numbers: Iterable[int]) -> Iterator[str]:
    """Warn of classes that no training row has, and of classes whose names differ only in case or spaces."""
    present, spelled = set(numbers), [" ".join(name.casefold().split()) for name in names]
    if alike := [repr(name) for name, spelling in zip(names, spelled, strict=True) if spelled.count(spelling) > 1]:
        yield f"classes {listed(alike)} differ only in case or spaces: spell a class alike in all rows."
    if len(present) == 1:
        yield f"all training rows have the class {names[present.pop()]}, so there is nothing to learn."
    elif absent := [name for number, name in enumerate(names) if number not in present]:
        classes = f"class {absent[0]}" if len(absent) == 1 else f"classes {listed(absent)}"
        yield f"no training row has the {classes}: raise --train-size, or add such rows."


def keep_rows(encoded: Dataset, wanted: Sequence[bool], feature: str) -> Dataset:
    """Keep the wanted rows, or raise if none is; ``feature`` says in the message what the wanted rows have."""
    if all(wanted):
        return encoded
    if not any(wanted):
        raise InputError(f"None of {len(wanted)} rows has {feature}: check the text and how the tokenizer splits it.")
    return encoded.select([number for number, is_wanted in enumerate(wanted) if is_wanted])


def labelled(encoded: Dataset) -> list[bool]:
    """Return which encoded rows, with a label per position, have a position with a loss."""
    return [any(label != IGNORED for label in labels) for labels in encoded["labels"]]


def reading_of(classes: Sequence[str], task: Task) -> list[int]:
    """Return the task's class numbers of a model's classes, by name or by the task's ``merges``, or raise."""
    names = [task.merges.get(name, name) for name in classes]
    if strange := [name for name in names if name not in task.labels]:
        known = dict.fromkeys((*task.labels, *task.merges))
        raise InputError(
            f"The model's class {strange[0]!r} does not exist in task {task.name!r}: the model has "
            f"{', '.join(classes)}, the task accepts {', '.join(known)}."
        )
    return [task.labels.index(name) for name in names]
