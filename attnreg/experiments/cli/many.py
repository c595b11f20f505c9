"""``attnreg compare METHOD...`` and ``attnreg search``: the commands that make many runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from attnreg.arguments import LARGEST_WHOLE
from attnreg.errors import StoppedError
from attnreg.experiments.folder.run_folder import free_folder
from attnreg.experiments.options.files import find_study, recipe_files
from attnreg.experiments.options.option import (
    COMPARE,
    GroupedCommand,
    check_pairs,
    flag_of,
    is_given,
    names_like,
    option,
    together,
)
from attnreg.experiments.options.settings import OUTPUT, RUNNING, THREADS, data_name, shared_options, task_of
from attnreg.experiments.runs.command import load_command

_THREADS = option(
    "--threads", group=RUNNING, type=THREADS, default=1,
    help="CPU threads per run; results may differ in the last digits.",
)  # fmt: skip


def jobs_option(noun: str) -> Callable[[Any], Any]:
    """Return the option for the number of runs, or trials, at a time."""
    default = "(default: cores / threads, at most four; one on a GPU)."
    return option("--jobs", group=RUNNING, type=click.IntRange(min=1), help=f"{noun} {default}")


def of_all_runs(command: str) -> list[Callable[[Any], Any]]:
    """Return the options that all runs share, and the option of the output folder."""
    folder = option(
        "--output-dir", group=OUTPUT, type=click.Path(path_type=Path),
        help=f"Folder for the results (default: runs/{command}-TASK; of a custom task, the data's name).",
    )  # fmt: skip
    return [folder, *shared_options("task", "all")]


def typed_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the user typed; a recipe may have other defaults."""
    return {name: value for name, value in options.items() if is_given(name)}


COMPARISON = "Comparison"
_DESIGN = ("seeds", "first_seed", "equal_time", "search_seeds", "search_rows", "keep_models")
_OPTIONS = (
    option("--baseline", group=COMPARISON,
           help="Method that the others are compared with (default: finetune if it is one of them, else the first)."),
    option("--seeds", group=COMPARISON, type=click.IntRange(min=1), default=5, help="Number of seeds."),
    option("--first-seed", group=COMPARISON, type=click.IntRange(min=0), default=0,
           help="First seed; the others follow it."),
    option("--equal-time/--no-equal-time", group=COMPARISON, default=True,
           help="Also train the baseline for as long as a method that takes at least 10 % longer."),
    option("--search-seeds", group=COMPARISON, type=click.IntRange(min=1), default=1,
           help="Seeds on which a combination of values in braces is tried."),
    option("--search-rows", group=COMPARISON, type=click.IntRange(min=1), default=500,
           help="Rows held out from train to select values in braces."),
    jobs_option("Runs at a time on this machine"),
    _THREADS,
    option("--launcher", group=RUNNING, type=click.Choice(["local", "commands"]), default="local",
           help="Run on this machine, or print commands for your scheduler."),
    option("--keep-models", group=OUTPUT, is_flag=True, help="Keep the model of every run but those of a search."),
    option("--study", group=COMPARISON,
           help="Study with methods, tasks and options: a YAML file, or a name of `attnreg list studies`. METHODs "
                "beside it are added, options replace those of the study."),
    option("--dry-run", group=RUNNING, is_flag=True, help="Print the runs and, if some have finished, their time."),
    *of_all_runs("compare"),
)  # fmt: skip
_OF_MAKING = ("jobs", "threads", "launcher", "dry_run", "output_dir")
_OF_COMMAND = ("baseline", "study", *_OF_MAKING, *_DESIGN)
_COMPARE = "Example: attnreg compare finetune attendout 'ad-drop --q {0.1,0.3}' --task cola --seeds 5"


class _Compare(GroupedCommand):
    def instead(self, ctx: click.Context, flag: str, typed: Sequence[str]) -> str:
        """Say to put an option of a method in quotes with the method."""
        from attnreg.experiments.compare.method import OF_ALL

        if flag == "--validation-rows":
            return " To score on rows of train, use --folds N, or `validation_rows: N` for a task of a study file."
        for name in (word.partition(" ")[0].rpartition("=")[2] for word in typed):
            is_recipe = name in recipe_files() or (name.endswith(".py") and Path(name).is_file())
            params = load_command(name).params if is_recipe else []
            if any(flag in param.opts and param.name not in OF_ALL for param in params):
                return f" Put a method's options in quotes with the method, as in '{name} {flag} ...'."
        return super().instead(ctx, flag, typed)


