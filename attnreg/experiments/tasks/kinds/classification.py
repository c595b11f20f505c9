"""Classification of texts or pairs of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import Classes, class_names, column_of, converted
from attnreg.experiments.tasks.kinds.kind import Kind, Record, absent_classes
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn


class Classification(Kind):
    """One class per row, labelled by name or number."""

    head = "AutoModelForSequenceClassification"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "f1", "macro_f1", "matthews_correlation")
    has_classes = True
    one_class_per_row = True

    @classmethod
    @override
    def label_names(cls, task: Task, splits: Mapping[str, Dataset], where: Any) -> tuple[str, ...]:
        labels = super().label_names(task, splits, where)
        if "f1" in task.metrics and len(labels) != 2:
            raise InputError(
                f"Metric f1 needs two classes, got {len(labels)} in column {task.label} of {where}: use "
                "--metric macro_f1."
            )
        return labels

    @classmethod
    @override
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        classes = Classes(task.labels, class_names(rows, task.label))
        return converted(column_of(rows, task.label), classes.number, f"labels {classes}", place)

    @override
    def label_warnings(self, rows: Dataset) -> list[str]:
        return absent_classes(self.task.labels, self.gold(self.task, rows))

    @classmethod
    @override
    def head_options(cls, task: Task) -> dict[str, Any]:
        # Always set, to override the problem type that a model from another task brings along.
        return {**super().head_options(task), "problem_type": "single_label_classification"}

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        return output.logits.float().cpu().tolist()

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        best = max(range(len(answer)), key=answer.__getitem__)
        return {"label": reference, "prediction": self._read(best), "logits": answer}

    @override
    def trivial(self, references: Sequence[Any]) -> tuple[str, Any]:
        counts = Counter(references)
        return "majority class", min(counts, key=lambda label: (-counts[label], label))

    @override
    def calibration_error(self, records: Iterable[Record]) -> float | None:
        if self.reading is not None:
            return None
        import torch

        from attnreg.experiments.tasks.metrics import calibration_error

        kept = list(records)
        logits = torch.tensor([record["logits"] for record in kept])
        return calibration_error(logits.softmax(-1), torch.tensor([record["label"] for record in kept]))
