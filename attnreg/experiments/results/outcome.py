"""The end of a run: ``result.json``, ``predictions.jsonl`` and the report."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import attnreg
from attnreg.experiments.folder.history import COLLAPSED, History, best_of, biased, collapsed
from attnreg.experiments.results.document import Table
from attnreg.experiments.results.evaluation import evaluate, evaluate_all, predict
from attnreg.experiments.setup.device import cpu_name, device_name
from attnreg.experiments.setup.setup import Setup
from attnreg.experiments.tasks.kinds.kind import REFERENCE
from attnreg.training.method import TrainingMethod

_OF_HISTORY = (
    *("trivial", "drop_rates", "active_steps", "events"),
    *("seconds", "training_seconds", "training_cpu_seconds"),
)


def conclude(method: TrainingMethod, run: Setup, history: History) -> None:
    """Evaluate the returned network at the end of training and write the results.

    ``result.json`` is written last: a run folder that has it has finished training.
    """
    kind = run.kind
    train = run.train_rows.select(range(kind.divided(run.train_rows, min(kind.scored_train_rows, len(run.train_rows)))))
    dev = predict(method.model, run.dev, kind, run.accelerator)
    further = evaluate_all(method.model, run.further, kind, run.accelerator)
    history.collapsed = collapsed(dev.records)
    history.trivial = _trivial_scores(run, train)
    settings, selection, records = run.settings, run.selection(), history.of(method.returned_name)
    returned = selection.returned(records)["epoch"]
    result: dict[str, Any] = {
        "metric": run.task.metric,
        "scored_on": run.scored_on,
        "dev": {
            "loss": dev.loss,
            **kind.score(dev.records),
            **further,
            "calibration_error": kind.calibration_error(dev.records),
        },
        "train": evaluate(method.model, run.labelled(train), kind, run.accelerator),
        "train_rows_scored": len(train),
        "classes": list(run.task.labels),
        **{name: getattr(history, name) for name in _OF_HISTORY},
        "acted": None if method.provider is None else history.active_steps > 0,
        "warnings": run.warnings,
        "best_epoch": best_of(records, run.task.metric),
        "rows": len(run.train_rows),
        "parameters": run.parameters,
        "steps": history.step,
        "peak_memory_bytes": history.peak_memory,
        "held_out": run.held_out,
        "returned": {"select": "best" if selection.returns_best else "last", "epoch": returned},
        "stopping": None
        if settings.stop_on is None
        else {
            "rows": None if run.stopping is None else len(run.stopping.references),  # `None` for dev
            "score": best_of(records, selection.key)[selection.key],
            "last_epoch": records[-1]["epoch"],
            "returned_epoch": returned,
        },
        "environment": {
            "device": device_name(run.accelerator.device),
            "cpu": cpu_name(),
            "kernels": torch.backends.cpu.get_cpu_capability(),
            "processes": run.accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "attnreg": attnreg.__version__,  # a checkout that is not installed has no metadata
            **{name: version(name) for name in ("torch", "transformers")},
            **_commit(),
        },
    }
    run.folder.write_outcome(result, dev.records)


def _commit() -> dict[str, str]:
    """Return the commit of the package, and whether files differ from it, if it runs from a checkout."""
    root = Path(attnreg.__file__).parent.parent
    if not (root / ".git").exists():
        return {}
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):  # without git, say
        return {"commit": subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()}
    return {}


def _trivial_scores(run: Setup, scored_train: Any) -> dict[str, Any] | None:
    """Score the prediction that suits most training rows as the answer of all rows; ``None`` if the kind has none."""
    if (trivial := run.kind.trivial(run.train_rows[REFERENCE][:])) is None:
        return None
    name, answer = trivial
    scores = {
        split: run.kind.score([{"label": label, "prediction": answer} for label in rows[REFERENCE][:]])
        for split, rows in (("dev", run.dev_rows), ("train", scored_train))
    }
    return {"predictor": name, **scores}


def tables_of(run: Setup, history: History, plain: tuple[Setup, History] | None) -> dict[str, Table]:
    """Return the tables of a run by heading; the first heading is the title of the report."""
    settings = run.settings
    title = f"{settings.recipe} on {settings.task}: {run.task.metric} on {run.scored_on} rows, seed {settings.seed}"
    rates = [[label, f"{rate:.3f}"] for label, rate in history.drop_rates.items()]
    by_layer = {"Drop rate per layer\n(mean while active)": Table(["layer", "drop rate"], rates)} if rates else {}
    return {title: _scores(run, history, plain), **by_layer}


def _scores(run: Setup, history: History, plain: tuple[Setup, History] | None) -> Table:
    """Return the scores of all networks, of plain fine-tuning and of the trivial predictor."""
    metric = run.task.metric
    networks = dict.fromkeys(record["network"] for record in history.evaluations)
    entries = [(name if len(networks) > 1 else run.settings.recipe, run, history, name) for name in networks]
    if plain is not None:
        entries.append(("plain fine-tuning", *plain, "model"))
    rows = []
    for name, its_run, its_history, network in entries:
        records = its_history.of(network)
        best, last = best_of(records, metric), records[-1]
        reported: Mapping[str, Any] = last
        # AttendOut's other network stops when the game ends.
        ended = f"{last[metric]:.4f}" + (f" (epoch {last['epoch']})" if last["epoch"] != its_run.epochs else "")
        row = {"network": name}
        if run.settings.stop_on is not None:
            is_returned = network == its_history.returned  # or it is the other network of a game
            if is_returned:
                reported = its_run.selection().returned(records)
            row["returned epoch"] = _at(reported, metric) if is_returned else "not returned"
        row |= {"last epoch": ended, "best epoch": _at(best, metric), "loss": f"{reported['loss']:.4f}"}
        rows.append({**row, "training rows": str(len(its_run.train_rows)), "time (s)": f"{its_history.seconds:.0f}"})
    if (trivial := history.trivial) is not None:
        score, size = f"{trivial['dev'][metric]:.4f}", str(len(run.train_rows))
        rows.append({"network": trivial["predictor"], "last epoch": score, "training rows": size, "time (s)": "0"})
    return Table.of(rows)


def notes_of(run: Setup, history: History, plain: tuple[Setup, History] | None) -> Iterator[str]:
    """Yield the sentences of a report that the tables do not tell, after the recipe's notes."""
    settings = run.settings
    if history.drop_rates or (run.folder.path / "provider").is_dir():
        yield _activity(history)
    if rounds := rounds_played(history.events):
        yield rounds
    if history.collapsed:
        yield COLLAPSED.format("the network") + "."
    if settings.stop_on is None:
        owner = "network" if history.returned == "model" else f"{history.returned}'s network"
        yield f"The {owner} of the last epoch ({history.epoch}) is returned, scored and saved."
    else:
        yield _stopped(run, history)
        if plain is not None:
            yield f"Plain fine-tuning: {_stopped(*plain)}"
        if settings.stop_on == "dev":
            yield biased(run.scored_on)
    if (perplexity := history.of(history.returned)[-1].get("perplexity")) is not None:
        yield f"Perplexity on {run.scored_on} rows after the last epoch: {perplexity:.4g}."
    if plain is not None:
        yield (
            "One seed is no evidence that a method is better. To compare over seeds, with the other options as here: "
            f"attnreg compare finetune {settings.recipe} --task {settings.task} --seeds 10"
        )
    yield from run.remarks
    yield from () if plain is None else (f"Plain fine-tuning: {remark}" for remark in plain[0].remarks)


