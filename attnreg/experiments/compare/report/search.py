"""The report of a search: ``report.md``, ``report.html``, ``winner.json``, ``plots/``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from attnreg.errors import InputError
from attnreg.experiments.compare.held_out import FIRST_SEED, Trial, best, score_cells
from attnreg.experiments.compare.method import Winner, typed_words
from attnreg.experiments.compare.search.rounds import Search
from attnreg.experiments.compare.search.trials import Trials
from attnreg.experiments.results import document
from attnreg.experiments.results.document import Block, Code, Heading, Paragraph, Picture, Table
from attnreg.experiments.results.plots.comparison import plot_progress

_BEST = 5
_ENOUGH = 10  # complete trials, to say which parameters matter


def write_report(search: Search, trials: Trials, command: Sequence[str]) -> list[str | Table]:
    """Write the winner and the report; return what to show: nothing, if no trial is complete.

    ``command`` are the words of the command that made the search. Raises an ``InputError`` if trials have failed and
    none is complete.
    """
    failures = [f"trial-{trial.number} failed: {trial.failure}" for trial in trials.all if trial.failure is not None]
    if (first := best(trials.all)) is None:
        if failures:
            raise InputError(f"No trial has finished. {failures[0]}")
        return []
    held_out, said = search.held_out, _summary(search, trials)
    run = held_out.run(first.method, 0)
    counts = len(trials.all), trials.runs, held_out.seeds, held_out.rows
    winner = Winner(first.method.text, first.mean, run.settings.task, *counts)
    folder, last = held_out.folder, FIRST_SEED + held_out.seeds - 1
    seeds = f"seeds {FIRST_SEED} to {last}" if held_out.seeds > 1 else f"seed {FIRST_SEED}"
    winner.write(folder)
    ranked = sorted((trial for trial in trials.all if trial.state == "complete"), key=lambda trial: -trial.mean)
    leaders, metric = _table(ranked[:_BEST]), str(run.reader.result["metric"])
    words, options = ["attnreg", "compare", "finetune"], typed_words(held_out.options)
    by_folder, pasted = (shlex.join([*words, f"best={each}", *options]) for each in (f"@{folder}", winner.method))
    blocks: list[Block] = [
        Heading(f"Search on {winner.task}: {metric} on held-out rows"),
        Code([shlex.join(command)]),
        Paragraph(said),
        Paragraph(
            f"Each trial is scored on {held_out.rows} rows held out from train, with {seeds}. Dev was not used. The "
            f"sampler's seed is {search.sampler_seed}."
        ),
        Heading("Winner"),
        Paragraph(
            "The best mean of many is too high by chance. Compare the winner on dev, with other seeds, in one of these "
            "ways; the first also tells the number of tries."
        ),
        Code([by_folder, pasted]),
        Heading(f"The best {len(leaders.rows)} trials"),
        leaders,
        Heading("Progress"),
        _progress(trials, metric, held_out.seeds, folder / "plots"),
        *(_importances(trials) if len(ranked) >= _ENOUGH else ()),
        Heading("All trials"),
        _table(trials.all),
        Paragraph(
            "Complete: scored with all seeds. Stopped: worse than the best trial at that time, seed by seed "
            f"(Wilcoxon's signed-rank test, p < {search.prune_p:g}). Failed: a run ended without a result."
        ),
        *map(Paragraph, failures),
    ]
    document.save(blocks, folder)
    compare = "The winner as a method of `attnreg compare`:"
    return [leaders, said, compare, pasted, f"or {by_folder}", f"Report saved to {folder}/report.md and report.html."]


def _summary(search: Search, trials: Trials) -> str:
    """Say how many trials and runs there were, and what they cost."""
    states = [trial.state for trial in trials.all]
    names = {"complete": "complete", "stopped": "stopped early", "failed": "failed", "running": "unfinished"}
    told = ", ".join(f"{states.count(state)} {name}" for state, name in names.items() if state in states)
    results = [run.reader.result for run in search.known(trials) if run.finished]
    cost = f"{sum(float(result['seconds']) for result in results) / 60:.1f} min, one after another"
    if all("training_cpu_seconds" in result for result in results):
        cpu = sum(float(result["training_cpu_seconds"]) for result in results)
        cost += f" (training: {cpu / 60:.1f} min of CPU time)"
    return f"{len(states)} trials ({told}) in {trials.runs} runs of at most {search.runs}. The runs took {cost}."


def _table(trials: Sequence[Trial]) -> Table:
    rows = [[str(trial.number), *score_cells(trial.scores), trial.state, trial.method.text] for trial in trials]
    return Table(["trial", "mean", f"seeds, from {FIRST_SEED}", "state", "method"], rows, texts=(0, 2, 3, 4))


def _progress(trials: Trials, metric: str, seeds: int, folder: Path) -> Picture:
    complete, stopped = (
        sorted((trial.ended_after or 0, trial.mean) for trial in trials.all if trial.state == state)
        for state in ("complete", "stopped")
    )
    path = folder / "progress.png"
    plot_progress(complete, stopped, metric, seeds, path)
    return Picture(path, "Mean score of each trial at the number of runs when it ended; the line is the best so far.")


def _importances(trials: Trials) -> list[Block]:
    """Say which parameters explain the scores, if optuna can tell."""
    rows = [[name, f"{value:.2f}"] for name, value in trials.importances.items() if value >= 0.005]
    text = (
        "Optuna's estimate of how much each parameter explains of the complete trials' scores, as shares of 1. It is "
        "rough with few trials. A provider's own name stands for whether it is in the composition."
    )
    shown: list[Block] = [Heading("Which parameters matter"), Table(["parameter", "importance"], rows), Paragraph(text)]
    return shown if rows else []
