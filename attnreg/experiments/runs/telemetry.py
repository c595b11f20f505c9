"""Measure training: losses, drop rates and passes over steps, and whether it diverges."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, nn

from attnreg.errors import StoppedError
from attnreg.experiments.folder.writer import RunFolder
from attnreg.training.method import StepResult, TrainingMethod

EVERY = 10


class Telemetry:
    """Log means over ten steps, because reading numbers at each step would slow a GPU down.

    A step with an event, such as the end of a round, writes a line at once. ``over_processes`` averages a drop rate
    over processes; losses are already averaged.
    """

    def __init__(
        self, write: Callable[[dict[str, Any]], None], over_processes: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._write = write
        self._over_processes = over_processes or (lambda rate: rate)
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._run: dict[str, list[float]] = {}  # by site: sum of drop rates, number of steps
        self._epoch: dict[str, list[float]] = {}
        self.written = 0
        self.latest: dict[str, float] = {}
        self.drop_rates: dict[str, float] = {}
        self.event_counts: Counter[str] = Counter()

    def note(self, step: int, result: StepResult, drop_rates: Mapping[str, Tensor]) -> None:
        """Add one step. Drop rates are 0-d, or ``(H,)`` where masks differ by head."""
        values = {"loss": result.loss, **result.logs, **{f"drop/{k}": v for k, v in drop_rates.items()}}
        for name, value in values.items():
            value = value.detach().float() if isinstance(value, Tensor) else torch.tensor(float(value))
            self._sums[name] = self._sums[name].to(value.device) + value if name in self._sums else value
        self._counts.update(values.keys())
        self.event_counts.update(f"{name}: {event}" for name, event in result.events.items())
        if step % EVERY == 0 or result.events:
            self.flush(step, result.events)

    def flush(self, step: int, events: Mapping[str, str] | None = None) -> None:
        """Write the means over the steps since the last line."""
        if not self._sums:
            return
        logs: dict[str, float] = {}
        rates: dict[str, float] = {}
        by_head: dict[str, list[float]] = {}
        for name, total in self._sums.items():
            mean = total / self._counts[name]
            if not name.startswith("drop/"):
                logs[name] = float(mean)
                continue
            site = name[5:]
            rates[site] = float(self._over_processes(mean.mean()))  # rates by head stay those of this process
            if mean.dim():
                by_head[site] = mean.tolist()
            for sums in (self._run, self._epoch):
                held = sums.setdefault(site, [0.0, 0])
                held[0] += rates[site] * self._counts[name]
                held[1] += self._counts[name]
        self.latest, self.drop_rates = logs, rates
        self.written += 1
        heads = {"drop_rate_by_head": by_head} if by_head else {}
        self._write({"step": step, **logs, "drop_rate": rates, **(events or {}), **heads})
        self._sums, self._counts = {}, Counter()

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
        return {name: value for name, value in vars(self).items() if name not in ("_write", "_over_processes")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        vars(self).update(state)
        self._counts, self.event_counts = Counter(self._counts), Counter(self.event_counts)


class PassCounter:
    """Count the rows that go forward and backward through networks.

    A row counts once for each forward pass that returns logits, and once for each backward pass through them or the
    loss, with or without weight gradients. A plain training step counts each row once forward and once backward.
    """

    def __init__(self, forward: int = 0, backward: int = 0) -> None:
        self.forward, self.backward = forward, backward

    @contextmanager
    def counting(self, networks: Iterable[nn.Module]) -> Iterator[None]:
        """Count the passes of these networks within the block."""
        with ExitStack() as hooks:
            for network in networks:
                hooks.enter_context(network.register_forward_hook(self._forward))
            yield

    def _forward(self, network: nn.Module, args: Any, output: Any) -> None:
        logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
        if not isinstance(logits, Tensor):
            return
        rows = len(logits)
        self.forward += rows
        # A gradient may arrive through the loss, the logits, or both in turn: under mixed precision the returned logits
        # are a copy, and the loss is computed from the originals.
        seen = {"loss": 0, "logits": 0}

        def count(way: str, gradient: Tensor) -> None:
            before = max(seen.values())
            seen[way] += 1
            self.backward += rows * (max(seen.values()) - before)

        for way, tensor in (("loss", loss), ("logits", logits)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(count, way))


class DivergenceCheck:
    """Raise an error that names the last checkpoint when losses or weights of a method are not finite.

    Losses are checked every ten steps, because reading them at each step would slow a GPU down.
    """

    def __init__(self, method: TrainingMethod, folder: RunFolder) -> None:
        self._method, self._folder = method, folder
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
                if not isfinite(value):
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
    means, done = [], 0
    for record in evaluations:
        new = [line for line in lines if done < line["step"] <= record["step"]]
        lengths = [after - before for before, after in pairwise([done, *(line["step"] for line in new)])]
        pairs = [(line["loss"], steps) for line, steps in zip(new, lengths, strict=True) if "loss" in line]
        if pairs:
            means.append((sum(map(prod, pairs)) / sum(steps for _, steps in pairs), record["epoch"]))
        done = record["step"]
    if len(means) < 3 or any(mean <= means[0][0] for mean, _ in means[1:]):
        return None
    (first, begin), (last, end) = means[0], means[-1]
    return (
        f"Warning: the training loss grew from {first:.4f} (mean up to epoch {begin}) to {last:.4f} (up to epoch "
        f"{end}): lower --learning-rate, unless the regularizer became stronger."
    )
