"""Show the progress of a run in the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from attnreg.experiments.folder.history import History
from attnreg.experiments.results.document import say
from attnreg.experiments.results.report import that_drop
from attnreg.experiments.runs.telemetry import Telemetry
from attnreg.experiments.setup.setup import Setup
from attnreg.experiments.setup.stopping import STOPPING


class Progress:
    """Show a progress bar with loss, metric, drop rate and wins below it, and print a line for each evaluation."""

    def __init__(self, run: Setup, history: History) -> None:
        self._run = run
        self._console = Console(quiet=not run.folder.writer)
        self._bar = Bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._state = Text(no_wrap=True, overflow="ellipsis")
        self.shown = Live(Group(self._bar, self._state), console=self._console, transient=True)
        self._task = self._bar.add_task(run.settings.recipe, total=run.total_steps, completed=history.step)
        self._metrics: dict[str, float] = {}
        self._history, self._began = history, history.step
        self._clock = time.monotonic()

    def step(self, history: History, telemetry: Telemetry) -> None:
        """Update the bar after a training step."""
        shown = [f"loss {telemetry.latest['loss']:.3f}"] if "loss" in telemetry.latest else []
        if rates := that_drop(telemetry.drop_rates):
            shown.append(f"drop {fmean(rates):.2f}")
        if wins := sorted((key.split(": ")[1], count) for key, count in telemetry.event_counts.items()):
            shown.append("wins " + " ".join(f"{name} {count}" for name, count in wins))
        if self._metrics:
            scores = " ".join(f"{name} {value:.3f}" for name, value in self._metrics.items())
            shown.append(f"{self._run.scored_on} {scores}")
        description = f"{self._run.settings.recipe} epoch {history.epoch + 1}/{self._run.epochs}"
        self._bar.update(self._task, completed=history.step, description=description)
        self._state.plain = "  ".join(shown)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Print a line about an evaluation."""
        metric = self._run.task.metric
        self._metrics[record["network"]] = record[metric]
        dropped = ""
        if "drop_rate" in record:
            rates = that_drop(record["drop_rate"])
            dropped = f"  drop rate {fmean(rates):.3f}" if rates else "  nothing dropped"
        key = f"{STOPPING}_{metric}"
        held_out = f"  on stopping rows {record[key]:.4f}" if key in record else ""
        text = (
            f"epoch {record['epoch']}/{self._run.epochs}  {record['network']:<9} {self._run.scored_on} loss "
            f"{record['loss']:.4f}  {metric} {record[metric]:.4f}{held_out}{dropped}{self._left()}"
        )
        say(self._console, text)

    def _left(self) -> str:
        """Estimate the time that is left, where no bar shows it."""
        done, left = self._history.step - self._began, self._run.total_steps - self._history.step
        if self._console.is_terminal or not done or not left:
            return ""
        seconds = (time.monotonic() - self._clock) * left / done
        return f"  about {seconds:.0f} s left" if seconds < 100 else f"  about {seconds / 60:.0f} min left"
