"""Measure training: losses and drop rates over steps, and whether it diverges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from attnreg.errors import StoppedError
from attnreg.experiments.folder.run_folder import DIVERGED
from attnreg.injection.running.rates import Sums, added
from attnreg.training.method import StepResult

EVERY = 10
Values = dict[str, Tensor]


class Telemetry:
    """Log means over ten steps, because reading numbers at every step would slow a GPU down; with an event, at once.

    ``over_processes`` averages a drop rate over processes; losses are already averaged. ``last_good`` returns
    a sentence on the last checkpoint, for the error of a loss that is not finite.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        over_processes: Callable[[Tensor], Tensor] = lambda rate: rate,
        last_good: Callable[[], str] = str,
    ) -> None:
        self._callbacks = write, over_processes, last_good
        self._steps: list[tuple[int, Values]] = []  # since the last line: number, losses
        self._rates: Sums = {}  # since the last line
        self._run: dict[str, list[float]] = {}  # by site: sum of drop rates, number of steps
        self._epoch: dict[str, list[float]] = {}
        self.written = 0
        self.latest: dict[str, float] = {}
        self.drop_rates: dict[str, float] = {}
        self.event_counts: dict[str, int] = {}

    def note(self, step: int, result: StepResult, drop_rates: Mapping[str, Tensor]) -> None:
        """Add one step."""
        self._steps.append((step, _tensors({"loss": result.loss, **result.logs})))
        self._rates = added(self._rates, _tensors(drop_rates))
        for key in (f"{name}: {event}" for name, event in result.events.items()):
            self.event_counts[key] = self.event_counts.get(key, 0) + 1
        if step % EVERY == 0 or result.events:
            self.flush(step, result.events)

    def flush(self, step: int, events: Mapping[str, str] | None = None) -> None:
        """Write the means over the steps since the last line."""
        if not self._steps:
            return
        self.check(step)
        write, over_processes, _ = self._callbacks
        losses = functools.reduce(added, (losses for _, losses in self._steps), Sums())
        self.latest = {name: float(total / count) for name, (total, count) in losses.items()}
        self.drop_rates = {}
        for site, (rate_sum, count) in self._rates.items():
            self.drop_rates[site] = rate = float(over_processes(rate_sum / count))
            for sums in (self._run, self._epoch):
                total, steps = sums.get(site, (0.0, 0))
                sums[site] = [total + rate * count, steps + count]
        self.written += 1
        write({"step": step, **self.latest, "drop_rate": self.drop_rates, **(events or {})})
        self._steps, self._rates = [], {}

    def check(self, step: int, networks: Iterable[nn.Module] = ()) -> None:
        """Raise if a loss since the last line, or now a parameter of a network, is not finite."""
        for number, losses in self._steps:
            self.check_losses(losses, number)
        for name, weight in (pair for network in networks for pair in network.named_parameters()):
            if not bool(weight.detach().isfinite().all()):
                raise self._diverged(f"parameter {name} is not finite", step)

    def check_losses(self, losses: Mapping[str, float | Tensor], step: int) -> None:
        """Raise if a loss of a step, or of an evaluation after it, is not finite."""
        for name, value in losses.items():
            if not isfinite(value):
                raise self._diverged(f"the {name.replace('_', ' ')} is {float(value)}", step)

    def _diverged(self, fault: str, step: int) -> StoppedError:
        advice = "Start again with a lower --learning-rate."
        return StoppedError(f"{DIVERGED}: {fault} at step {step}. {advice} {self._callbacks[2]()}")

    def end_epoch(self) -> dict[str, float]:
        """End an epoch and return its drop rate per site; empty if the provider was not active."""
        sums, self._epoch = self._epoch, {}
        return {site: total / count for site, (total, count) in sums.items()}

    def mean_drop_rates(self) -> dict[str, float]:
        """Return the drop rate per site (``"<stack>.<layer>"``), the mean over all steps with an active provider."""
        return {site: total / count for site, (total, count) in self._run.items()}

    def active_steps(self) -> int:
        """Return the number of steps in which the provider was active."""
        return max((int(count) for _, count in self._run.values()), default=0)

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume."""
        return {name: value for name, value in vars(self).items() if name != "_callbacks"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        vars(self).update(state)


def _tensors(values: Mapping[str, Tensor | float]) -> Values:
    return {name: torch.as_tensor(value, dtype=torch.float32).detach().clone() for name, value in values.items()}
