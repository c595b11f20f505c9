"""``attnreg evaluate RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnreg.errors import UsageError
from attnreg.experiments.cli.shared import RUNNING
from attnreg.experiments.options.option import GroupedCommand, names_like, option, together
from attnreg.experiments.options.settings import DATA, DEVICES, OUTPUT, shared_options
from attnreg.experiments.tasks.built_in import TASKS

_OPTIONS = (
    option("--task", group=DATA, shell_complete=names_like(lambda: TASKS),
           help=f"One of {', '.join(TASKS)} (default: the run's)."),
    *shared_options("task"),
    option("--data-dir", group=DATA,
           help="Folder with validation or test, or one file (default: the run's own)."),
    option("--split", group=DATA, type=click.Choice(["validation", "test"]),
           help="Split to score (default: validation)."),
    option("--submission", group=DATA, type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
           help="Instead of scoring, write GLUE's file (such as CoLA.tsv) for the test split into this folder."),
    option("--predict", group=DATA, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
           help="Instead of scoring, write each row, which needs no label, with its prediction to this .csv or .jsonl "
                "file (of a folder: the test split)."),
    option("--class", "classes", group=DATA, multiple=True, metavar="LABEL=CLASS",
           help="The model's class for a label of the data, such as pos=positive; repeatable."),
    option("--max-length", group=DATA, type=click.IntRange(min=4),
           help="Maximum tokens per input; longer inputs are cut (default: the run's)."),
    option("--name", group=OUTPUT,
           help="Name of the file with the scores (default: by task, data folder and split)."),
    option("--batch-size", group=RUNNING, type=click.IntRange(1, 100_000), default=64,
           help="Rows per forward pass."),
    option("--device", group=RUNNING, type=click.Choice(DEVICES),
           help="Device (default: the best available)."),
)  # fmt: skip
EPILOG = "Example: attnreg evaluate runs/finetune-mnli-seed0 --task hans --data-dir DIR"


@click.command("evaluate", cls=GroupedCommand, epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@together(_OPTIONS)
def evaluate(
    run: Path,
    split: str | None,
    submission: Path | None,
    predict: Path | None,
    classes: tuple[str, ...],
    name: str | None,
    **options: Any,
) -> None:
    """Score a trained model on other data or on another task, or predict new rows.

    RUN is a run folder; its network is the one that its report scores. The scores are saved in RUN/evaluations. The
    classes of another task are matched by name. For an mnli model on hans, neutral and contradiction count as
    non-entailment.
    """
    from attnreg.experiments.results.saved_model import SavedModel

    shared = {option: options.pop(option) for option in ("data_dir", "max_length", "batch_size", "device")}
    unused = {"--class": classes, "--name": name, "--metric": options["metric"], "--submission": predict and submission}
    if (predict or submission) and (given := next((each for each in unused if unused[each]), None)):
        what = "--predict" if predict else "--submission"
        raise UsageError(f"{what} writes predictions and scores nothing: remove {given}.")
    saved = SavedModel(run, options, **shared)
    if submission is not None:
        if split == "validation":
            raise UsageError("--submission is for the test split: remove --split validation.")
        for file, rows in saved.submit(submission).items():
            click.echo(f"Predictions of {rows} rows saved to {file}")
        return
    if predict is not None:
        rows = saved.predict(predict, split or "test")
        click.echo(f"Predictions of {rows} rows saved to {predict}")
        return
    split = split or "validation"
    if len(renamed := dict(map(_pair, classes))) < len(classes):
        raise UsageError(f"Expected one --class for each label, got {' and '.join(classes)}.")
    path, result = saved.score(split, name, renamed)
    scores = "  ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
    click.echo(f"{result['task']}, {split}, {result['rows']} rows: {scores}")
    click.echo(f"Network: {result['network']['select']} (epoch {result['network']['epoch']}).")
    click.echo(f"Scores saved to {path}")


def _pair(text: str) -> tuple[str, str]:
    label, sign, name = text.partition("=")
    if not (label and sign and name):
        raise UsageError(f"Expected --class LABEL=CLASS, such as --class pos=positive, got {text!r}.")
    return label, name