def _at(record: Mapping[str, Any], metric: str) -> str:
    return f"{record[metric]:.4f} ({record['epoch']})"


def _stopped(run: Setup, history: History) -> str:
    """Say at which epoch a run with ``--patience`` or ``--select best`` stopped, and to which it returned."""
    records, patience = history.of(history.returned), run.settings.patience
    best = best_of(records, run.selection().key)["epoch"]
    rows = f"{run.scored_on} rows" if run.stopping is None else f"{len(run.stopping.references)} rows held out of train"
    if run.selection().is_over(records):
        after = f"{patience} evaluations" if patience != 1 else "1 evaluation"
        sentence = f"Stopped after epoch {history.epoch} of {run.epochs}: no better score on {rows} in {after}."
    else:
        sentence = f"Trained for all {run.epochs} epochs, with the best score on {rows} in epoch {best}."
    returned = run.selection().returned(records)["epoch"]
    return f"{sentence} The network of epoch {returned} is returned, scored and saved."


def _activity(history: History) -> str:
    """Summarize in one sentence how often the regularizer was active and how much it dropped."""
    if not history.active_steps:
        return "The regularizer was never active: nothing was dropped in any step."
    active = f"The regularizer was active in {history.active_steps} of {history.step} steps"
    if not (dropping := positive_rates(history.drop_rates)):
        return f"{active} and dropped nothing."
    return f"{active} and dropped {fmean(dropping):.1%} in {len(dropping)} of {len(history.drop_rates)} sites."


def positive_rates(rates: Mapping[str, float]) -> list[float]:
    """Return the rates of the sites that drop anything; other sites, such as of noise, never do, by design."""
    return [rate for rate in rates.values() if rate > 0]


def rounds_played(events: Mapping[str, int], runs: int = 1) -> str:
    """Say in one sentence how many rounds of AttendOut's game were played and who won them; empty without a game."""
    attacker, defender = (events.get(f"winner: {name}", 0) / runs for name in ("attacker", "defender"))
    if not attacker + defender:
        return ""
    digits, rounds = (1, "rounds on average") if runs > 1 else (0, "round" + "s" * (attacker + defender > 1))
    return (
        f"The game had {attacker + defender:.{digits}f} {rounds}: the Attacker won {attacker:.{digits}f}, the Defender "
        f"{defender:.{digits}f}."
    )
