"""``attnreg evaluate RUN``, ``attnreg plot RUN`` and ``attnreg doctor MODEL``: look at a run or a model."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import click

from attnreg._files import write_text
from attnreg.errors import InputError, UsageError, one_line
from attnreg.experiments.options.option import GroupedCommand, names_like, option, together
from attnreg.experiments.options.settings import DATA, DEVICE, OUTPUT, RUNNING, shared_options
from attnreg.experiments.tasks.built_in import TASKS
from attnreg.experiments.tasks.loading.files import folder_with_data
from attnreg.experiments.tasks.models.place import check_there

_OPTIONS = (
    option("--task", group=DATA, shell_complete=names_like(lambda: TASKS),
           help=f"One of {', '.join(TASKS)} (default: the run's)."),
    *shared_options("task"),
    option("--data-dir", group=DATA,
           help="Folder with validation or test, or one file (default: the run's)."),
    option("--split", group=DATA, type=click.Choice(["validation", "test"]),
           help="Split to score (default: validation)."),
    option("--class", "classes", group=DATA, multiple=True, metavar="LABEL=CLASS",
           help="The model's class for a label of the data, such as pos=positive; repeatable."),
    option("--max-length", group=DATA, type=click.IntRange(min=4),
           help="Maximum tokens per input; longer inputs are cut (default: the run's)."),
    option("--name", group=OUTPUT,
           help="Name of the file with the scores (default: by task, data folder and split)."),
    option("--batch-size", group=RUNNING, type=click.IntRange(1, 100_000), default=64,
           help="Rows per forward pass."),
    DEVICE,
)  # fmt: skip
EPILOG = "Example: attnreg evaluate runs/finetune-mnli-seed0 --task hans --data-dir DIR"


@click.command("evaluate", cls=GroupedCommand, epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@together(_OPTIONS)
def evaluate(
    run: Path,
    split: str | None,
    classes: tuple[str, ...],
    name: str | None,
    **options: Any,
) -> None:
    """Score a trained model on other data or on another task.

    RUN is a run folder; its network is the one that its report scores. The scores are saved in RUN/evaluations. The
    classes of another task are matched by name. For an mnli model on hans, neutral and contradiction count as
    non-entailment.
    """
    shared = {option: options.pop(option) for option in ("data_dir", "max_length", "batch_size", "device")}
    if len(renamed := dict(map(_pair, classes))) < len(classes):
        raise UsageError(f"Expected one --class per label, got {' and '.join(classes)}.")
    check_run(run)
    if shared["data_dir"] is not None:
        folder_with_data(Path(shared["data_dir"]), ())
    from attnreg.experiments.results.saved_model import SavedModel  # late: it imports torch

    saved = SavedModel(run, options, **shared)
    split = split or "validation"
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


def check_run(folder: Path) -> None:
    """Refuse a run folder that does not exist."""
    if not folder.is_dir():
        raise InputError(f"Run folder {folder} not found.")


@click.command("plot", cls=GroupedCommand, epilog="Example: attnreg plot runs/attendout-agreement-seed0")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--layer", type=click.IntRange(min=0), default=0, show_default=True, help="Layer of the attention plot, from 0."
)
@click.option("--tokens", metavar="TEXT", help="Also show what the run's regularizer drops of the tokens of this text.")
def plot(run: Path, layer: int, tokens: str | None) -> None:
    """Plot drop rates, convergence and attention of a run.

    RUN is a run folder; the plots are saved in RUN/plots. A run of attendout also has a plot of its game. A plot that
    cannot be drawn is left out, with the reason.
    """
    check_run(run)
    from attnreg.experiments.folder.run_folder import RunReader
    from attnreg.experiments.results.plots.attention import show_tokens
    from attnreg.experiments.results.plots.run import plot_run

    if (reader := RunReader(run)).finished:
        reader.check_files()
    dropped = None if tokens is None else show_tokens(reader, tokens)
    paths, left_out = plot_run(run, layer)
    for path in paths:
        click.echo(path)
    for name, reason in left_out.items():
        click.echo(f"No {name}: {reason}", err=True)
    if dropped is not None:
        page = run / "plots" / "tokens.html"
        page.parent.mkdir(exist_ok=True)
        title = f'<!doctype html>\n<meta charset="utf-8"><title>{html.escape(run.name)}</title>'
        write_text(page, f"{title}\n{dropped._repr_html_()}\n")
        click.echo(f"{dropped}\n{page}")


@click.command("doctor", cls=GroupedCommand, epilog="Example: attnreg doctor runs/finetune-agreement-seed0/model")
@click.argument("model")
@option("--compile", "compiled", is_flag=True, help="Also compile the model and compare its predictions.")
@click.pass_context
def doctor(ctx: click.Context, model: str, *, compiled: bool) -> None:
    """Show what is random in a model, and measure whether it repeats.

    MODEL is a folder with a model of transformers, or its name. Its head is that of its configuration. The exit code is
    1 if there is a fault.
    """
    place = check_there(model, "MODEL")
    import transformers as hf  # late, as all these: they import torch

    import attnreg
    from attnreg.experiments.tasks.models.lora import adapter_base

    if adapter_base(model) is not None:
        raise InputError(f"MODEL {model} holds an adapter, not a whole model: merge it (`merge_and_unload` of peft).")
    try:
        config = hf.AutoConfig.from_pretrained(model)
        head = getattr(hf, (config.architectures or [""])[0], None)
        if not (isinstance(head, type) and issubclass(head, hf.PreTrainedModel)):
            head = hf.AutoModel
        network = head.from_pretrained(model)
    except Exception as error:  # a configuration may be wrong in many ways
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"Cannot load a model of transformers from {model} ({place}): {reason}") from error
    report = attnreg.doctor(network.train(), compiled=compiled)
    click.echo(report)
    ctx.exit(1 if report.faults else 0)
