"""``attnreg compare METHOD...``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

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
from attnreg.experiments.options.settings import OUTPUT, RUNNING, data_name, shared_options
from attnreg.experiments.runs.command import load_command

COMPARISON = "Comparison"
_DESIGN = ("seeds", "first_seed", "equal_time", "search_seeds", "search_rows", "keep_models")
_OPTIONS = (
    option("--baseline", group=COMPARISON,
           help="Method that the others are compared with (default: finetune if given, else the first)."),
    option("--seeds", group=COMPARISON, type=click.IntRange(min=1), default=5, help="Number of seeds."),
    option("--first-seed", group=COMPARISON, type=click.IntRange(min=0), default=0,
           help="First seed; the others follow it."),
    option("--equal-time/--no-equal-time", group=COMPARISON, default=True,
           help="Also train the baseline for as long as a method that takes at least 10 % longer."),
    option("--search-seeds", group=COMPARISON, type=click.IntRange(min=1), default=1,
           help="Seeds on which a combination of values in braces is tried."),
    option("--search-rows", group=COMPARISON, type=click.IntRange(min=1), default=500,
           help="Rows held out from train to select values in braces."),
    option("--jobs", group=RUNNING, type=click.IntRange(min=1),
           help="Runs at a time on this machine (default: cores / threads, at most four; one on a GPU)."),
    option("--threads", group=RUNNING, type=click.IntRange(min=1), default=1,
           help="CPU threads per run; results may differ in the last digits."),
    option("--launcher", group=RUNNING, type=click.Choice(["local", "commands"]), default="local",
           help="Run on this machine, or print commands for your scheduler."),
    option("--keep-models", group=OUTPUT, is_flag=True, help="Keep the model of every run but those of a search."),
    option("--study", group=COMPARISON,
           help="Study with methods, tasks and options: a YAML file, or a name of `attnreg list studies`. METHODs "
                "beside it are added, options replace its own."),
    option("--dry-run", group=RUNNING, is_flag=True, help="Print the runs and, if some have finished, their time."),
    option("--output-dir", group=OUTPUT, type=click.Path(path_type=Path),
           help="Folder for the results (default: runs/compare-TASK; of a custom task, the data's name)."),
    *shared_options("task", "all"),
)  # fmt: skip
_OF_MAKING = ("jobs", "threads", "launcher", "dry_run", "output_dir")
_OWN = ("baseline", "study", *_OF_MAKING, *_DESIGN)
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

    METHOD is a recipe, or a recipe and its own options in quotes (see the example); 'NAME=RECIPE --options' gives it a
    short name for the tables, figures and folders. All methods use the same data, row order, initial classifier and
    evaluation. Values in braces are tried on rows held out from train, and the best one runs with all seeds. A study
    file (--study) does this on several tasks.

    To continue after a stop, or to add seeds or methods, run the command again; finished runs are reused.
    """
    from attnreg.experiments.compare.study import Study, read_study, typed_study

    # Only what was given: a recipe may have other defaults.
    typed = {name: value for name, value in click.get_current_context().params.items() if is_given(name)}
    chosen = {name: options.pop(name) for name in _OWN}
    file, folder = chosen["study"], chosen["output_dir"]
    check_pairs(chosen, COMPARE, flag_of)
    changed = {name: value for name, value in typed.items() if name not in ("study", *_OF_MAKING)}
    of_runs = {**{name: value for name, value in options.items() if name in typed}, "task": options["task"]}

    def study_in(place: Path | None) -> Study:
        if file is not None:
            return read_study(find_study(file), place, changed)
        place = place or Path("runs") / f"compare-{data_name(options['task'], options['data_dir'])}"
        return typed_study(methods, chosen["baseline"], of_runs, place, {name: chosen[name] for name in _DESIGN})

    first = study_in(folder)
    first.check_methods()
    place, note_of_folder = free_folder(first.folder, "runs", lambda place: study_in(place).other_options)
    study = study_in(place)
    for note in (*study.notes, *filter(None, [note_of_folder])):
        click.echo(note, err=True)
    study.check_folder()
    from attnreg.experiments.compare.make import describe, make  # late: they are slow to import

    if chosen["dry_run"]:
        describe(study)
    else:
        make(study, chosen["launcher"], chosen["jobs"], chosen["threads"], of_file=file is not None)
