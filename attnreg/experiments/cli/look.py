"""``attnreg plot RUN`` and ``attnreg doctor MODEL``: look at what is there."""

from __future__ import annotations

from pathlib import Path

import click

from attnreg.errors import InputError, one_line
from attnreg.experiments.options.option import GroupedCommand, option


@click.command("plot", cls=GroupedCommand, epilog="Example: attnreg plot runs/attendout-agreement-seed0")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--layer", type=click.IntRange(min=0), default=0, show_default=True, help="Layer of the attention plot, from 0."
)
@click.option("--fit-schedule", "pieces", type=click.IntRange(min=1), metavar="[PIECES]", is_flag=False, flag_value=2,
              help="Also print a BernoulliScheduleProvider that follows the drop rate of each layer, for --provider: a "
                   "line of PIECES equally long pieces (default: 2).")  # fmt: skip
def plot(run: Path, layer: int, pieces: int | None) -> None:
    """Plot drop rates, convergence and attention of a run.

    RUN is a run folder; the plots are saved in RUN/plots. A run of attendout also has a plot of its game. A plot that
    cannot be drawn is left out, with the reason.
    """
    if not run.is_dir():
        raise InputError(f"Run folder {run} not found.")
    from attnreg.experiments.folder.reader import RunReader
    from attnreg.experiments.results.plots.run import plot_run
    from attnreg.experiments.results.schedule import fit_schedule

    if (reader := RunReader(run)).finished:
        reader.check_files()
    schedule = None if pieces is None else fit_schedule(reader, pieces)
    made, left_out = plot_run(run, layer)
    for path in made:
        click.echo(path)
    for name, reason in left_out.items():
        click.echo(f"No {name}: {reason}", err=True)
    if schedule is not None:
        click.echo(schedule)


@click.command("doctor", cls=GroupedCommand, epilog="Example: attnreg doctor runs/finetune-agreement-seed0/model")
@click.argument("model")
@option("--compile", "compiled", is_flag=True, help="Also compile the model and compare its predictions.")
@click.pass_context
def doctor(ctx: click.Context, model: str, *, compiled: bool) -> None:
    """Show what is random in a model, and measure what of it repeats.

    MODEL is a folder with a model of transformers, or its name. Its head is that of its configuration. The exit code is
    1 if there is a fault.
    """
    import transformers as hf
    from safetensors import SafetensorError

    import attnreg
    from attnreg.experiments.tasks.models.pretrained import located

    place = located(Path(model), "MODEL")
    try:
        config = hf.AutoConfig.from_pretrained(model)
        head = getattr(hf, (config.architectures or [""])[0], hf.AutoModel)
        network = head.from_pretrained(model)
    except (ImportError, OSError, ValueError, SafetensorError) as error:
        raise InputError(f"Cannot load a model of transformers from {model} ({place}): {one_line(error)}") from error
    report = attnreg.doctor(network.train(), compiled=compiled)
    click.echo(report)
    ctx.exit(1 if report.faults else 0)
