"""The files that the server of the GLUE benchmark takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnreg.errors import UsageError
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset

FILES = {
    "cola": {"test": "CoLA.tsv"}, "sst2": {"test": "SST-2.tsv"}, "mrpc": {"test": "MRPC.tsv"},
    "qqp": {"test": "QQP.tsv"}, "stsb": {"test": "STS-B.tsv"},
    "mnli": {"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
    "qnli": {"test": "QNLI.tsv"}, "rte": {"test": "RTE.tsv"}, "wnli": {"test": "WNLI.tsv"},
}  # fmt: skip
_BY_NAME = {"mnli", "qnli", "rte"}  # their classes are submitted as names, those of the others as numbers
_RANGE = (0.0, 5.0)  # of the scores of STS-B


def submission_files(task: str) -> dict[str, str]:
    """Return the name of the file for each test split of a GLUE task."""
    if task not in FILES:
        raise UsageError(f"--submission is for the tasks of GLUE, {', '.join(FILES)}: remove it for {task}.")
    return FILES[task]


def submission(task: Task, rows: Dataset, predictions: Sequence[Any]) -> str:
    """Return the content of a file: the index and the prediction, a class number or a score, of each row.

    The index is the column ``idx`` of the rows if it counts from 0, otherwise the row's number.
    """
    index = list(range(len(rows)))
    if "idx" in rows.column_names and sorted(rows["idx"][:], key=str) == sorted(index, key=str):
        index = rows["idx"][:]
    lines = sorted(zip(index, (_written(task, one) for one in predictions), strict=True))
    return "".join(f"{number}\t{text}\n" for number, text in [("index", "prediction"), *lines])


def _written(task: Task, prediction: Any) -> str:
    if not task.labels:  # a score
        return f"{min(max(prediction, _RANGE[0]), _RANGE[1]):.3f}"
    return task.labels[prediction] if task.name in _BY_NAME else str(prediction)
