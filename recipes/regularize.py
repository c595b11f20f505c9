"""Fine-tuning under any provider or composition, written as an expression or in a YAML file."""

import click

import attnreg
from attnreg.training import provider_option, recipe


@recipe(
    "regularize",
    provider_option(),
    click.option("--provider-lr", type=click.FloatRange(min=0), default=1e-2, show_default=True,
                 help="Learning rate of what a provider learns."),
)  # fmt: skip
def regularize(run: "attnreg.training.Run", provider: str, provider_lr: float) -> None:
    """Fine-tuning under any provider or composition, written as an expression or in a YAML file.

    Example: attnreg recipe regularize --provider "OnLayers(AttentionLayerDrop(0.2), [0]) & AttentionDropout(0.1)"
    """
    parsed = attnreg.parse_provider(provider, run.model, run.total_steps)
    optimizer = run.optimizer(run.model, parsed, provider_lr)
    # Two passes, for providers that look at the batch first; for the others there is one.
    method = attnreg.training.TwoPass(
        run.model, optimizer, parsed, scheduler=run.schedule(optimizer), accelerator=run.accelerator
    )
    history = attnreg.training.fit(method, run)
    attnreg.training.report(run, history)
