"""Look at the training loss of a finished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def growing_loss(lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if the mean training loss was never again as low as before the first evaluation.

    Args:
        lines: the lines of ``telemetry.jsonl``: ``step``, and ``loss``, the mean over the steps since the last line.
        evaluations: the evaluations of the returned network, with ``epoch`` and ``step``.

    Example:
        >>> lines = [{"step": 10, "loss": 0.7}, {"step": 20, "loss": 0.9}]
        >>> growing_loss(lines, [{"epoch": 1, "step": 10}, {"epoch": 2, "step": 20}])
        'Warning: the training loss grew from 0.7000 (mean up to epoch 1) to 0.9000 (up to epoch 2): lower ...'
    """
    sums = [[0.0, 0] for _ in evaluations]
    before = 0
    for line in lines:
        part = next((i for i, record in enumerate(evaluations) if line["step"] <= record["step"]), None)
        if part is not None and "loss" in line:
            sums[part][0] += line["loss"] * (line["step"] - before)
            sums[part][1] += line["step"] - before
        before = line["step"]
    pairs = zip(sums, evaluations, strict=True)
    means = [(total / steps, record["epoch"]) for (total, steps), record in pairs if steps]
    if len(means) < 2 or any(mean <= means[0][0] for mean, _ in means[1:]):
        return None
    (first, begin), (last, end) = means[0], means[-1]
    return (
        f"Warning: the training loss grew from {first:.4f} (mean up to epoch {begin}) to {last:.4f} (up to epoch "
        f"{end}): lower --learning-rate, unless the regularizer became stronger."
    )
