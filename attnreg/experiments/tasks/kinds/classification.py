"""Classes of texts, pairs of texts, images and words; regression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from statistics import fmean, mode
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.columns import NO_LISTS, Classes, column_of, converted, named_labels, number_of
from attnreg.experiments.tasks.kinds.kind import FAST, IGNORED, REFERENCE, Kind, Record, Splits, absent_classes

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

OUTSIDE = "O"  # the class of words that are in no entity


class Classification(Kind):
    """One class per text or pair of texts, labelled by name or number."""

    head = "AutoModelForSequenceClassification"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "f1", "macro_f1", "matthews_correlation")
    has_classes = True
    one_class_per_row = True
    # Always set, because a model from another task may have another problem type.
    config: ClassVar[Mapping[str, Any]] = {"problem_type": "single_label_classification"}

    @override
    def label_names(self, splits: Splits, where: Any) -> tuple[str, ...]:
        labels = super().label_names(splits, where)
        if "f1" in self.task.metrics and len(labels) != 2:
            got = f"{len(labels)} in column {self.task.label} of {where}"
            raise InputError(f"Metric f1 needs two classes, got {got}: use --metric macro_f1.")
        return labels

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        classes = Classes(self.task.labels, numbered=self.task.numbered)
        labels = named_labels(rows, self.task.label, place)
        fractions = any((number_of(label) or 0.0) % 1 for label in labels)
        hint = " (to predict numbers, use --kind regression)" * fractions
        unknown = next((label for label in labels if classes.number(label) is None), 0)
        hint = hint or " (remove rows without a label)" * (unknown in ("", None))
        return converted(labels, classes.number, f"labels {classes}{hint}", place)

    @override
    def label_warnings(self, rows: Dataset) -> Iterable[str]:
        return absent_classes(self.task.labels, self.gold(rows))

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        return output.logits.float().cpu().tolist()

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        best = max(range(len(answer)), key=answer.__getitem__)
        return {"label": reference, "prediction": self._task_class(best), "logits": answer}

    @override
    def trivial(self, references: Sequence[Any]) -> tuple[str, Any]:
        return "majority class", mode(sorted(references))  # the first, in a tie

    @override
    def calibration_error(self, records: Iterable[Record]) -> float | None:
        import torch

        from attnreg.experiments.tasks.metrics import calibration_error

        logits, labels = zip(*((record["logits"], record["label"]) for record in records), strict=True)
        return calibration_error(torch.tensor(logits).softmax(-1), torch.tensor(labels))


class ImageClassification(Classification):
    """One class per image. The model's image processor resizes and normalizes; images are not augmented.

    Images stay in their files and are read batch by batch.
    """

    head = "AutoModelForImageClassification"
    reads_images = True
    most_columns = 1
    usual_columns = ("image",)

    @override
    def check(self, rows: Dataset, place: str) -> None:
        from datasets import Image

        (column,) = self.task.columns
        if not isinstance(rows.features.get(column), Image):
            raise InputError(
                f"Expected images in column {column} of {place}, got {rows.features.get(column)}: use --data-dir to "
                "give a folder of images, with a subfolder per class in train and validation."
            )
        images = rows.select_columns([column])
        for row in range(len(rows)):
            try:
                image = images[row][column]
            except (OSError, ValueError, SyntaxError) as error:  # Pillow raises the last for a broken PNG
                reason = one_line(error)
                raise InputError(f"Cannot read the image in row {row + 1} of {place}: {reason}") from error
            if image is None:
                raise InputError(f"Expected an image in column {column}, got None in row {row + 1} of {place}.")
            if image.mode.startswith(("I", "F")):
                raise InputError(
                    f"Expected images of 8 bits, got mode {image.mode} in row {row + 1} of {place}, whose values would "
                    "be cut at 255: save it with 8 bits per channel."
                )
        self.gold(rows, place)

    @override
    def encode(self, rows: Dataset) -> Dataset:
        images, gold = rows.select_columns([*self.task.columns]), self.gold(rows)
        return images.add_column("labels", gold).add_column(REFERENCE, gold)

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        import torch

        images = [row[self.task.columns[0]].convert("RGB") for row in rows]
        labels = torch.tensor([row["labels"] for row in rows])
        return {"pixel_values": self.tokenizer(images, return_tensors="pt")["pixel_values"], "labels": labels}


class Regression(Kind):
    """One finite number per text or pair of texts, trained with squared error."""

    head = "AutoModelForSequenceClassification"
    metrics = ("pearson", "spearman")
    one_number_per_row = True
    config: ClassVar[Mapping[str, Any]] = {"num_labels": 1, "problem_type": "regression"}

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        return converted(self.labels_in(rows), number_of, f"finite numbers in column {self.task.label}", place)

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        return output.logits.float().flatten().cpu().tolist()

    @override
    def trivial(self, references: Sequence[Any]) -> tuple[str, Any]:
        return "mean of train", fmean(references)


class Tokens(Kind):
    """One class per word, on its first sub-word. Other sub-words and special tokens have no label.

    The model does not see words beyond ``max_length`` or words without sub-words. Their prediction is ``O``, so their
    entities count as missed; if ``O`` is not a label, it is wrong. Rows with no visible word are not trained on.
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
                values, expected = column_of(rows, column), f"a list in column {column}"
                converted(
                    values, lambda value: value if isinstance(value, list) else None, expected, places[name], NO_LISTS
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
                    f"Expected one label in column {label} per word in column {column}, and at least one word, "
                    f"got {len(words)} words and {len(tags)} labels in row {row} of {place}."
                )
        self.gold(rows, place)

    @override
    def label_warnings(self, rows: Dataset) -> Iterable[str]:
        return absent_classes(self.task.labels, chain.from_iterable(self.gold(rows)))

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        classes, gold = Classes(self.task.labels, numbered=self.task.numbered), []
        for row, tags in enumerate(named_labels(rows, self.task.label, place), 1):
            gold.append([classes.number(tag) for tag in tags])
            if None in gold[-1]:
                strange = tags[gold[-1].index(None)]
                raise InputError(f"Expected labels {classes}, got {strange!r} in row {row} of {place}.")
        return gold

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
            # Only the first sub-word of a word stands for it.
            words = [word if word != last else None for last, word in pairwise([None, *encoded.word_ids(number)])]
            labels.append([IGNORED if word is None else tags[word] for word in words])
            references.append({"labels": tags, "words": [word for word in words if word is not None]})
        return {**encoded, "labels": labels, REFERENCE: references}

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        predicted, labelled = output.logits.argmax(-1).cpu(), (batch["labels"] != IGNORED).cpu()
        return [row[mask].tolist() for row, mask in zip(predicted, labelled, strict=True)]

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        names = self.task.labels
        predicted = [OUTSIDE] * len(reference["labels"])
        for word, number in zip(reference["words"], answer, strict=True):
            predicted[word] = names[self._task_class(number)]
        return {"label": [names[number] for number in reference["labels"]], "prediction": predicted}
