"""Make the runs of comparisons and show their results."""

from __future__ import annotations

from statistics import fmean

import click
from rich.console import Console

from attnreg.errors import InputError
from attnreg.experiments.compare import launch
from attnreg.experiments.compare.board import Board
from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.method import values_of
from attnreg.experiments.compare.planned import PlannedRun, finished_of
from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.compare.report.study import write_study_report
from attnreg.experiments.compare.scoring import score_further
from attnreg.experiments.compare.study import Study
from attnreg.experiments.results.document import Paragraph, print_table, say


def make(study: Study, launcher: str, jobs: int | None, threads: int, *, of_file: bool) -> None:
    """Make the runs of comparisons that have not finished, and show the results.

    ``launcher`` is ``"local"``, ``"ray"`` or ``"commands"``; ``of_file``: a study file has a report of its own. Raises
    an ``InputError`` in the end if runs have failed or were stopped by hand.
    """
    console, troubles, stopped = Console(), list[str](), False
    for comparison in study.comparisons.values():
        if not all(run.finished and not run.changed for run in comparison.runs()):
            final = comparison.final_runs(comparison.baseline.variants[0])
            for run in [*final[:1], *[run for run in comparison.runs() if run.role == "search"][:1]]:
                run.check_data()
    for name, comparison in study.comparisons.items():
        if of_file:
            console.rule(name)
        with comparison.begun():
            if launcher == "commands":
                if _print_commands(comparison, threads):
                    continue
            elif (trouble := _make_runs(comparison, launcher, jobs, threads, console)) is not None:
                troubles.append(trouble)
                stopped = trouble.startswith("Stopped.")
            for run in comparison.runs():
                run.tidy()  # runs from elsewhere, or from a comparison that was killed, are not tidy yet
            if not stopped:
                troubles += score_further(comparison, study.score_on.get(name, ()), _device(comparison))
            _show(comparison, console)
        if stopped:
            break
    if of_file and (tables := write_study_report(study)):
        for table in tables:
            print_table(console, table)
        say(console, f"Report of the study saved to {study.folder}/report.md and report.html.")
    if troubles:
        raise InputError(" ".join(troubles))


def _make_runs(comparison: Comparison, launcher: str, jobs: int | None, threads: int, console: Console) -> str | None:
    """Make the runs of a comparison that have not finished; return why some still have not, if so."""
    on_cpu, tried = _device(comparison) == "cpu", set[PlannedRun]()
    if launcher == "local":
        jobs = jobs or launch.usual_jobs(threads, on_cpu)
    start = launch.ray(threads, on_cpu) if jobs is None else launch.local(jobs, threads)
    while True:
        say(console, *comparison.set_outdated_aside())
        runs = [run for run in comparison.runs() if not run.finished and run not in tried]
        if not runs:
            break
        tried.update(runs)  # a run that fails is not made again, until the command is repeated
        with Board(comparison.runs(), jobs or len(runs), console) as board:
            try:
                start(runs, board)
            except KeyboardInterrupt:
                return "Stopped. Repeat the command to continue."
        comparison.decide()
    failed = [run for run in comparison.runs() if run.failure is not None]
    if not failed:
        return None
    return f"{len(failed)} of the runs failed. The log of the first, {failed[0].log}, ends with: {failed[0].failure}"


def _device(comparison: Comparison) -> str | None:
    found = values_of(comparison.options).get("device")
    return None if found is None else str(found)


def _print_commands(comparison: Comparison, threads: int) -> bool:
    """Print commands for the unfinished runs; return whether there are any."""
    for text in comparison.set_outdated_aside():
        click.echo(text, err=True)
    if pending := [run for run in comparison.runs() if not run.finished]:
        count = launch.commands(pending, threads, click.echo)
        text = f"{count} runs to start, {len(pending) - count} running. Repeat this command when they have finished."
        click.echo(text, err=True)
    return bool(pending)


def _show(comparison: Comparison, console: Console) -> None:
    """Write the report of what has finished, and print its tables."""
    if shown := write_report(comparison):
        for block in shown:
            if isinstance(block, Paragraph):
                say(console, block)
            else:
                print_table(console, block)
        say(
            console,
            *comparison.missing(),
            f"Report saved to {comparison.folder}/report.md and {comparison.folder}/report.html.",
        )


def describe(study: Study) -> None:
    """Print the runs of comparisons that are known so far, their number, and an estimate of their time."""
    console, left, known, total = Console(), 0.0, True, 0
    for comparison in study.comparisons.values():
        runs = comparison.runs()
        total += len(runs)
        say(console, f"{comparison.folder}: {len(runs)} runs, {len(finished_of(runs))} finished")
        if unknown := [method.name for method in comparison.methods if comparison.chosen(method) is None]:
            say(console, f"  {', '.join(unknown)}: {comparison.seeds} more runs of each, once its search has finished")
        done = finished_of(runs)
        known = known and bool(done or not runs)
        for run in runs:
            say(console, f"  {run.method.name}, {run.role}, seed {run.seed}: {'finished' if run in done else 'to run'}")
            same = [each.seconds for each in done if each.method == run.method]
            left += 0.0 if run in done or not done else fmean(same or [each.seconds for each in done])
    estimate = f"about {left / 60:.0f} min of computing left" if known else "no estimate of time before a run of each"
    say(console, f"{total} runs in all; {estimate}.")
