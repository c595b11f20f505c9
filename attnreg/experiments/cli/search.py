"""``attnreg search``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnreg.errors import InputError
from attnreg.experiments.cli.shared import given, without_rows
from attnreg.experiments.options.option import GroupedCommand, option, together
from attnreg.experiments.options.settings import OUTPUT, TASK_OPTIONS, data_name, shared_options

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.experiments.compare.search.rounds import Search
    from attnreg.experiments.compare.search.trials import Trials

SEARCH, RUNNING = "Search", "Running"
_OPTIONS = (
    option("--space", group=SEARCH, metavar="FILE.yaml|YAML",
           help="What to vary, as YAML: options, providers, or both (default: compositions of five providers)."),
    option("--runs", group=SEARCH, type=click.IntRange(min=1), default=30,
           help="Budget: the largest number of runs."),
    option("--seeds", group=SEARCH, type=click.IntRange(min=1), default=3,
           help="Seeds of a trial, run one after another."),
    option("--search-rows", group=SEARCH, type=click.IntRange(min=1), default=500,
           help="Rows held out from train to score trials on."),
    option("--prune-p", group=SEARCH, type=click.FloatRange(0, 1), default=0.3,
           help="Stop a trial that is worse than the best one with p below this (Wilcoxon's test over seeds)."),
    option("--sampler-seed", group=SEARCH, type=click.IntRange(0, 2**31 - 1), default=0,
           help="Seed of the draws; with the same --jobs, the same seed repeats a search."),
    option("--jobs", group=RUNNING, type=click.IntRange(min=1),
           help="Trials at a time (default: cores / threads, at most four; one on a GPU)."),
    option("--threads", group=RUNNING, type=click.IntRange(min=1), default=1,
           help="CPU threads per run; results may differ in the last digits."),
    option("--output-dir", group=OUTPUT, type=click.Path(path_type=Path),
           help="Folder for the results (default: runs/search-TASK; of a custom task, the data's name)."),
)  # fmt: skip
EPILOG = "Example: attnreg search --task cola --runs 60 --space 'providers: {DropHead: {p: 0.05..0.5}}'"


@click.command("search", cls=GroupedCommand, epilog=EPILOG)
@together((*_OPTIONS, *shared_options("task", "all"), without_rows("use --search-rows")))
def search(
    space: str | None,
    seeds: int,
    search_rows: int,
    jobs: int | None,
    threads: int,
    output_dir: Path | None,
    **options: Any,
) -> None:
    """Search for good options and compositions of providers.

    Trials are drawn with optuna and scored on rows held out from train. The winner is saved for `attnreg compare`.

    To continue after a stop, or with more --runs, run the command again; finished runs are not repeated.
    """
    from rich.console import Console

    from attnreg.experiments.compare import launch
    from attnreg.experiments.compare.held_out import HeldOut
    from attnreg.experiments.compare.method import common_options
    from attnreg.experiments.compare.search.rounds import Search
    from attnreg.experiments.compare.search.space import read_space

    read = read_space(space)
    model = _model(options) if read.candidates else None
    folder = output_dir or Path("runs") / f"search-{data_name(options['task'], options['data_dir'])}"
    own = {name: options.pop(name) for name in ("runs", "sampler_seed", "prune_p")}
    held_out = HeldOut(common_options(given(options)), folder, seeds, search_rows)
    made = Search(read, _layers(model) if read.needs_layers else None, held_out, **own)
    made.check(model)
    del model
    console, stopped = Console(), False
    jobs = jobs or launch.usual_jobs(threads, options["device"] == "cpu")
    with made.begun() as trials:
        try:
            made.make(trials, launch.local(jobs, threads), jobs, console)
        except KeyboardInterrupt:
            stopped = True
        _show(made, trials, console, _words(made, space, jobs))
        if stopped:
            raise InputError("Stopped. Repeat the command to continue.")


def _model(options: dict[str, Any]) -> Any:
    """Load the model of the task, to check providers with it."""
    from attnreg.experiments.tasks.choice import choose_task
    from attnreg.experiments.tasks.models.pretrained import load_model

    task = choose_task(options["task"], **{name: options[name] for name in TASK_OPTIONS})
    labels = task.labels or ("0", "1")  # providers do not depend on the head
    return load_model(replace(task, labels=labels), options["model"])[0]


def _layers(model: Any) -> int:
    layers = getattr(model.config, "num_hidden_layers", None)
    if layers is None:
        raise InputError("The number of layers of the model is unknown: give `layers: [all, first, last]` in --space.")
    return int(layers)


def _show(made: Search, trials: Trials, console: Console, command: Sequence[str]) -> None:
    from attnreg.experiments.compare.report import search as report
    from attnreg.experiments.results.document import print_table, say

    table, winner = report.write_report(made, trials, command), made.winner(trials)
    if table is None or winner is None:
        if failed := [trial for trial in trials.all if trial.failure is not None]:
            raise InputError(f"No trial has finished. trial-{failed[0].number} failed: {failed[0].failure}")
        return
    print_table(console, table)
    say(console, report.summary(made, trials), "The winner as a method of `attnreg compare`:")
    by_folder, pasted = report.to_compare(made, winner)
    say(console, pasted, f"or {by_folder}")
    say(console, f"Report saved to {made.held_out.folder}/report.md and report.html.")


def _words(made: Search, space: str | None, jobs: int) -> list[str]:
    """Return the words of this command, defaults included."""
    each = made.held_out
    words = ["attnreg", "search", *each.options, *([] if space is None else ["--space", space])]
    numbers: dict[str, object] = {"runs": made.runs, "seeds": each.seeds, "search-rows": each.rows}
    numbers |= {"prune-p": made.prune_p, "sampler-seed": made.sampler_seed, "jobs": jobs, "output-dir": each.folder}
    return [*words, *(word for name, value in numbers.items() for word in (f"--{name}", str(value)))]
