"""``attnreg compare METHOD...``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnreg.errors import InputError, UsageError
from attnreg.experiments.runs.command import GroupedCommand
from attnreg.experiments.runs.options import option, together
from attnreg.experiments.runs.settings import OUTPUT, shared_options

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.experiments.compare.planned import PlannedRun
    from attnreg.experiments.compare.study import Study

COMPARISON, RUNNING = "Comparison", "Running"
_OPTIONS = (
    option("--seeds", group=COMPARISON, type=click.IntRange(min=1), default=5,
           help="Number of seeds."),
    option("--first-seed", group=COMPARISON, type=click.IntRange(min=0), default=0,
           help="First seed; the others follow it."),
    option("--baseline", group=COMPARISON,
           help="Method that the others are compared with (default: finetune if given, else the first)."),
    option("--equal-time/--no-equal-time", group=COMPARISON, default=True,
           help="Also train the baseline for as long as each method that takes at least 10 % longer."),
    option("--search-seeds", group=COMPARISON, type=click.IntRange(min=1), default=1,
           help="Seeds on which each combination of values in braces is tried."),
    option("--search-rows", group=COMPARISON, type=click.IntRange(min=1), default=500,
           help="Rows held out from train to select values in braces."),
    option("--jobs", group=RUNNING, type=click.IntRange(min=1),
           help="Runs at a time on this machine (default: cores / threads, at most four; one on a GPU)."),
    option("--threads", group=RUNNING, type=click.IntRange(min=1), default=1,
           help="CPU threads per run; results may differ in the last digits."),
    option("--launcher", group=RUNNING, type=click.Choice(["local", "ray", "commands"]), default="local",
           help="Run on this machine, on a Ray cluster, or print commands for your scheduler."),
    option("--keep-models", group=OUTPUT, is_flag=True, help="Keep the model of every run but those of a search."),
    option("--output-dir", group=OUTPUT, type=click.Path(path_type=Path),
           help="Folder for the results (default: runs/compare-TASK)."),
)  # fmt: skip
_OF_STUDY = ("first_seed", "equal_time", "search_seeds", "search_rows", "keep_models")
_OWN = ("baseline", "jobs", "threads", "launcher", "output_dir", *_OF_STUDY)
EPILOG = "Example: attnreg compare finetune attendout 'ad-drop --q {0.1,0.3}' --task cola --seeds 5"


@click.command("compare", cls=GroupedCommand, epilog=EPILOG)
@click.argument("methods", nargs=-1, required=True, metavar="METHOD...")
@together((*_OPTIONS, *shared_options("task", "all")))
def compare(methods: tuple[str, ...], seeds: int, **options: Any) -> None:
    """Compare training methods over several seeds.

    METHOD is a recipe, or a recipe and its own options in quotes (see the example); 'NAME=RECIPE --options' gives it a
    short name for the tables, figures and folders. All methods use the same data, row
    order, initial classifier and evaluation. Values in braces are tried on rows held out from train, and the best one
    runs with all seeds.

    To continue after a stop, or to add seeds or methods, run the command again; finished runs are reused.
    """
    from rich.console import Console

    from attnreg.experiments.compare.method import Method, common_options
    from attnreg.experiments.compare.study import Study

    own = {name: options.pop(name) for name in _OWN}
    if own["jobs"] is not None and own["launcher"] != "local":
        raise UsageError(f"--jobs is only for --launcher local: remove it for --launcher {own['launcher']}.")
    chosen = [Method.parse(text) for text in methods]
    default = next((method for method in chosen if method.words[0] == "finetune"), chosen[0])
    wanted = own["baseline"]
    named = (method for method in chosen if wanted in (method.name, method.text, method.typed))
    baseline = default if wanted is None else next(named, None)
    if baseline is None:
        raise UsageError(f"Expected --baseline to be one of the methods, got {wanted!r}.")
    study = Study(
        methods=chosen,
        baseline=baseline,
        options=common_options(_given(options)),
        seeds=seeds,
        folder=own["output_dir"] or Path("runs") / f"compare-{options['task']}",
        **{name: own[name] for name in _OF_STUDY},
    )
    study.check()
    with study.begun():
        trouble = None
        if own["launcher"] == "commands":
            if _print(study, own["threads"]):
                return
        else:
            trouble = _make(study, own, options["device"] == "cpu", Console())
        for run in study.runs():
            run.tidy()  # runs from elsewhere, or from a comparison that was killed, are not tidy yet
        _show(study, Console())
        if trouble is not None:
            raise InputError(trouble)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, and the task; a recipe may have other defaults."""
    source = click.get_current_context().get_parameter_source
    default = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if name == "task" or source(name) is not default}


def _print(study: Study, threads: int) -> bool:
    """Print commands for the unfinished runs; return whether there are any."""
    from attnreg.experiments.compare.launch import commands

    for text in study.set_outdated_aside():
        click.echo(text, err=True)
    if pending := [run for run in study.runs() if not run.finished]:
        count = commands(pending, threads, click.echo)
        text = f"{count} runs to start, {len(pending) - count} running. Repeat this command when they have finished."
        click.echo(text, err=True)
    return bool(pending)


def _make(study: Study, own: dict[str, Any], on_cpu: bool, console: Console) -> str | None:
    """Make the runs; return why some have not finished, if so."""
    from attnreg.experiments.compare.board import Board
    from attnreg.experiments.compare.launch import local, ray

    jobs = own["jobs"] or _usual_jobs(own["threads"], on_cpu)
    launch = local(jobs, own["threads"]) if own["launcher"] == "local" else ray(own["threads"], on_cpu)
    tried: set[PlannedRun] = set()
    while pending := [run for run in _pending(study, console) if run not in tried]:
        tried.update(pending)  # a run that fails is not made again, until the command is repeated
        with Board(study.runs(), jobs if own["launcher"] == "local" else len(pending), console) as board:
            try:
                launch(pending, board)
            except KeyboardInterrupt:
                return "Stopped. Repeat the command to continue."
        study.decide()
    failed = [run for run in study.runs() if run.failure is not None]
    if not failed:
        return None
    return f"{len(failed)} of the runs failed. The log of the first, {failed[0].log}, ends with: {failed[0].failure}"


def _pending(study: Study, console: Console) -> list[PlannedRun]:
    """Return the runs to make; say which have become outdated."""
    for text in study.set_outdated_aside():
        console.print(text, highlight=False, soft_wrap=True)
    return [run for run in study.runs() if not run.finished]


def _usual_jobs(threads: int, on_cpu: bool) -> int:
    import torch

    if torch.cuda.is_available() and not on_cpu:
        return 1  # parallel runs would share the GPU's memory
    return max(1, min(4, (os.cpu_count() or 1) // threads))


def _show(study: Study, console: Console) -> None:
    from attnreg.experiments.compare.incomplete import incomplete
    from attnreg.experiments.compare.report import write_report
    from attnreg.experiments.runs.reporting import print_table

    shown = write_report(study)
    for table in shown:
        print_table(console, table.header, table.rows, table.texts)
    if not shown:
        return
    for block in incomplete(study):
        console.print(block.text.replace("*", ""), highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"Report saved to {study.folder}/report.md and {study.folder}/report.html.", highlight=False, soft_wrap=True
    )
