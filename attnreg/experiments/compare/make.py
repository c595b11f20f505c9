"""Make the runs of a comparison and show its results."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console

from attnreg.experiments.compare.board import Board
from attnreg.experiments.compare.incomplete import incomplete
from attnreg.experiments.compare.launch import Launcher
from attnreg.experiments.compare.planned import PlannedRun, finished_of
from attnreg.experiments.compare.report import write_report
from attnreg.experiments.compare.study import Study
from attnreg.experiments.results.report import print_table


def make(study: Study, launch: Launcher, jobs: int | None, console: Console) -> str | None:
    """Make the runs of a comparison that have not finished; return why some still have not, if so.

    Args:
        study: the comparison, which has begun.
        launch: starts runs.
        jobs: number of runs at a time, to estimate the time left; ``None`` for all.
        console: where to print.
    """
    tried: set[PlannedRun] = set()
    while runs := [run for run in pending(study, console) if run not in tried]:
        tried.update(runs)  # a run that fails is not made again, until the command is repeated
        with Board(study.runs(), jobs or len(runs), console) as board:
            try:
                launch(runs, board)
            except KeyboardInterrupt:
                return "Stopped. Repeat the command to continue."
        study.decide()
    failed = [run for run in study.runs() if run.failure is not None]
    if not failed:
        return None
    return f"{len(failed)} of the runs failed. The log of the first, {failed[0].log}, ends with: {failed[0].failure}"


def pending(study: Study, console: Console) -> list[PlannedRun]:
    """Return the runs to make; say which have become outdated."""
    for text in study.set_outdated_aside():
        console.print(text, highlight=False, soft_wrap=True)
    return [run for run in study.runs() if not run.finished]


def show(study: Study, console: Console) -> None:
    """Write the report of what has finished, and print its tables."""
    shown = write_report(study)
    for table in shown:
        print_table(console, table.header, table.rows, table.texts)
    if not shown:
        return
    for block in incomplete(study):
        console.print(block.text, highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"Report saved to {study.folder}/report.md and {study.folder}/report.html.", highlight=False, soft_wrap=True
    )


def describe(studies: Sequence[Study], console: Console) -> None:
    """Print the runs of comparisons that are known so far, their number, and an estimate of their time."""
    left, known = 0.0, True
    for study in studies:
        runs = study.runs()
        console.print(f"{study.folder}: {len(runs)} runs, {len(finished_of(runs))} finished", highlight=False)
        if unknown := [method.name for method in study.methods if study.chosen(method) is None]:
            text = f"  {', '.join(unknown)}: {study.seeds} more runs of each, once its search has finished"
            console.print(text, highlight=False, soft_wrap=True)
        for run in runs:
            state = "finished" if run.finished else "to run"
            text = f"  {run.method.name}, {run.role}, seed {run.seed}: {state}"
            console.print(text, highlight=False, soft_wrap=True, markup=False)
        done = [run.seconds for run in finished_of(runs)]
        known = known and bool(done or all(run.finished for run in runs))
        for run in runs:
            same = [each.seconds for each in finished_of(runs) if each.method == run.method]
            left += 0.0 if run.finished or not done else fmean(same or done)
    total = sum(len(study.runs()) for study in studies)
    estimate = f"about {left / 60:.0f} min of computing left" if known else "no estimate of time before a run of each"
    console.print(f"{total} runs in all; {estimate}.", highlight=False, soft_wrap=True)
