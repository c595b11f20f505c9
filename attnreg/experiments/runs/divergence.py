"""Noticing that training has diverged, before a checkpoint of it takes the place of a good one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from attnreg.errors import StoppedError
from attnreg.experiments.runs.folder import RunFolder
from attnreg.training.method import StepResult, TrainingMethod

EVERY = 10


class DivergenceCheck:
    """Looks at what steps report ten at a time, so that a fast device is not asked for a number at every step.

    Args:
        method: whose steps they are.
        folder: of the run; its last good checkpoint is named in the message.
    """

    def __init__(self, method: TrainingMethod, folder: RunFolder) -> None:
        self._method = method
        self._folder = folder
        self._reports: list[tuple[int, Mapping[str, Tensor | float]]] = []

    def note(self, step: int, result: StepResult) -> None:
        """Add a step.

        Raises:
            StoppedError: if one of the last ten has reported a loss, or another number, that is not finite.
        """
        self._reports.append((step, {"loss": result.loss, **result.logs}))
        if len(self._reports) == EVERY:
            self._check_reports()

    def check(self, step: int) -> None:
        """Look at the steps noted since the last time, and at the weights.

        Raises:
            StoppedError: if anything is not finite.
        """
        self._check_reports()
        provider = self._method.provider
        for network in (*self._method.learners, *(() if provider is None else (provider,))):
            for name, weight in network.named_parameters():
                if not bool(weight.detach().isfinite().all()):
                    raise self._error(step, f"weights, got others in {name}")

    def _check_reports(self) -> None:
        for step, values in self._reports:
            for name, value in values.items():
                if not math.isfinite(value):
                    raise self._error(step, f"{name.replace('_', ' ')}, got {float(value)}")
        self._reports.clear()

    def _error(self, step: int, what: str) -> StoppedError:
        return StoppedError(
            f"Expected finite {what} at step {step}: training has diverged, so start it anew with a lower "
            f"--learning-rate. {self._folder.last_good()}"
        )
