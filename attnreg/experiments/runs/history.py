"""What a run has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """What a run has done so far.

    Args:
        epoch: the epoch that is running, from 0; the number of epochs when all are done.
        batch: how many of its batches are done.
        step: optimizer steps done.
        seconds: time spent in training steps and evaluations.
        training_seconds: time spent on training alone, without evaluations and checkpoints.
        peak_memory: bytes; see :func:`attnreg.experiments.runs.outcome.peak_memory`.
        forward_rows: rows that went forward through the networks in training steps.
        backward_rows: rows whose gradients went back.
        evaluations: one record per network and epoch.
        drop_rates: drop rate per attention site, mean over the steps in which the provider was active.
        active_steps: number of those steps.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    peak_memory: int = 0
    forward_rows: int = 0
    backward_rows: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    drop_rates: dict[str, float] = field(default_factory=dict)
    active_steps: int = 0

    def of(self, network: str) -> list[dict[str, Any]]:
        """The evaluations of one network, in order."""
        return [record for record in self.evaluations if record["network"] == network]

    def best(self, metric: str, network: str) -> dict[str, Any]:
        """The evaluation of a network with the best score, the first of equals."""
        return max(self.of(network), key=lambda record: record[metric])
