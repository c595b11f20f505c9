"""Token classification: named entities, parts of speech."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import NO_LISTS, Classes, class_names, column_of
from attnreg.experiments.tasks.kinds.kind import IGNORED, REFERENCE, Kind, Record, absent_classes, kept, labelled
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

OUTSIDE = "O"


class Tokens(Kind):
    """One class per word, on its first sub-word. Other sub-words and special tokens have no label.

    The model does not see words beyond ``max_length`` or words without sub-words. Their prediction is ``O``, so their
    entities count as missed; if ``O`` is not a label, the prediction is wrong. Rows with no visible word are not
    trained on.
    """

    head = "AutoModelForTokenClassification"
    collator = "DataCollatorForTokenClassification"
    metrics = ("accuracy", "entity_f1")
    most_columns = 1
    has_classes = True
    labels_form = "lists with "

    @classmethod
    @override
    def plain(
        cls, task: Task, splits: Mapping[str, Dataset], places: Mapping[str, str]
    ) -> tuple[Task, Mapping[str, Dataset]]:
        for name, rows in splits.items():
            for column in (task.columns[0], task.label):
                for row, value in enumerate(column_of(rows, column), 1):
                    if not isinstance(value, list):
                        raise InputError(
                            f"Expected a list in column {column}, got {value!r} in row {row} of {places[name]}"
                            f"{NO_LISTS * isinstance(value, str)}."
                        )
        return task, splits

    @classmethod
    @override
    def label_names(cls, task: Task, splits: Mapping[str, Dataset], where: Any) -> tuple[str, ...]:
        labels = super().label_names(task, splits, where)
        if "entity_f1" in task.metrics and (
            strange := [name for name in labels if name != OUTSIDE and name[:2] not in ("B-", "I-", "E-", "S-")]
        ):
            raise InputError(
                f"Metric entity_f1 needs labels such as O, B-PER, I-PER, got {strange[0]!r} in column {task.label} of "
                f"{where}: use --metric accuracy."
            )
        return labels

    @classmethod
    @override
    def labels_in(cls, task: Task, rows: Dataset) -> list[Any]:
        return [label for row in column_of(rows, task.label) for label in row]

    @classmethod
    @override
    def check(cls, task: Task, rows: Dataset, place: str) -> None:
        column = task.columns[0]
        words, tags = column_of(rows, column), column_of(rows, task.label)
        for row, (some, theirs) in enumerate(zip(words, tags, strict=True)):
            if strange := [word for word in some if not isinstance(word, str)]:
                raise InputError(f"Expected words in column {column}, got {strange[0]!r} in row {row + 1} of {place}.")
            if len(some) != len(theirs) or not some:
                raise InputError(
                    f"Expected one label in column {task.label} for each word in column {column}, and at least one "
                    f"word, got {len(some)} words and {len(theirs)} labels in row {row + 1} of {place}."
                )
        cls.gold(task, rows, place)

    @classmethod
    @override
    def predicts_such(cls, label: Any) -> str | None:
        return "a label for each word" if isinstance(label, list) else None

    @override
    def label_warnings(self, rows: Dataset) -> list[str]:
        return absent_classes(self.task.labels, (number for tags in self.gold(self.task, rows) for number in tags))

    @classmethod
    @override
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        classes = Classes(task.labels, class_names(rows, task.label))
        every = []
        for row, tags in enumerate(column_of(rows, task.label)):
            numbers = [classes.number(tag) for tag in tags]
            if None in numbers:
                strange = tags[numbers.index(None)]
                raise InputError(f"Expected labels {classes}, got {strange!r} in row {row + 1} of {place}.")
            every.append(numbers)
        return every

    @classmethod
    @override
    def fit_tokenizer(cls, tokenizer: Any, name: str) -> None:
        if not tokenizer.is_fast:
            raise InputError(
                f"The tokenizer of --model {name} ({type(tokenizer).__name__}) cannot map tokens to words: choose a "
                "model with a fast tokenizer (tokenizer.json)."
            )
        pieces = tokenizer.backend_tokenizer.pre_tokenizer
        if type(pieces).__name__ == "ByteLevel":  # it marks words by a leading space, which split words lack
            pieces.add_prefix_space = True
            tokenizer.backend_tokenizer.pre_tokenizer = pieces

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        encoded = self.tokenizer(
            self._texts(batch)[0], is_split_into_words=True, truncation=True, max_length=self.max_length
        )
        labels, references = [], []
        for number, tags in enumerate(gold):
            words = first_sub_words(encoded.word_ids(number))
            labels.append([IGNORED if word is None else tags[word] for word in words])
            references.append({"labels": tags, "words": [word for word in words if word is not None]})
        return {**encoded, "labels": labels, REFERENCE: references}

    @override
    def to_train_on(self, encoded: Dataset) -> Dataset:
        return kept(encoded, labelled(encoded), f"a word that the model sees in column {self.task.columns[0]}")

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        found, labelled = output.logits.argmax(-1).cpu(), (batch["labels"] != IGNORED).cpu()
        return [row[here].tolist() for row, here in zip(found, labelled, strict=True)]

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        names = self.task.labels
        predicted = [OUTSIDE] * len(reference["labels"])
        for word, number in zip(reference["words"], answer, strict=True):
            predicted[word] = names[self._read(number)]
        return {"label": [names[number] for number in reference["labels"]], "prediction": predicted}

    @override
    def compared(self, metric: str, records: Sequence[Record]) -> tuple[list[Any], list[Any]]:
        predictions, references = super().compared(metric, records)
        if metric == "entity_f1":
            return predictions, references
        numbers = {name: number for number, name in enumerate(self.task.labels)}
        flat = ([numbers.get(tag, -1) for row in rows for tag in row] for rows in (predictions, references))
        return next(flat), next(flat)


def first_sub_words(word_ids: Sequence[int | None]) -> list[int | None]:
    """Return the word index at the first sub-word of each word, and ``None`` at all other positions.

    Example:
        >>> first_sub_words([None, 0, 0, 1, None])
        [None, 0, None, 1, None]
    """
    before = [None, *word_ids[:-1]]
    return [word if word != previous else None for word, previous in zip(word_ids, before, strict=True)]