@click.command("compare", cls=_Compare, epilog=_COMPARE)
@click.argument("methods", nargs=-1, metavar="[METHOD...]", shell_complete=names_like(recipe_files))
@together(_OPTIONS)
def compare(methods: tuple[str, ...], **options: Any) -> None:
    """Compare training methods over several seeds.

    METHOD is a recipe, or a recipe and its options in quotes (see the example); 'NAME=RECIPE --options' gives it a
    short name for the tables, figures and folders. All methods use the same data, row order, initial classifier and
    evaluation. Values in braces are tried on rows held out from train, and the best one runs with all seeds. A study
    file (--study) does this on several tasks.

    To continue after a stop, or to add seeds or methods, run the command again; finished runs are reused.
    """
    from attnreg.experiments.compare.study import Study, read_study, typed_study

    typed = typed_options(click.get_current_context().params)
    chosen = {name: options.pop(name) for name in _OF_COMMAND}
    file = chosen["study"]
    check_pairs(chosen, COMPARE, flag_of)
    changed = {name: value for name, value in typed.items() if name not in ("study", *_OF_MAKING)}
    of_runs = {**typed_options(options), "task": options["task"]}

    def study_in(path: Path | None) -> Study:
        if file is not None:
            return read_study(find_study(file), path, changed)
        path = path or Path("runs") / f"compare-{data_name(options['task'], options['data_dir'])}"
        return typed_study(methods, chosen["baseline"], of_runs, path, {name: chosen[name] for name in _DESIGN})

    study = study_in(chosen["output_dir"])
    study.check_methods()
    folder, folder_note = free_folder(study.folder, "runs", lambda path: study_in(path).other_options)
    study = study_in(folder)
    for note in (*study.notes, *filter(None, [folder_note])):
        click.echo(note, err=True)
    study.check_folder()
    from attnreg.experiments.compare.make import describe, make  # late: they are slow to import

    if chosen["dry_run"]:
        describe(study)
    else:
        make(study, chosen["launcher"], chosen["jobs"], chosen["threads"], of_file=file is not None)


SEARCH = "Search"
_TRIALS = (
    option("--space", group=SEARCH, metavar="FILE.yaml|YAML",
           help="What to vary, as YAML: options, providers, or both (default: compositions of five providers)."),
    option("--runs", group=SEARCH, type=click.IntRange(min=1), default=30,
           help="Budget: the largest number of runs."),
    option("--seeds", group=SEARCH, type=click.IntRange(min=1), default=3,
           help="Seeds per trial."),
    option("--search-rows", group=SEARCH, type=click.IntRange(min=1), default=500,
           help="Rows held out from train to score trials on."),
    option("--sampler-seed", group=SEARCH, type=click.IntRange(0, LARGEST_WHOLE), default=0,
           help="Seed of the draws; with the same --jobs, the same seed repeats a search."),
    jobs_option("Trials at a time"),
    _THREADS,
    *of_all_runs("search"),
)  # fmt: skip
_SEARCH = "Example: attnreg search --task cola --runs 60 --space 'providers: {DropHead: {p: 0.05..0.5}}'"


@click.command("search", cls=GroupedCommand, epilog=_SEARCH)
@together(_TRIALS)
def search(space: str | None, jobs: int | None, threads: int, output_dir: Path | None, **options: Any) -> None:
    """Search for good options and compositions of providers.

    Trials are drawn with optuna and scored on rows held out from train. The winner is saved for `attnreg compare`.

    To continue after a stop, or with more --runs, run the command again; finished runs are not repeated.
    """
    from attnreg.experiments.compare.method import Method, typed_words
    from attnreg.experiments.compare.planned import HeldOut
    from attnreg.experiments.compare.search.space import read_space

    design = {name: options.pop(name) for name in ("runs", "seeds", "search_rows", "sampler_seed")}
    of_runs, varied = {**typed_options(options), "task": options["task"]}, read_space(space)
    folder = output_dir or Path("runs") / f"search-{data_name(options['task'], options['data_dir'])}"
    held_out = HeldOut(of_runs, folder, design["seeds"], design["search_rows"])
    held_out.runs(Method("finetune"))[0].check_paths()
    held_out.runs(Method("finetune"))[0].check_data()
    from rich.console import Console  # late, as all these: they are slow to import

    from attnreg.experiments.compare.make import STOPPED, local, usual_jobs
    from attnreg.experiments.compare.search.trials import Search, write_report
    from attnreg.experiments.results.document import say

    def search_in(path: Path) -> Search:
        return Search(varied, replace(held_out, folder=path), design["runs"], design["sampler_seed"])

    folder, note = free_folder(folder, "a search", lambda path: search_in(path).other_options)
    if note is not None:
        click.echo(note, err=True)
    model = _model(options) if varied.providers else None
    layers = getattr(model.config, "num_hidden_layers", None) if model is not None else None
    planned = replace(search_in(folder), space=replace(varied, layers=layers))
    planned.check(model)
    del model
    console, stopped = Console(), False
    jobs = jobs or usual_jobs(threads, options["device"] == "cpu")
    words = typed_words({**of_runs, "space": space, **design, "jobs": jobs, "output_dir": folder})
    with planned.begun() as trials:
        try:
            planned.make(trials, local(jobs, threads), jobs, console)
        except KeyboardInterrupt:
            stopped = True
        say(console, *write_report(planned, trials, ["attnreg", "search", *words]))
        if stopped:
            raise StoppedError(STOPPED, exit_code=128 + signal.SIGINT)


def _model(options: dict[str, Any]) -> Any:
    """Load the model of the task, to check providers with it."""
    from attnreg.experiments.tasks.models.pretrained import load_model

    task = task_of(options)
    labels = task.labels or ("0", "1")  # providers do not depend on the head
    return load_model(replace(task, labels=labels), options["model"])[0]
