"""Detect training that diverges, before its checkpoint replaces a good one, and losses that grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attnreg.errors import StoppedError
from attnreg.experiments.folder.writer import RunFolder
from attnreg.training.method import StepResult, TrainingMethod

EVERY = 10


class DivergenceCheck:
    """Raise an error that names the last checkpoint when losses or weights of a method are not finite.

    Losses are checked every ten steps, because reading them at each step would slow a GPU down.
    """

    def __init__(self, method: TrainingMethod, folder: RunFolder) -> None:
        self._method = method
        self._folder = folder
        self._reports: list[tuple[int, Mapping[str, Tensor | float]]] = []

    def note(self, step: int, result: StepResult) -> None:
        """Record a step, and check the last ten when there are ten."""
        self._reports.append((step, {"loss": result.loss, **result.logs}))
        if len(self._reports) == EVERY:
            self._check_reports()

    def check(self, step: int) -> None:
        """Check the steps since the last check, and all weights."""
        self._check_reports()
        provider = self._method.provider
        for network in (*self._method.learners, *(() if provider is None else (provider,))):
            for name, weight in network.named_parameters():
                if not bool(weight.detach().isfinite().all()):
                    raise self._error(step, f"parameter {name} is not finite")

    def _check_reports(self) -> None:
        for step, values in self._reports:
            for name, value in values.items():
                if not math.isfinite(value):
                    raise self._error(step, f"the {name.replace('_', ' ')} is {float(value)}")
        self._reports.clear()

    def _error(self, step: int, what: str) -> StoppedError:
        return StoppedError(
            f"Training diverged: {what} at step {step}. Start again with a lower --learning-rate. "
            f"{self._folder.last_good()}"
        )


def growing_loss(lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if the mean training loss was never again as low as before the first evaluation.

    Fewer than three evaluations give none, nor does a regularizer that acts in some epochs only. Lines are those of
    ``telemetry.jsonl``, whose ``loss`` is the mean over the steps since the last line.
    """
    if len({bool(record["drop_rate"]) for record in evaluations if "drop_rate" in record}) > 1:
        return None
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
    if len(means) < 3 or any(mean <= means[0][0] for mean, _ in means[1:]):
        return None
    (first, begin), (last, end) = means[0], means[-1]
    return (
        f"Warning: the training loss grew from {first:.4f} (mean up to epoch {begin}) to {last:.4f} (up to epoch "
        f"{end}): lower --learning-rate, unless the regularizer became stronger."
    )
