"""Make the runs of comparisons and show their results."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import click
from rich.console import Console

from attnreg.errors import InputError
from attnreg.experiments.compare import launch
from attnreg.experiments.compare.comparison import Comparison
from attnreg.experiments.compare.report.comparison import write_report
from attnreg.experiments.compare.report.study import write_study_report
from attnreg.experiments.compare.scoring import score_further
from attnreg.experiments.compare.study import Study
from attnreg.experiments.results.document import duration, say

STOPPED = "Stopped. Repeat the command to continue."


def make(study: Study, launcher: str, jobs: int | None, threads: int, *, of_file: bool) -> None:
    """Make the runs of comparisons that have not finished, and show the results; a study file has its own report.

    Raises an ``InputError`` in the end if runs have failed or were stopped by hand.
    """
    # What is printed beside commands must not be taken for one.
    console, troubles = Console(stderr=launcher == "commands"), list[str]()
    for name, comparison in study.comparisons.items():
        if of_file:
            console.rule(name)
        with comparison.begun():
            if launcher == "commands":
                if pending := [run for run in comparison.runs() if not run.finished]:
                    count = launch.commands(pending, threads, click.echo)
                    left = f"{count} runs to start, {len(pending) - count} running."
                    click.echo(f"{left} Repeat this command when they have finished.", err=True)
                    continue
            elif (trouble := _make_runs(comparison, launcher, jobs, threads, console)) is not None:
                troubles.append(trouble)
            for run in comparison.runs():
                run.tidy()  # runs from elsewhere, or from a comparison that was killed, are not tidy yet
            kept = [run for run in comparison.runs() if run.finished and run.keep_model]
            if gone := sum(not (run.folder / "model").is_dir() for run in kept):
                click.echo(f"{gone} of the finished runs kept no model: remove their folders to repeat them.", err=True)
            if STOPPED not in troubles:
                troubles += score_further(comparison, study.score_on.get(name, ()))
            if shown := write_report(comparison):
                saved = f"Report saved to {comparison.folder}/report.md and {comparison.folder}/report.html."
                say(console, *shown, *comparison.missing(), saved)
        if STOPPED in troubles:
            break
    if of_file and (tables := write_study_report(study)):
        say(console, *tables, f"Report of the study saved to {study.folder}/report.md and report.html.")
    if troubles:
        raise InputError(" ".join(troubles))


def _make_runs(comparison: Comparison, launcher: str, jobs: int | None, threads: int, console: Console) -> str | None:
    """Make the runs of a comparison that have not finished; return why some still have not, if so."""
    on_cpu, tried = comparison.options.get("device") == "cpu", set[Path]()
    start = launch.local(jobs or launch.usual_jobs(threads, on_cpu), threads)
    while True:
        for run in (known := comparison.runs()):
            run.check()  # again, since the data or a file may have changed
        runs = [run for run in known if not run.finished and run.folder not in tried]
        if not runs:
            break
        tried.update(run.folder for run in runs)  # a run that fails is not made again, until the command is repeated
        with launch.Board(known, console) as board:
            try:
                start(runs, board)
            except KeyboardInterrupt:
                return STOPPED
        comparison.decide()
    failed = [run for run in comparison.runs() if run.failure is not None]
    if not failed:
        return None
    return f"{len(failed)} of the runs failed. The log of the first, {failed[0].log}, ends with: {failed[0].failure}"


def describe(study: Study) -> None:
    """Print the runs of comparisons that are known so far, their number, and an estimate of their time."""
    console, times, total = Console(), list[float](), 0
    for comparison in study.comparisons.values():
        runs = comparison.runs()
        done = [run for run in runs if run.finished]
        total += len(runs)
        times += [run.seconds for run in done]
        say(console, f"{comparison.folder}: {len(runs)} runs, {len(done)} finished")
        for run in runs:
            say(console, f"  {run.method.name}, {run.role}, seed {run.seed}: {'finished' if run in done else 'to run'}")
        for method in comparison.methods:
            if comparison.chosen(method) is None:
                total += comparison.seeds
                say(console, f"  {method.name}, final: {comparison.seeds} runs, once its search has finished")
    left = ""
    if times:
        left = f"; at {fmean(times):.0f} s each, {duration(fmean(times) * (total - len(times)))} of computing are left"
    say(console, f"{total} runs in all{left}.")
