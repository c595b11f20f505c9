"""``attnreg compare METHOD...``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from attnreg.errors import UsageError
from attnreg.experiments.cli.shared import RUNNING, THREADS, given, jobs_option, of_all_runs
from attnreg.experiments.options.catalogue import find_study, recipe_files
from attnreg.experiments.options.option import GroupedCommand, argument, names_like, option, together
from attnreg.experiments.options.settings import OUTPUT, data_name
from attnreg.experiments.runs.command import load_command

COMPARISON = "Comparison"
_COMPARISON = "attnreg.experiments.compare.comparison:Comparison"
_DESIGN = ("seeds", "first_seed", "equal_time", "search_seeds", "search_rows", "keep_models")
_OPTIONS = (
    option("--baseline", group=COMPARISON,
           help="Method that the others are compared with (default: finetune if given, else the first)."),
    *(argument(_COMPARISON, name, group=COMPARISON) for name in _DESIGN[:-1]),
    jobs_option("Runs at a time on this machine"),
    THREADS,
    option("--launcher", group=RUNNING, type=click.Choice(["local", "ray", "commands"]), default="local",
           help="Run on this machine, on a Ray cluster, or print commands for your scheduler."),
    argument(_COMPARISON, _DESIGN[-1], group=OUTPUT),
    option("--study", group=COMPARISON,
           help="Study with methods, tasks and options: a YAML file, or a name of `attnreg list studies`. METHODs "
                "beside it are added, options replace its own."),
    option("--scale", group=COMPARISON, type=click.Choice(["full", "small"]), default="full",
           help="Size of a study: small takes few rows, epochs and values in braces, and one seed."),
    option("--dry-run", group=RUNNING, is_flag=True, help="Print the runs and, if some have finished, their time."),
    *of_all_runs("compare"),
)  # fmt: skip
_OF_STUDY, _OF_MAKING = ("study", "scale"), ("jobs", "threads", "launcher", "dry_run", "output_dir")
_OWN = ("baseline", *_OF_STUDY, *_OF_MAKING, *_DESIGN)
EPILOG = "Example: attnreg compare finetune attendout 'ad-drop --q {0.1,0.3}' --task cola --seeds 5"


class _Compare(GroupedCommand):
    def instead(self, ctx: click.Context, flag: str, typed: Sequence[str]) -> str:
        """Say to put an option of a method in quotes with the method."""
        from attnreg.experiments.compare.method import OF_ALL

        if flag == "--validation-rows":
            return " To score on rows of train, use --folds N, or `validation_rows: N` for a task of a study file."
        for name in (word.partition(" ")[0].rpartition("=")[2] for word in typed):
            is_recipe = name in recipe_files() or (name.endswith(".py") and Path(name).is_file())
            params = load_command(name).params if is_recipe else []
            if any(flag in each.opts and each.name not in OF_ALL for each in params):
                return f" Put a method's options in quotes with the method, as in '{name} {flag} ...'."
        return super().instead(ctx, flag, typed)


@click.command("compare", cls=_Compare, epilog=EPILOG)
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
    from attnreg.experiments.compare.make import describe, make
    from attnreg.experiments.compare.study import read_study, typed_study
    from attnreg.experiments.setup.trackers import check_trackers

    check_trackers(options["report_to"])
    typed = given(click.get_current_context().params)
    own = {name: options.pop(name) for name in _OWN}
    file, folder = own["study"], own["output_dir"]
    if own["jobs"] is not None and own["launcher"] != "local":
        raise UsageError(f"--jobs is only for --launcher local: remove it for --launcher {own['launcher']}.")
    if file is None and own["scale"] != "full":
        raise UsageError("--scale is for --study: remove it.")
    if file is None:
        folder = folder or Path("runs") / f"compare-{data_name(options['task'], options['data_dir'])}"
        of_runs = {**given(options), "task": options["task"]}
        study = typed_study(methods, own["baseline"], of_runs, folder, {name: own[name] for name in _DESIGN})
    else:
        if own["baseline"]:
            raise UsageError("--baseline belongs into the study file: remove it, or remove --study.")
        changed = {name: value for name, value in typed.items() if name not in (*_OF_STUDY, *_OF_MAKING)}
        study = read_study(find_study(file), folder, changed, small=own["scale"] == "small")
        for note in study.notes:
            click.echo(note, err=True)
    for comparison in study.comparisons.values():
        comparison.check()
    if own["dry_run"]:
        describe(study)
    else:
        make(study, own["launcher"], own["jobs"], own["threads"], of_file=file is not None)
