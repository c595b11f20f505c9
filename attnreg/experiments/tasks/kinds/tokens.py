"""Token classification: named entities, parts of speech."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import NO_LISTS, Classes, column_of, converted, named_labels
from attnreg.experiments.tasks.kinds.kind import FAST, IGNORED, REFERENCE, Kind, Record, Splits, absent_classes

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
    tokenizer_needs = FAST
    learns_from = "a word that the model sees"

    @override
    def plain(self, splits: Splits, places: Mapping[str, str]) -> Splits:
        for name, rows in splits.items():
            for column in (self.task.columns[0], self.task.label):
                values, what = column_of(rows, column), f"a list in column {column}"
                converted(
                    values, lambda value: value if isinstance(value, list) else None, what, places[name], NO_LISTS
                )
        return splits

    @override
    def label_names(self, splits: Splits, where: Any) -> tuple[str, ...]:
        labels = super().label_names(splits, where)
        strange = [name for name in labels if name != OUTSIDE and name[:2] not in ("B-", "I-", "E-", "S-")]
        if strange and "entity_f1" in self.task.metrics:
            raise InputError(
                f"Metric entity_f1 needs labels such as O, B-PER, I-PER, got {strange[0]!r} in column "
                f"{self.task.label} of {where}: use --metric accuracy."
            )
        return labels

    @override
    def labels_in(self, rows: Dataset) -> list[Any]:
        return list(chain.from_iterable(super().labels_in(rows)))

    @override
    def check(self, rows: Dataset, place: str) -> None:
        column, label = self.task.columns[0], self.task.label
        pairs = zip(column_of(rows, column), column_of(rows, label), strict=True)
        for row, (words, tags) in enumerate(pairs, 1):
            if strange := [word for word in words if not isinstance(word, str)]:
                raise InputError(f"Expected words in column {column}, got {strange[0]!r} in row {row} of {place}.")
            if len(words) != len(tags) or not words:
                raise InputError(
                    f"Expected one label in column {label} for each word in column {column}, and at least one word, "
                    f"got {len(words)} words and {len(tags)} labels in row {row} of {place}."
                )
        self.gold(rows, place)

    @override
    def label_warnings(self, rows: Dataset) -> Iterable[str]:
        return absent_classes(self.task.labels, chain.from_iterable(self.gold(rows)))

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        classes, every = Classes(self.task.labels, numbered=self.task.numbered), []
        for row, tags in enumerate(named_labels(rows, self.task.label, place), 1):
            every.append([classes.number(tag) for tag in tags])
            if None in every[-1]:
                strange = tags[every[-1].index(None)]
                raise InputError(f"Expected labels {classes}, got {strange!r} in row {row} of {place}.")
        return every

    @override
    def fit_tokenizer(self, tokenizer: Any, name: str) -> None:
        super().fit_tokenizer(tokenizer, name)
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
            # The word at its first sub-word, and nothing at the others.
            words = [word if word != before else None for before, word in pairwise([None, *encoded.word_ids(number)])]
            labels.append([IGNORED if word is None else tags[word] for word in words])
            references.append({"labels": tags, "words": [word for word in words if word is not None]})
        return {**encoded, "labels": labels, REFERENCE: references}

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
