"""The history of a run: its progress, times and evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """The progress, times and evaluations of a run so far.

    Args:
        epoch: the current epoch, from 0; the number of epochs once training has finished.
        batch: number of finished batches in the current epoch.
        step: number of optimizer steps so far.
        seconds: time of training and evaluation, including the time before a resume.
        training_seconds: time of training steps only.
        training_cpu_seconds: CPU time of training steps, which other work on the machine does not change much.
        peak_memory: in bytes; see :func:`attnreg.experiments.setup.device.peak_memory`.
        forward_rows: rows that went forward through the networks in training steps.
        backward_rows: rows whose gradients went backward.
        evaluations: one record per network and epoch.
        drop_rates: drop rate per attention site, mean over the steps in which the provider was active.
        active_steps: number of those steps.
        events: how often each event happened, such as ``"winner: attacker"``.
        returned: name of the network that is returned, once training has finished.
        mislabelled: what became of training rows with a wrong label, once training has finished; ``None`` without any.
        trivial: scores of a predictor that ignores its input, once training has finished; ``None`` if there is none.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    training_cpu_seconds: float = 0.0
    peak_memory: int = 0
    forward_rows: int = 0
    backward_rows: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    drop_rates: dict[str, float] = field(default_factory=dict)
    active_steps: int = 0
    events: dict[str, int] = field(default_factory=dict)
    returned: str = ""
    mislabelled: dict[str, Any] | None = None
    trivial: dict[str, Any] | None = None

    def of(self, network: str) -> list[dict[str, Any]]:
        """Return the evaluations of one network, in order."""
        return [record for record in self.evaluations if record["network"] == network]

    def best(self, metric: str, network: str) -> dict[str, Any]:
        """Return the evaluation with the best score of a network; the earliest one in a tie."""
        return max(self.of(network), key=lambda record: record[metric])
