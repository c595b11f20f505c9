"""Detect diverged training before its checkpoint replaces a good one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from attnreg.errors import StoppedError
from attnreg.experiments.folder.writer import RunFolder
from attnreg.training.method import StepResult, TrainingMethod

EVERY = 10


class DivergenceCheck:
    """Check losses and weights for values that are not finite.

    Losses are checked every ten steps, because reading them at each step would slow a GPU down.

    Args:
        method: the training method to check.
        folder: the run's folder; error messages name its last checkpoint.
    """

    def __init__(self, method: TrainingMethod, folder: RunFolder) -> None:
        self._method = method
        self._folder = folder
        self._reports: list[tuple[int, Mapping[str, Tensor | float]]] = []

    def note(self, step: int, result: StepResult) -> None:
        """Record a step, and check the last ten when there are ten.

        Raises:
            StoppedError: if one of them reported a loss or another number that is not finite.
        """
        self._reports.append((step, {"loss": result.loss, **result.logs}))
        if len(self._reports) == EVERY:
            self._check_reports()

    def check(self, step: int) -> None:
        """Check the steps since the last check, and all weights.

        Raises:
            StoppedError: if a value is not finite.
        """
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
