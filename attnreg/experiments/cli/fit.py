"""``attnreg fit DATA`` and ``attnreg predict MODEL DATA``: a classifier of your rows, and its predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnreg._files import check_writable
from attnreg.errors import InputError, UsageError
from attnreg.experiments.options.option import GroupedCommand, option, together
from attnreg.experiments.options.settings import DATA, DEVICE, OUTPUT, RUNNING, THREADS, TRAINING
from attnreg.experiments.tasks.loading.files import PREDICTED, named, stem_of
from attnreg.experiments.tasks.models.place import check_there

_FIT = (
    option("--model", required=True, group=TRAINING, help="Folder or Hub name of a pretrained model."),
    option("--budget", default="15m", group=TRAINING,
           help="Time to spend on this machine, such as 90s, 15m or 2h."),
    option("--metric", type=click.Choice(["accuracy", "macro_f1", "pearson", "spearman"]), group=TRAINING,
           help="What the best is chosen by; the last two are for numbers (default: accuracy; pearson, if labels have "
           "fractions)."),
    option("--seed", type=click.IntRange(min=0), default=0, group=TRAINING, help="Seed of folds and training."),
    option("--text-columns", group=DATA, help="Text column; two, separated by a comma, are read as pairs "
           "(default: the only one that has texts)."),
    option("--label-column", group=DATA, help="Label column (default: the only one that has classes)."),
    option("--group-column", group=DATA, help="Rows of a group, such as one author's, stay together in a fold."),
    option("--drop-rare", is_flag=True, group=DATA,
           help="Leave out the rows of classes with fewer than four rows, which are refused otherwise."),
    option("--max-length", type=click.IntRange(min=4), group=DATA,
           help="Maximum tokens per text; longer ones are cut (default: 128, or up to 512 where that helps many)."),
    option("--output-dir", type=click.Path(path_type=Path, file_okay=False), group=OUTPUT,
           help="Folder for model and report (default: runs/fit-NAME)."),
    DEVICE,
    option("--threads", type=THREADS, group=RUNNING,
           help="CPU threads at most (default: torch's number)."),
)  # fmt: skip


@click.command("fit", cls=GroupedCommand, epilog="Example: attnreg fit reviews.csv --model MODEL --budget 15m")
@click.argument("data", type=click.Path(path_type=Path))
@together(_FIT)
def fit(
    data: Path,
    text_columns: str | None,
    label_column: str | None,
    group_column: str | None,
    drop_rare: bool,
    **options: Any,
) -> None:
    """Train the best classifier of your labelled texts within a time, and say what it will score.

    Labels that are numbers with fractions are predicted as numbers.
    DATA is a file (.csv, .tsv, .jsonl, .parquet), or a folder with train and, perhaps, validation, which is used too.
    The same command again continues a fit that was stopped.
    """
    from attnreg.experiments.fit.clock import seconds_of  # late: they are slow to import
    from attnreg.experiments.fit.table import labelled_rows

    seconds_of(options["budget"])
    check_there(options["model"])
    table = labelled_rows(data, text_columns, label_column, group_column, options["metric"], drop_rare)
    from attnreg.experiments.fit.command import fit_and_report  # late: it imports torch

    fit_and_report(data, table, **options)


@click.command("predict", cls=GroupedCommand, epilog="Example: attnreg predict runs/fit-reviews new.csv")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("data", type=click.Path(path_type=Path), required=False)
@option("--text-columns", group=DATA, help="Text columns (default: as in the fit, or the only one that has texts).")
@option("--output", type=click.Path(path_type=Path, dir_okay=False), group=OUTPUT,
        help="File to write, .csv or .jsonl (default: beside DATA, with .predicted in its name).")  # fmt: skip
@DEVICE
def predict(model: Path, data: Path | None, text_columns: str | None, output: Path | None, device: str | None) -> None:
    """Predict new rows: with a model of `attnreg fit`, classes, probabilities and what cannot be judged.

    MODEL is the folder of a fit or of a run of a recipe, whose predictions are classes or numbers. DATA is a file, or a
    folder with test (default: the test split of a run's data); all columns but a run's labels are kept.
    """
    if not model.is_dir():
        raise InputError(f"There is no folder {model}.")
    if data is not None and not data.exists():
        raise InputError(f"There is no file {data}.")
    source = Path(named(model).name) if data is None else named(data)
    output = output or source.with_name(f"{stem_of(source)}{PREDICTED}.csv")
    if output.suffix not in (".csv", ".jsonl"):
        raise UsageError(f"Expected --output to be a .csv or .jsonl file, got {output}.")
    if not output.parent.is_dir():
        raise InputError(f"There is no folder {output.parent} for {output.name}: make it.")
    check_writable(output.parent, "choose another place with --output")
    for path in (model, data):
        if path is not None and output.resolve().is_relative_to(path.resolve()):
            raise InputError(f"{output} would change {path}: choose another place with --output.")
    from attnreg.experiments.fit.command import predict_file  # late: it imports torch

    click.echo(predict_file(model, data, text_columns, output, device))
