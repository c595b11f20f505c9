"""Classification of texts or pairs of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mode
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import Classes, class_names, converted
from attnreg.experiments.tasks.kinds.kind import Kind, Record, Splits, absent_classes

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn


class Classification(Kind):
    """One class per row, labelled by name or number."""

    head = "AutoModelForSequenceClassification"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "f1", "macro_f1", "matthews_correlation")
    has_classes = True
    one_class_per_row = True
    # Always set, to override the problem type that a model from another task brings along.
    config: ClassVar[Mapping[str, Any]] = {"problem_type": "single_label_classification"}

    @override
    def label_names(self, splits: Splits, where: Any) -> tuple[str, ...]:
        labels = super().label_names(splits, where)
        if "f1" in self.task.metrics and len(labels) != 2:
            raise InputError(
                f"Metric f1 needs two classes, got {len(labels)} in column {self.task.label} of {where}: use "
                "--metric macro_f1."
            )
        return labels

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        classes = Classes(self.task.labels, class_names(rows, self.task.label))
        return converted(self.labels_in(rows), classes.number, f"labels {classes}", place)

    @override
    def label_warnings(self, rows: Dataset) -> Iterable[str]:
        return absent_classes(self.task.labels, self.gold(rows))

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        return output.logits.float().cpu().tolist()

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        best = max(range(len(answer)), key=answer.__getitem__)
        return {"label": reference, "prediction": self._read(best), "logits": answer}

    @override
    def trivial(self, references: Sequence[Any]) -> tuple[str, Any]:
        return "majority class", mode(sorted(references))  # the first, in a tie

    @override
    def calibration_error(self, records: Iterable[Record]) -> float | None:
        import torch

        from attnreg.experiments.tasks.metrics import calibration_error

        logits, labels = zip(*((record["logits"], record["label"]) for record in records), strict=True)
        return calibration_error(torch.tensor(logits).softmax(-1), torch.tensor(labels))
