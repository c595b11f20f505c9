"""The training loop of recipes, and its progress in the terminal."""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NoReturn

from accelerate.utils import gather_object, set_seed
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from attnreg.errors import AsleepWarning, InputError, StoppedError, one_line
from attnreg.experiments.folder.history import STOPPING, History, biased
from attnreg.experiments.results.document import duration, say
from attnreg.experiments.results.evaluation import evaluate_all
from attnreg.experiments.results.outcome import conclude, positive_rates
from attnreg.experiments.runs.stopping import (
    interruptible,
    read_state,
    recover_states,
    rng_state,
    set_rng_state,
    write_state,
)
from attnreg.experiments.runs.telemetry import Telemetry
from attnreg.experiments.setup.device import peak_memory
from attnreg.experiments.setup.setup import Setup
from attnreg.regularizer.abilities import asleep_for, effects
from attnreg.regularizer.saving import to_json
from attnreg.training.method import TrainingMethod, Updater

QUIET = 60.0  # seconds without a line, where no bar is shown


def fit(method: TrainingMethod, run: Setup) -> History:
    """Train, evaluate, keep the model to return and write checkpoints; with ``--resume``, continue from the last one.

    SIGINT (Ctrl-C) and SIGTERM end the run with a checkpoint after the current step.
    """
    accelerator = run.accelerator
    plain = accelerator.num_processes == 1 and accelerator.mixed_precision == "no" and accelerator.device.type == "cpu"
    if method.accelerator is not accelerator and not plain:
        raise InputError(
            f"Expected {type(method).__name__} to be made with accelerator=run.accelerator and to return it as "
            f"`accelerator`, got {method.accelerator}: it would ignore the run's device, precision and processes."
        )
    for name, value in run.method_options.items():
        if getattr(method, name) != value:
            expected = "run.loss_function" if name == "loss_function" else value
            raise InputError(
                f"Expected {type(method).__name__} to be made with {name}={expected} and to return it as `{name}`: it "
                f"would ignore {run.method_flags[name]}."
            )
    if method.provider is not None:
        run.remarks += effects(method.provider)
        to_json(method.provider)  # raises now, and not after the first epoch, if the provider cannot be saved
        if reason := asleep_for(method.provider, run.epochs):
            run.asleep = reason
            warnings.warn(reason, AsleepWarning, stacklevel=2)
    if run.folder.writer:
        for remark in (*run.remarks, *([biased(run.scored_on)] if run.settings.stop_on == "dev" else [])):
            print(remark, file=sys.stderr)
    set_seed(run.settings.seed, device_specific=True)
    run.accelerator.wait_for_everyone()  # all processes must have checked the folder before one writes to it
    loop = _Loop(method, run)
    with run.folder.locked(), run.folder.written(), interruptible() as loop.signals:
        if run.folder.writer:
            run.folder.check(run.settings)  # again: another process may have written since the first check
            recover_states(run.folder.checkpoints)
        run.accelerator.wait_for_everyone()  # until the writing process has recovered the folder
        if run.settings.resume and not run.folder.without_checkpoint_yet:
            loop.restore()
        else:
            if run.settings.resume and run.folder.begun and run.folder.writer:
                print("The run starts over, because it has no checkpoint.", file=sys.stderr)
            run.folder.create(run.settings, run.parameters, run.kind.max_length, run.total_steps)
            loop.history.training_seconds, loop.history.training_cpu_seconds = run.seconds_before or (0.0, 0.0)
            loop.history.seconds = loop.history.training_seconds
        loop.progress = Progress(run, loop.history)
        with run.tracked(), loop.progress.shown:
            while loop.history.epoch < run.epochs and not loop.selection.is_over(loop.records):
                loop.epoch()
        loop.conclude()
        if loop.signals:
            loop.stop()  # the caller must not continue after a signal
    return loop.history


