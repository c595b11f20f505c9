"""``attnreg compare METHOD...``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnreg.errors import UsageError
from attnreg.experiments.cli.shared import RUNNING, THREADS, given, jobs_option, of_all_runs
from attnreg.experiments.options.catalogue import find_study, recipe_files
from attnreg.experiments.options.option import GroupedCommand, argument, names_like, option, together
from attnreg.experiments.options.settings import OUTPUT, data_name
from attnreg.experiments.runs.command import load_command

if TYPE_CHECKING:
    from attnreg.experiments.compare.study import Study

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
    option("--write-study", group=COMPARISON, type=click.Path(path_type=Path),
           help="Write this comparison as a YAML file for --study, and end."),
    option("--dry-run", group=RUNNING, is_flag=True, help="Print the runs and an estimate of their time, and end."),
    *of_all_runs("compare", "use --folds to score on rows of train"),
)  # fmt: skip
_OF_STUDY, _OF_MAKING = ("study", "scale"), ("jobs", "threads", "launcher", "dry_run", "output_dir")
_OWN = ("baseline", "write_study", *_OF_STUDY, *_OF_MAKING, *_DESIGN)
EPILOG = "Example: attnreg compare finetune attendout 'ad-drop --q {0.1,0.3}' --task cola --seeds 5"


class _Compare(GroupedCommand):
    def instead(self, ctx: click.Context, flag: str, typed: Sequence[str]) -> str:
        """Say to put an option of a method in quotes with the method; the last one before the option, if several."""
        from attnreg.experiments.compare.method import OF_ALL

        place = next((number for number, word in enumerate(typed) if word.partition("=")[0] == flag), len(typed))
        for method in (*reversed(typed[:place]), *typed[place:]):
            name = method.partition(" ")[0].rpartition("=")[2]
            if name not in recipe_files() and not (name.endswith(".py") and Path(name).is_file()):
                continue
            found = next((each for each in load_command(name).params if flag in each.opts), None)
            if found is not None and found.name not in OF_ALL:
                takes_value = typed[place] == flag and not getattr(found, "is_flag", False)
                words = [shlex.quote(word) for word in typed[place : place + 1 + takes_value]]
                whole = " ".join([method, *words])
                mark = '"' if "'" in whole else "'"
                return f" Put a method's options in quotes with the method: {mark}{whole}{mark}."
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
    from attnreg.experiments.setup.trackers import check_trackers

    check_trackers(options["report_to"])
    own = {name: options.pop(name) for name in _OWN}
    if own["jobs"] is not None and own["launcher"] != "local":
        raise UsageError(f"--jobs is only for --launcher local: remove it for --launcher {own['launcher']}.")
    if own["study"] is None and own["scale"] != "full":
        raise UsageError("--scale is for --study: remove it.")
    study = _from_command(own, methods, options) if own["study"] is None else _from_file(own)
    for comparison in study.comparisons.values():
        comparison.check()
    if own["write_study"] is not None:
        _write(study, own["write_study"])
        return
    from attnreg.experiments.compare.make import describe, make

    if own["dry_run"]:
        describe(study)
    else:
        make(study, own["launcher"], own["jobs"], own["threads"], of_file=own["study"] is not None)


def _from_command(own: dict[str, Any], methods: tuple[str, ...], options: dict[str, Any]) -> Study:
    from attnreg.experiments.compare.comparison import Comparison
    from attnreg.experiments.compare.method import Method, default_baseline
    from attnreg.experiments.compare.study import Study

    if not methods:
        raise UsageError("Expected METHODs to compare, or --study FILE.")
    chosen = [Method.parse(text) for text in methods]
    wanted = own["baseline"]
    named = (method for method in chosen if wanted in (method.name, method.text, method.typed))
    baseline = default_baseline(chosen) if wanted is None else next(named, None)
    if baseline is None:
        raise UsageError(f"Expected --baseline to be one of the methods, got {wanted!r}.")
    folder = own["output_dir"] or Path("runs") / f"compare-{data_name(options['task'], options['data_dir'])}"
    design, task = {name: own[name] for name in _DESIGN}, options["task"]
    return Study({task: Comparison(chosen, baseline, {**given(options), "task": task}, folder, **design)}, folder)


def _from_file(own: dict[str, Any]) -> Study:
    from attnreg.experiments.compare.study import read_study

    for name in ("baseline", "write_study"):
        if own[name]:
            raise UsageError(f"--{name.replace('_', '-')} belongs into the study file: remove it, or remove --study.")
    typed = given(click.get_current_context().params)
    changed = {name: value for name, value in typed.items() if name not in (*_OF_STUDY, *_OF_MAKING)}
    study = read_study(find_study(own["study"]), own["output_dir"], changed, small=own["scale"] == "small")
    for note in study.notes:
        click.echo(note, err=True)
    return study


def _write(study: Study, path: Path) -> None:
    from attnreg._files import replaced_file
    from attnreg.experiments.compare.study import written

    if path.exists():
        raise UsageError(f"{path} exists: choose another file for --write-study.")
    (comparison,) = study.comparisons.values()
    if len(comparison.options.get("report_to", ())) > 1:
        raise UsageError("A study file holds one --report-to: remove the others for --write-study.")
    with replaced_file(path) as file:
        file.write(written(comparison))
    click.echo(f"Study written to {path}. Run it with: attnreg compare --study {path}")
