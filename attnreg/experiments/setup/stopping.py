"""The network that a run returns, and when ``--patience`` stops the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from attnreg.experiments.folder.history import Record, best_of
from attnreg.sharding import load_whole_state, whole_state

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
        """Whether the network that was just evaluated is the one to return so far; keep the weights of a best one."""
        is_returned = self.returned(records) is records[-1]
        if is_returned and self.returns_best:
            weights = whole_state(network, network)
            self.weights = {name: value.detach().cpu().clone() for name, value in weights.items()}
        return is_returned

    def give_back(self, network: nn.Module) -> None:
        """Give a network the weights of the best evaluation, if that is the one to return."""
        if self.returns_best:
            load_whole_state(network, network, self.weights)


def biased(scored_on: str) -> str:
    """Return the warning for ``--stop-on dev``."""
    return f"Warning: --stop-on dev chooses the epoch by its {scored_on} score, so this score is biased upward."
