"""The history of a run: its progress, times and evaluations, and the network that it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # comparisons read histories, and do not wait for torch
    from torch import Tensor, nn

Record = Mapping[str, Any]
COLLAPSED = "Collapsed: {} predicts the same class for all scored rows"


@dataclass
class History:
    """The progress, times and evaluations of a run so far."""

    epoch: int = 0  #: the current epoch, from 0; the number of epochs once training has finished.
    batch: int = 0  #: number of finished batches in the current epoch.
    step: int = 0  #: number of optimizer steps so far.
    seconds: float = 0.0  #: time of training and evaluation, including the time before a resume.
    training_seconds: float = 0.0  #: time of training steps only, and of fitting a linear head before them.
    #: CPU time of the same work, which other programs hardly change.
    training_cpu_seconds: float = 0.0
    peak_memory: int = 0  #: in bytes; see :func:`attnreg.experiments.setup.device.peak_memory`.
    evaluations: list[dict[str, Any]] = field(default_factory=list)  #: one record per network and epoch.
    # The fields below are known once training has finished.
    #: drop rate per attention site, mean over the steps in which the provider was active.
    drop_rates: dict[str, float] = field(default_factory=dict)
    active_steps: int = 0  #: number of steps in which the provider was active.
    #: how often an event happened, by event, such as ``"winner: attacker"``.
    events: dict[str, int] = field(default_factory=dict)
    returned: str = ""  #: name of the network that is returned.
    collapsed: bool = False  #: whether the returned network predicts the same class for all scored rows.
    trivial: dict[str, Any] | None = None  #: scores of a predictor that ignores its input; ``None`` if there is none.

    def of(self, network: str) -> list[dict[str, Any]]:
        """Return the evaluations of one network, in order."""
        return [record for record in self.evaluations if record["network"] == network]


def best_of(records: Sequence[Record], key: str) -> Record:
    """Return the record with the best score, the earliest one in a tie; NaN is the worst score."""
    return max(records, key=lambda record: rank(record[key]))


def rank(score: float) -> float:
    """Return a score for comparisons; NaN, such as a correlation of constants, counts as the lowest."""
    return -math.inf if math.isnan(score) else score


def training_losses(lines: Sequence[Record], evaluations: Sequence[Record]) -> list[float | None]:
    """Return the mean training loss of the steps from one evaluation to the next; ``None`` where none was logged.

    The lines are of ``telemetry.jsonl``, whose ``loss`` is the mean over the steps since the last line.
    """
    spans = zip(pairwise([0, *(line["step"] for line in lines)]), lines, strict=True)
    logged = [(end, line["loss"], end - begin) for (begin, end), line in spans if "loss" in line]
    means: list[float | None] = []
    for begin, end in pairwise([0, *(record["step"] for record in evaluations)]):
        inside = [(loss, steps) for step, loss, steps in logged if begin < step <= end]
        means.append(sum(map(math.prod, inside)) / sum(steps for _, steps in inside) if inside else None)
    return means


def collapsed(records: Sequence[Record]) -> bool:
    """Whether a network predicts the same class for all rows, although their labels differ."""
    labels, predictions = ([record[name] for record in records] for name in ("label", "prediction"))
    return {*map(type, labels + predictions)} == {int} and len({*predictions}) == 1 < len({*labels})


STOPPING = "stopping"  # the rows held out for --patience, among the evaluated sets


@dataclass
class Selection:
    """Chooses the network to return; with patience, decides when to stop."""

    key: str  #: key of the score in the records of :attr:`attnreg.experiments.History.evaluations`.
    patience: int | None = None  #: evaluations in a row without a better score that end the run; ``None``: never.
    returns_best: bool = False  #: whether the network of the best evaluation is returned, and not the last one.
    weights: dict[str, Tensor] = field(default_factory=dict)  #: of the best network so far, if it is returned.

    def is_over(self, records: Sequence[Record]) -> bool:
        """Whether the run is to stop after these evaluations."""
        if not records or self.patience is None:
            return False
        return len(records) - list(records).index(best_of(records, self.key)) > self.patience

    def returned(self, records: Sequence[Record]) -> Record:
        """Return the record of the network to return, of the evaluations so far."""
        return best_of(records, self.key) if self.returns_best else records[-1]

    def note(self, records: Sequence[Record], network: nn.Module) -> bool:
        """Whether the network of the last record is the one to return so far; if it is the best, keep its weights."""
        is_returned = self.returned(records) is records[-1]
        if is_returned and self.returns_best:
            from attnreg.sharding import whole_state  # late: it imports torch

            weights = whole_state(network, network)
            self.weights = {name: value.detach().cpu().clone() for name, value in weights.items()}
        return is_returned

    def give_back(self, network: nn.Module) -> None:
        """Give a network the weights of the best evaluation, if that is the one to return."""
        if self.returns_best:
            from attnreg.sharding import load_whole_state  # late: it imports torch

            load_whole_state(network, network, self.weights)


def biased(scored_on: str) -> str:
    """Return the warning for ``--stop-on dev``."""
    return f"Warning: --stop-on dev chooses the epoch by its {scored_on} score, so this score is biased upward."
