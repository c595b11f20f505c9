"""Drop rates and what else a method reports, over steps, in ``telemetry.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnreg.training.folder import RunFolder
from attnreg.training.method import StepResult

EVERY = 10


class Telemetry:
    """Means over ten steps at a time, so that a fast device is not asked for numbers at every step.

    Args:
        folder: where the lines go.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._total: dict[str, float] = {}
        self._epoch: list[dict[str, float]] = []
        self._lines = 0
        self.written = 0
        self.latest: dict[str, float] = {}
        self.events: dict[str, str] = {}
        self.event_counts: dict[str, int] = {}

    def note(self, step: int, result: StepResult, drop_rates: Mapping[str, Tensor]) -> None:
        """Add one step."""
        values = {"loss": result.loss, **result.logs, **{f"drop/{k}": v for k, v in drop_rates.items()}}
        for name, value in values.items():
            value = value.detach().float() if isinstance(value, Tensor) else torch.tensor(float(value))
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1
        for name, event in result.events.items():
            self.events[name] = event
            key = f"{name}: {event}"
            self.event_counts[key] = self.event_counts.get(key, 0) + 1
        if step % EVERY == 0:
            self.flush(step)

    def flush(self, step: int) -> None:
        """Write the means of the steps since the last time."""
        if not self._sums:
            return
        self.latest = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        rates = {name[5:]: value for name, value in self.latest.items() if name.startswith("drop/")}
        for name, value in rates.items():
            self._total[name] = self._total.get(name, 0.0) + value
        if rates:
            self._lines += 1
            self._epoch.append(rates)
        logs = {name: value for name, value in self.latest.items() if not name.startswith("drop/")}
        self.written += 1
        self._folder.append("telemetry", {"step": step, **logs, "drop_rate": rates, **self.events})
        self._sums, self._counts = {}, {}

    def end_epoch(self) -> dict[str, float]:
        """Drop rate per site over the epoch that ends; empty if its provider was not active."""
        lines, self._epoch = self._epoch, []
        return {name: sum(line[name] for line in lines) / len(lines) for name in (lines[0] if lines else ())}

    def mean_drop_rates(self) -> dict[str, float]:
        """Drop rate per site over the run so far, while its provider was active, by ``"<stack>.<layer>"``."""
        return {name: total / self._lines for name, total in self._total.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs."""
        return {name: value for name, value in vars(self).items() if name != "_folder"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        vars(self).update(state)
