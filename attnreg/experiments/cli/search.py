"""``attnreg search``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from attnreg.arguments import LARGEST_WHOLE
from attnreg.errors import InputError
from attnreg.experiments.cli.shared import THREADS, given, jobs_option, of_all_runs
from attnreg.experiments.options.option import GroupedCommand, option, together
from attnreg.experiments.options.settings import TASK_OPTIONS, data_name

SEARCH = "Search"
_OPTIONS = (
    option("--space", group=SEARCH, metavar="FILE.yaml|YAML",
           help="What to vary, as YAML: options, providers, or both (default: compositions of five providers)."),
    option("--runs", group=SEARCH, type=click.IntRange(min=1), default=30,
           help="Budget: the largest number of runs."),
    option("--seeds", group=SEARCH, type=click.IntRange(min=1), default=3,
           help="Seeds of each trial."),
    option("--search-rows", group=SEARCH, type=click.IntRange(min=1), default=500,
           help="Rows held out from train to score trials on."),
    option("--sampler-seed", group=SEARCH, type=click.IntRange(0, LARGEST_WHOLE), default=0,
           help="Seed of the draws; with the same --jobs, the same seed repeats a search."),
    jobs_option("Trials at a time"),
    THREADS,
    *of_all_runs("search"),
)  # fmt: skip
EPILOG = "Example: attnreg search --task cola --runs 60 --space 'providers: {DropHead: {p: 0.05..0.5}}'"


@click.command("search", cls=GroupedCommand, epilog=EPILOG)
@together(_OPTIONS)
def search(space: str | None, jobs: int | None, threads: int, output_dir: Path | None, **options: Any) -> None:
    """Search for good options and compositions of providers.

    Trials are drawn with optuna and scored on rows held out from train. The winner is saved for `attnreg compare`.

    To continue after a stop, or with more --runs, run the command again; finished runs are not repeated.
    """
    from rich.console import Console

    from attnreg.experiments.compare import launch
    from attnreg.experiments.compare.held_out import HeldOut
    from attnreg.experiments.compare.method import typed_words
    from attnreg.experiments.compare.report.search import write_report
    from attnreg.experiments.compare.search.space import read_space
    from attnreg.experiments.compare.search.trials import Search
    from attnreg.experiments.results.document import say

    own = {name: options.pop(name) for name in ("runs", "seeds", "search_rows", "sampler_seed")}
    of_runs, varied = {**given(options), "task": options["task"]}, read_space(space)
    model = _model(options) if varied.providers else None
    layers = getattr(model.config, "num_hidden_layers", None) if model is not None else None
    folder = output_dir or Path("runs") / f"search-{data_name(options['task'], options['data_dir'])}"
    held_out = HeldOut(of_runs, folder, own["seeds"], own["search_rows"])
    made = Search(replace(varied, layers=layers), held_out, own["runs"], own["sampler_seed"])
    made.check(model)
    del model
    console, stopped = Console(), False
    jobs = jobs or launch.usual_jobs(threads, options["device"] == "cpu")
    words = typed_words({**of_runs, "space": space, **own, "jobs": jobs, "output_dir": folder})
    with made.begun() as trials:
        try:
            made.make(trials, launch.local(jobs, threads), jobs, console)
        except KeyboardInterrupt:
            stopped = True
        say(console, *write_report(made, trials, ["attnreg", "search", *words]))
        if stopped:
            raise InputError("Stopped. Repeat the command to continue.")


def _model(options: dict[str, Any]) -> Any:
    """Load the model of the task, to check providers with it."""
    from attnreg.experiments.tasks.built_in import choose_task
    from attnreg.experiments.tasks.models.pretrained import load_model

    task = choose_task(options["task"], **{name: options[name] for name in TASK_OPTIONS})
    labels = task.labels or ("0", "1")  # providers do not depend on the head
    return load_model(replace(task, labels=labels), options["model"])[0]
