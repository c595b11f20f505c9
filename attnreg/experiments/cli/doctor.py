"""``attnreg doctor MODEL``."""

from __future__ import annotations

from pathlib import Path

import click

from attnreg.errors import InputError, one_line
from attnreg.experiments.options.option import GroupedCommand, option


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
