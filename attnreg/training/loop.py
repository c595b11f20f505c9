"""The library's loop around a training method."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import set_seed

from attnreg.pretrained import to_json
from attnreg.training.checkpoint import load_checkpoint, rng_state, save_checkpoint, set_rng_state
from attnreg.training.evaluation import evaluate
from attnreg.training.method import TrainingMethod
from attnreg.training.outcome import conclude, peak_memory
from attnreg.training.passes import PassCounter
from attnreg.training.progress import Progress
from attnreg.training.run import Run
from attnreg.training.telemetry import Telemetry


@dataclass
class History:
    """What a run has done so far.

    Args:
        epoch: the epoch that is running, from 0; the number of epochs when all are done.
        batch: how many of its batches are done.
        step: optimizer steps done.
        seconds: time spent in training steps and evaluations.
        training_seconds: time spent on training alone, without evaluations and checkpoints.
        peak_memory: bytes; see :func:`attnreg.training.outcome.peak_memory`.
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


def fit(method: TrainingMethod, run: Run) -> History:
    """Train, evaluate after each epoch, keep the best model, write checkpoints; go on from the last one if resuming.

    Args:
        method: the method; its :attr:`model` is the one that is kept, best epoch first by the task's metric.
        run: where data comes from and results go.

    Returns:
        the history of the whole run, earlier parts included.
    """
    history, telemetry = History(), Telemetry(run.log_telemetry)
    if method.provider is not None:
        to_json(method.provider)  # what cannot be saved after the first epoch is told before it
    set_seed(run.settings.seed)
    if not run.settings.resume:
        run.folder.create(run.settings)
    else:
        history = _restore(method, run, telemetry)
    with run.folder.locked():
        with run.tracked(), Progress(run, history) as progress:
            while history.epoch < run.epochs:
                _epoch(method, run, history, telemetry, progress)
        conclude(method, run, history)
    return history


def _epoch(method: TrainingMethod, run: Run, history: History, telemetry: Telemetry, progress: Progress) -> None:
    begin = time.perf_counter() - history.seconds
    passes = PassCounter(history.forward_rows, history.backward_rows)
    if not history.batch:
        method.on_epoch(history.epoch)
    clock = time.perf_counter()
    for batch in run.train_batches(history.epoch).epoch(history.epoch, skip=history.batch):
        with passes.counting(method.learners):
            result = method.step(batch)
        history.step += 1
        history.batch += 1
        history.forward_rows, history.backward_rows = passes.forward, passes.backward
        telemetry.note(history.step, result, method.drop_rates(by_head=True))
        now = time.perf_counter()
        history.seconds, history.training_seconds = now - begin, history.training_seconds + now - clock
        progress.step(history, telemetry)
        if run.settings.save_steps and history.step % run.settings.save_steps == 0:
            _save(method, run, history, telemetry)
        clock = time.perf_counter()
    telemetry.flush(history.step)  # waits for the device
    history.training_seconds += time.perf_counter() - clock
    history.drop_rates, rates = telemetry.mean_drop_rates(), telemetry.end_epoch()
    history.active_steps = telemetry.active_steps()
    best = max((r[run.task.metric] for r in history.of(method.returned_name)), default=-math.inf)
    last = history.epoch + 1 == run.epochs
    evaluated = last or (history.epoch + 1) % run.settings.evaluate_every == 0
    for name, network in method.networks.items() if evaluated else ():
        metrics = evaluate(network, run.dev_batches, dict.fromkeys([run.task.metric, "accuracy"]))
        record = {"network": name, "epoch": history.epoch + 1, "step": history.step, **metrics}
        if method.provider is not None:
            record["drop_rate"] = rates
        history.evaluations.append(record)
        run.log_evaluation(record)
        progress.evaluated(record)
    history.epoch, history.batch = history.epoch + 1, 0
    history.seconds = time.perf_counter() - begin
    history.peak_memory = max(history.peak_memory, peak_memory() or 0)
    if evaluated and history.of(method.returned_name)[-1][run.task.metric] > best:
        run.folder.save_model(method.model, run.tokenizer, method.provider)
    _save(method, run, history, telemetry)


def _save(method: TrainingMethod, run: Run, history: History, telemetry: Telemetry) -> None:
    state: Mapping[str, Any] = {
        "method": method.state_dict(),
        "history": vars(history),
        "telemetry": telemetry.state_dict(),
        "rng": rng_state(),
        "scaler": {} if run.accelerator.scaler is None else run.accelerator.scaler.state_dict(),
    }
    save_checkpoint(run.folder.checkpoints, history.step, state)


def _restore(method: TrainingMethod, run: Run, telemetry: Telemetry) -> History:
    state = load_checkpoint(run.folder.checkpoints)
    method.load_state_dict(state["method"])
    history = History(**state["history"])
    telemetry.load_state_dict(state["telemetry"])
    run.folder.keep_lines(metrics=len(history.evaluations), telemetry=telemetry.written)
    set_rng_state(state["rng"])
    if run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    return history
