"""The report of a search: ``report.md``, ``report.html``, ``winner.json``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from attnreg.errors import InputError
from attnreg.experiments.compare.held_out import FIRST_SEED, Trial, best, score_cells
from attnreg.experiments.compare.method import Winner, typed_words
from attnreg.experiments.compare.planned import PlannedRun
from attnreg.experiments.compare.search.trials import Search, Trials
from attnreg.experiments.results import document
from attnreg.experiments.results.document import Block, Code, Heading, Paragraph, Table


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
    held_out, made = search.held_out, [run for run in search.known(trials) if run.finished or run.failure is not None]
    said = _summary(search, trials, made)
    run = held_out.runs(first.method)[0]
    counts = len(trials.all), len(made), held_out.seeds, held_out.rows
    winner = Winner(first.method.text, first.mean, run.settings.task, *counts)
    folder = held_out.folder
    winner.write(folder)
    ranked = sorted(trials.all, key=lambda trial: -trial.mean if trial.state == "complete" else math.inf)
    metric = str(run.reader.result["metric"])
    compare = shlex.join(["attnreg", "compare", "finetune", f"best=@{folder}", *typed_words(held_out.options)])
    blocks: list[Block] = [
        Heading(f"Search on {winner.task}: {metric} on held-out rows"),
        Code(shlex.join(command)),
        Paragraph(said),
        Paragraph(
            f"Each trial is scored on {held_out.rows} rows held out from train, with seeds from "
            f"{FIRST_SEED} on ({held_out.seeds} in all). Dev was not used. The sampler's seed is {search.sampler_seed}."
        ),
        Heading("Winner"),
        Code(winner.method),
        Paragraph("The best mean of many is too high by chance. Compare the winner on dev, with other seeds:"),
        Code(compare),
        Heading("All trials"),
        _table(ranked),
        *map(Paragraph, failures),
    ]
    document.save(blocks, folder)
    saved = f"Report saved to {folder}/report.md and report.html."
    return [_table(ranked[:5]), said, "Compare the winner:", compare, saved]


def _summary(search: Search, trials: Trials, made: Sequence[PlannedRun]) -> str:
    """Say how many trials and runs there were, and what they cost."""
    states = [trial.state for trial in trials.all]
    names = {"complete": "complete", "failed": "failed", "running": "unfinished"}
    told = ", ".join(f"{states.count(state)} {name}" for state, name in names.items() if state in states)
    minutes = sum(run.seconds for run in made if run.finished) / 60
    runs = f"{len(made)} runs of at most {search.runs}"
    return f"{len(states)} trials ({told}) in {runs}. The runs took {minutes:.1f} min, one after another."


def _table(trials: Sequence[Trial]) -> Table:
    rows = [[str(trial.number), *score_cells(trial.scores), trial.state, trial.method.text] for trial in trials]
    return Table(["trial", "mean", f"seeds, from {FIRST_SEED}", "state", "method"], rows, texts=(0, 2, 3, 4))