class _Loop:
    """The state of a training loop."""

    progress: Progress
    signals: list[signal.Signals]

    def __init__(self, method: TrainingMethod, run: Setup) -> None:
        self.method, self.run, self.history = method, run, History()
        mean = Updater(accelerator=run.accelerator).mean
        self.telemetry = Telemetry(run.log_telemetry, mean, run.folder.last_good)
        self.selection = run.selection()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The evaluations of the network to return."""
        return self.history.of(self.method.returned_name)

    def epoch(self) -> None:
        """Train for the rest of an epoch, then evaluate and save."""
        run, history, method = self.run, self.history, self.method
        begin = time.perf_counter() - history.seconds
        if not history.batch:
            method.on_epoch(history.epoch)
        clock, cpu = time.perf_counter(), time.process_time()
        for batch in run.train_batches(history.epoch).epoch(history.epoch, skip=history.batch):
            result = method.step(batch)
            history.step += 1
            history.batch += 1
            self.telemetry.note(history.step, result, method.drop_rates())
            now = time.perf_counter()
            history.seconds, history.training_seconds = now - begin, history.training_seconds + now - clock
            history.training_cpu_seconds += time.process_time() - cpu
            self.progress.step(history, self.telemetry)
            stopped = self._is_to_stop()
            if stopped or (run.settings.save_steps and history.step % run.settings.save_steps == 0):
                self._check()
                self.save()
            if stopped:
                self.stop()
            clock, cpu = time.perf_counter(), time.process_time()
        self.telemetry.flush(history.step)  # waits for the device
        history.training_seconds += time.perf_counter() - clock
        self._check()
        drop_rates = self.telemetry.end_epoch()
        last = history.epoch + 1 == run.epochs
        evaluated = last or (history.epoch + 1) % run.settings.evaluate_every == 0
        if evaluated:
            self._evaluate(drop_rates)
        ended = last or self.selection.is_over(self.records)
        history.epoch, history.batch = history.epoch + 1, 0
        history.seconds = time.perf_counter() - begin
        history.peak_memory = max(history.peak_memory, peak_memory() or 0)
        if evaluated and self.selection.note(self.records, method.model) and (self.selection.returns_best or ended):
            run.folder.save_model(method.model, run.tokenizer, method.provider)
        self.save()

    def _evaluate(self, drop_rates: dict[str, float]) -> None:
        run, history = self.run, self.history
        for name, network in self.method.networks.items():
            metrics = evaluate_all(network, run.evaluated, run.kind, run.accelerator)
            losses = {key: value for key, value in metrics.items() if key.endswith("loss")}
            self.telemetry.check_losses(losses, history.step)
            record = {"network": name, "epoch": history.epoch + 1, "step": history.step, **metrics}
            if self.method.provider is not None:
                record["drop_rate"] = drop_rates
            history.evaluations.append(record)
            run.log_evaluation(record)
            self.progress.evaluated(record)

    def conclude(self) -> None:
        """Complete the history and write the results."""
        history, telemetry = self.history, self.telemetry
        self.selection.give_back(self.method.model)
        history.returned = self.method.returned_name
        history.drop_rates, history.active_steps = telemetry.mean_drop_rates(), telemetry.active_steps()
        history.events = dict(telemetry.event_counts)
        conclude(self.method, self.run, history)

    def _check(self) -> None:
        """Raise if training has diverged."""
        provider = [] if self.method.provider is None else [self.method.provider]
        self.telemetry.check(self.history.step, [*self.method.learners, *provider])

    def _is_to_stop(self) -> bool:
        accelerator, is_signalled = self.run.accelerator, bool(self.signals)
        if accelerator.num_processes == 1:
            return is_signalled
        if is_signalled:
            accelerator.set_trigger()
        return accelerator.check_trigger()  # all processes stop after the same step

    def stop(self) -> NoReturn:
        self.run.accelerator.wait_for_everyone()  # a launcher may kill the other processes once one has ended
        number = (self.signals or [signal.SIGTERM])[-1]  # the signal may have reached another process only
        raise StoppedError(
            f"Stopped by {number.name} after step {self.history.step}. The run is saved in {self.run.folder.path}.",
            exit_code=128 + number,
            can_go_on=True,
        )

    def save(self) -> None:
        state = self._state()  # in all processes
        if self.run.folder.writer:
            write_state(self.run.folder.checkpoints, self.history.step, state)

    def _state(self) -> dict[str, Any]:
        """Return the state of the run; per process, its telemetry and random state."""
        scaler = self.run.accelerator.scaler
        return {
            "method": self.method.state_dict(),
            "history": vars(self.history),
            "best": self.selection.weights,  # with `--select best`
            "telemetry": gather_object([self.telemetry.state_dict()]),
            "rng": gather_object([rng_state()]),
            "scaler": {} if scaler is None else scaler.state_dict(),
        }

    def restore(self) -> None:
        """Continue from the last checkpoint."""
        folder, accelerator = self.run.folder, self.run.accelerator
        state = read_state(folder.checkpoints)
        try:
            if len(state["rng"]) != accelerator.num_processes:
                raise InputError(
                    f"The checkpoint in {folder.checkpoints} was written by {len(state['rng'])} processes and cannot "
                    f"be resumed by {accelerator.num_processes}. Start the same number of processes."
                )
            self.method.load_state_dict(state["method"])
            self.history = history = History(**state["history"])
            self.selection.weights = state["best"]
            rank = accelerator.process_index
            self.telemetry.load_state_dict(state["telemetry"][rank])
            set_rng_state(state["rng"][rank])
            if accelerator.scaler is not None:
                accelerator.scaler.load_state_dict(state["scaler"])
        except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            raise InputError(
                f"The checkpoint in {folder.checkpoints} does not fit this run: {one_line(error)}"
            ) from error
        folder.keep_lines(metrics=len(history.evaluations), telemetry=self.telemetry.written)


class Progress:
    """Show a progress bar with loss, drop rate and wins below it, and print a line per evaluation."""

    def __init__(self, run: Setup, history: History) -> None:
        self._run = run
        self._console = Console(quiet=not run.folder.writer)
        self._bar = Bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._state = Text(no_wrap=True, overflow="ellipsis")
        self.shown = Live(Group(self._bar, self._state), console=self._console, transient=True)
        self._task = self._bar.add_task(run.settings.recipe, total=run.total_steps, completed=history.step)
        self._history, self._first_step = history, history.step
        self._began = self._last_line = time.monotonic()

    def step(self, history: History, telemetry: Telemetry) -> None:
        """Update the bar after a training step."""
        values = [f"loss {telemetry.latest['loss']:.3f}"] if "loss" in telemetry.latest else []
        if rates := positive_rates(telemetry.drop_rates):
            values.append(f"drop {fmean(rates):.2f}")
        values += [f"{event} {count}" for event, count in sorted(telemetry.event_counts.items())]
        description = f"{self._run.settings.recipe} epoch {history.epoch + 1}/{self._run.epochs}"
        self._bar.update(self._task, completed=history.step, description=description)
        self._state.plain = "  ".join(values)
        if not self._console.is_terminal and time.monotonic() - self._last_line >= QUIET:
            step = f"step {history.step} of {self._run.total_steps}"
            say(self._console, f"{description}  {step}  {'  '.join(values)}{self._left()}")
            self._last_line = time.monotonic()

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Print a line about an evaluation."""
        metric = self._run.task.metric
        dropped = ""
        if "drop_rate" in record:
            rates = positive_rates(record["drop_rate"])
            dropped = f"  drop rate {fmean(rates):.3f}" if rates else "  nothing dropped"
        key = f"{STOPPING}_{metric}"
        held_out = f"  on stopping rows {record[key]:.4f}" if key in record else ""
        text = (
            f"epoch {record['epoch']}/{self._run.epochs}  {record['network']:<9} {self._run.scored_on} loss "
            f"{record['loss']:.4f}  {metric} {record[metric]:.4f}{held_out}{dropped}{self._left()}"
        )
        say(self._console, text)
        self._last_line = time.monotonic()

    def _left(self) -> str:
        """Return an estimate of the time that is left, where no bar shows it."""
        steps_done, steps_left = self._history.step - self._first_step, self._run.total_steps - self._history.step
        if self._console.is_terminal or not steps_done or not steps_left:
            return ""
        return f"  about {duration((time.monotonic() - self._began) * steps_left / steps_done)} left"
