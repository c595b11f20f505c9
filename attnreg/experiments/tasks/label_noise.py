"""Give training rows wrong labels, to study what a model does with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnreg.experiments.tasks.kinds.kind import REFERENCE

if TYPE_CHECKING:
    from datasets import Dataset


def mislabel(rows: Dataset, share: float, classes: int, seed: int) -> tuple[Dataset, dict[int, int]]:
    """Give a share of encoded rows a wrong label, uniformly among the other classes.

    Args:
        rows: encoded rows with one class each.
        share: share of the rows, in ``[0, 1]``; the number of rows is rounded.
        classes: number of classes.
        seed: seed of the draw.

    Returns:
        the rows, and the true label of each wrong row by its number, in order.

    Example:
        >>> from datasets import Dataset
        >>> rows = Dataset.from_dict({"labels": [0, 1, 0, 1], "reference": [0, 1, 0, 1]})
        >>> noisy, truth = mislabel(rows, 0.5, classes=2, seed=0)
        >>> [noisy["labels"][number] != label for number, label in truth.items()]
        [True, True]
    """
    draw = np.random.default_rng(seed)
    labels = np.array(rows["labels"][:])
    wrong = np.sort(draw.permutation(len(labels))[: round(share * len(labels))])
    truth = {int(number): int(labels[number]) for number in wrong}
    labels[wrong] = (labels[wrong] + draw.integers(1, classes, len(wrong))) % classes

    def relabelled(_: object, number: int) -> dict[str, int]:
        return {"labels": int(labels[number]), REFERENCE: int(labels[number])}

    return rows.map(relabelled, with_indices=True, keep_in_memory=True), truth
